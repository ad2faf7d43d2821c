"""Cases of the benchmark, their tensors, and what is compared."""

from __future__ import annotations

import pytest
import torch

from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.conformance.attention.subject import share_of_bound
from jackfield.core.attention import KVCache, KVLayout
from jackfield.core.errors import ConfigError
from jackfield.entrypoints.bench.cases import CPU_CASES, CUDA_CASES, BenchCase, chosen_cases
from jackfield.entrypoints.bench.data import (
    BenchData,
    Layer,
    expected_rows,
    make_data,
    sampled_runs,
)

MIXED = BenchCase(4, 2, 16, ((33, 1), (20, 1), (9, 9), (40, 7)))
CPU = torch.device("cpu")


def layer(dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> Layer:
    """On the CPU."""
    return Layer(dtype, kv_dtype or dtype, CPU)


def keys_in_order(data: BenchData, cache: torch.Tensor) -> torch.Tensor:
    """The keys or values of all sequences, read through the block table."""
    size = data.cache_spec.block_size
    parts = []
    for row, (length, _) in zip(data.batch.block_table, data.case.sequences, strict=True):
        parts.append(cache[row[: -(-length // size)].long()].flatten(0, 1)[:length])
    return torch.cat(parts)


def test_names_and_sizes() -> None:
    decode = CUDA_CASES[0]
    assert decode.name == "decode 64x4096 28/4/128"
    assert decode.num_bytes(2, 2) == 2 * 2 * 128 * (64 * 4096 * 4 + 64 * 28)
    assert decode.num_bytes(2, 1) == 2 * 128 * (64 * 4096 * 4 + 2 * 64 * 28)
    assert decode.flops == 4 * 64 * 4096 * 28 * 128
    prefill = BenchCase(28, 4, 128, ((8192, 8192),))
    assert prefill.name == "prefill 1x8192 28/4/128"
    assert prefill.flops == 4 * 28 * 128 * (8192 * 8193 // 2)
    assert MIXED.kind == "mixed"
    assert MIXED.num_tokens == 18
    rows = [33, 20, *range(1, 10), *range(34, 41)]
    assert MIXED.flops == 4 * 4 * 16 * sum(rows)
    assert BenchCase(4, 2, 16, ((8, 1),) * 3 + ((5, 5),)).name == "mixed 3x8+1x5 4/2/16"


def test_choice_of_cases() -> None:
    assert chosen_cases((), "cpu") == CPU_CASES
    assert chosen_cases((), "cuda") == CUDA_CASES
    assert {case.kind for case in CUDA_CASES} == {case.kind for case in CPU_CASES}
    assert [case.kind for case in chosen_cases(["prefill"], "cuda")] == ["prefill"] * 5
    (one,) = chosen_cases(["decode 1x4096 28/4/128"], "cpu")
    assert one.sequences == ((4096, 1),)
    names = [case.name for case in (*CUDA_CASES, *CPU_CASES)]
    assert len(set(names)) == len(names)
    for name in names:
        assert [case.name for case in chosen_cases([name], "cuda")] == [name]
    with pytest.raises(ConfigError, match=r"--case 'decode 64x4096 28/4' and|no part of a case"):
        chosen_cases(["decode 64x5096 28/4/128"], "cuda")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_the_same_numbers_for_every_block_size(layout: KVLayout, block_size: int) -> None:
    one = make_data(MIXED, layer(), 8, "NHD")
    other = make_data(MIXED, layer(), block_size, layout)
    assert torch.equal(one.query, other.query)
    assert torch.equal(keys_in_order(one, one.cache.k), keys_in_order(other, other.cache.k))
    assert torch.equal(keys_in_order(one, one.cache.v), keys_in_order(other, other.cache.v))
    assert other.cache.k.is_contiguous() is (layout == "NHD" or block_size == 1)
    blocks = other.batch.block_table[0, : -(-33 // block_size)]
    assert len(set(blocks.tolist())) == len(blocks)


def test_new_tokens_are_not_yet_in_the_cache() -> None:
    data = make_data(MIXED, layer(), 16, "NHD")
    slots = data.batch.slot_mapping
    assert len(slots) == MIXED.num_tokens
    assert not data.cache.k.flatten(0, 1)[slots].any()
    assert not data.query.is_contiguous()
    context = keys_in_order(data, data.cache.k).flatten(1).any(dim=1)
    assert int(context.sum()) == 33 + 20 + 9 + 40 - 18


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.half)],
)
def test_a_right_backend_is_within_the_bound(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    chosen = layer(dtype, kv_dtype)
    data = make_data(MIXED, chosen, 16, "NHD")
    backend = TorchSdpaBackend(data.spec, data.cache_spec, CPU)
    backend.write_kv(data.key, data.value, data.cache, data.batch.slot_mapping)
    out = backend.forward(data.query, data.cache, backend.plan(data.batch), data.new_out())
    expected = expected_rows(MIXED, chosen)
    assert expected.rows.tolist() == list(range(18))
    assert 0 < share_of_bound(out, expected.out, expected.bound) <= 1


def test_a_cache_of_eight_bits_has_scales() -> None:
    chosen = layer(torch.float32, torch.float8_e4m3fn)
    data = make_data(MIXED, chosen, 16, "HND")
    wide = make_data(MIXED, layer(), 16, "HND")
    cache: KVCache = data.cache
    assert cache.k_scale != 1 != cache.v_scale
    exact = keys_in_order(wide, wide.cache.k)
    read = keys_in_order(data, cache.k.float()) * cache.k_scale
    # Three bits behind the point: an error of a sixteenth at most.
    assert torch.allclose(read, exact, rtol=1 / 16, atol=cache.k_scale * 2**-9)


def test_rows_that_are_compared() -> None:
    large = sampled_runs(CUDA_CASES[0])
    assert [run[0] for run in large][:2] == [0, 4]
    assert large[-1] == (63, 0, 1)
    assert len(large) == 16
    prompt = sampled_runs(BenchCase(28, 4, 128, ((8192, 8192),)))
    assert prompt[0] == (0, 0, 4)
    assert prompt[-1] == (0, 8188, 8192)
    assert len(prompt) == 4
    assert sampled_runs(BenchCase(1, 1, 8, ((6, 6),))) == [(0, 0, 4), (0, 4, 6)]
