"""Faults that paged attention kernels have had in public, tried on torch_sdpa.

Each test names the reports it goes back to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cases import CPU, UNTOUCHED, Case, attend, make_batch, make_case
from torch import Tensor

from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.conformance.attention.oracle import attention_oracle
from jackfield.core.attention import AttentionSpec, KVCache, KVCacheSpec

FLOAT32_TOLERANCE = 2e-5


def spec_of(num_heads: int, num_kv_heads: int, head_size: int, **features: Any) -> AttentionSpec:
    scale = head_size**-0.5
    return AttentionSpec(
        num_heads, num_kv_heads, head_size, head_size, scale, torch.float32, **features
    )


def run(case: Case) -> Tensor:
    backend = TorchSdpaBackend(case.spec, case.cache_spec, CPU)
    out: Tensor = attend(backend, case)[0]
    return out[: case.batch.num_tokens]


def error(case: Case) -> float:
    expected, _ = attention_oracle(case.spec, case.query, case.cache, case.batch, case.sinks)
    return float((run(case).double() - expected[: case.batch.num_tokens]).abs().max())


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_garbage_in_slots_never_written(kind: str) -> None:
    """vllm#641: a weight of zero times NaN."""
    lengths = [1, 15, 16, 17, 33]
    case = make_case(spec_of(4, 2, 16), make_batch(lengths, lengths, 16, 12), 16, 12)
    case.cache.k.fill_(torch.nan)
    case.cache.v.fill_(torch.nan)
    backend = TorchSdpaBackend(case.spec, case.cache_spec, CPU)
    backend.write_kv(case.key, case.value, case.cache, case.batch.slot_mapping)
    if kind == "decode":
        decode = make_batch(lengths, [1] * 5, 16, 12)
        case = replace(case, batch=decode, query=case.query[: decode.num_tokens])
    assert error(case) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 112, 128, 256])
def test_every_head_size_and_group_size(head_size: int) -> None:
    """vllm PR #34570, flashinfer#996: an unwritten output at head size 32, group sizes refused in
    the middle of a generation."""
    for num_heads, num_kv_heads in [(1, 1), (4, 4), (6, 2), (10, 2), (12, 2), (14, 2), (16, 2)]:
        spec = spec_of(num_heads, num_kv_heads, head_size)
        for query_len in (21, 1):
            case = make_case(spec, make_batch([21], [query_len], 16, 4), 16, 4)
            assert error(case) <= FLOAT32_TOLERANCE, (num_heads, num_kv_heads, query_len)


def uniform(spec: AttentionSpec, seq_lens: list[int], query_lens: list[int]) -> Case:
    """Scores of 0 and unit vectors as values: the output shows the weights themselves."""
    case = make_case(spec, make_batch(seq_lens, query_lens, 4, 12), 4, 12)
    cache = KVCache(k=torch.zeros_like(case.cache.k), v=torch.zeros_like(case.cache.v))
    for line, length in zip(case.batch.block_table_cpu, seq_lens, strict=True):
        for position in range(length):
            cache.v[int(line[position // 4]), position % 4, :, position] = 1
    return replace(case, cache=cache, query=torch.zeros_like(case.query))


@pytest.mark.parametrize("window", [1, 4, 9, 50])
@pytest.mark.parametrize("query_len", [9, 1, 3])
def test_a_window_counts_the_row_itself(window: int, query_len: int) -> None:
    """vllm#3385: one key too many or too few, differently in prefill and decode."""
    weights = run(uniform(spec_of(1, 1, 16, sliding_window=window), [9], [query_len]))[-1, 0]
    visible = min(window, 9)
    expected = torch.zeros(16)
    expected[9 - visible : 9] = 1 / visible
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("query_len", [20, 1])
def test_the_soft_cap_is_applied(query_len: int) -> None:
    """sglang#33915: accepted and dropped."""
    batch = make_batch([20], [query_len], 16, 3)
    capped = make_case(spec_of(4, 2, 16, logits_soft_cap=5.0), batch, 16, 3)
    capped = replace(capped, query=capped.query * 6)
    plain = replace(capped, spec=spec_of(4, 2, 16))
    assert float((run(capped) - run(plain)).abs().max()) > 0.05
    assert error(capped) <= FLOAT32_TOLERANCE


def test_a_soft_cap_of_zero_is_refused() -> None:
    """The same report: what "off" is must be unmistakable; it is None."""
    with pytest.raises(ValueError, match="logits_soft_cap=0"):
        spec_of(4, 2, 16, logits_soft_cap=0.0)


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    """vllm PR #47671, vllm#50427: block id times stride in 32 bits."""
    num_blocks, shape = 150_016, (16, 8, 128)
    dtype = torch.bfloat16
    spec = AttentionSpec(8, 8, 128, 128, 0.1, dtype)
    # Memory that is not touched is not taken: some 10 GB of addresses, a few pages.
    cache = KVCache(
        k=torch.empty((num_blocks, *shape), dtype=dtype),
        v=torch.empty((num_blocks, *shape), dtype=dtype),
    )
    backend = TorchSdpaBackend(spec, KVCacheSpec(num_blocks, 16, 8, 128, 128, dtype), CPU)
    key, value, query = (torch.randn(40, 8, 128).to(dtype) for _ in range(3))
    outputs = []
    for first_block in (0, 150_000):
        slots = torch.arange(first_block * 16, first_block * 16 + 40)
        backend.write_kv(key, value, cache, slots)
        table = torch.arange(first_block, first_block + 3, dtype=torch.int32)[None]
        batch = make_batch([40], [1], 16, 3, extra_columns=0)
        batch = replace(batch, block_table=table, block_table_cpu=table)
        out = torch.full((1, 8, 128), UNTOUCHED, dtype=dtype)
        outputs.append(backend.forward(query[:1], cache, backend.plan(batch), out))
    assert torch.equal(outputs[0], outputs[1])
    assert not bool((outputs[0] == UNTOUCHED).all())


def test_rows_sliced_out_of_a_fused_projection() -> None:
    """sglang PR #31667, flashinfer#3800: strided rows read as if they were packed."""
    case = make_case(spec_of(4, 2, 16), make_batch([5, 7, 1], [3, 1, 1], 4, 8), 4, 8)
    assert case.query.stride(0) == 128
    assert not case.query.is_contiguous()
    results = []
    for query, key, value in (
        (case.query, case.key, case.value),
        (case.query.contiguous(), case.key.contiguous(), case.value.contiguous()),
    ):
        cache = KVCache(k=case.cache.k.clone(), v=case.cache.v.clone())
        backend = TorchSdpaBackend(case.spec, case.cache_spec, CPU)
        backend.write_kv(key, value, cache, case.batch.slot_mapping)
        results.append((run(replace(case, query=query, cache=cache)), cache.k, cache.v))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_causality_counts_from_the_newest_token() -> None:
    """flash-attention#402, #351, #1778: with a past, the mask was aligned to the wrong corner."""
    weights = run(uniform(spec_of(1, 1, 16), [8, 3, 8], [3, 1, 8]))
    visible = [int((row != 0).sum()) for row in weights[:, 0]]
    assert visible == [6, 7, 8, 3, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_continued_chunk_equals_the_rows_of_one_prefill() -> None:
    """The same reports, with random data."""
    case = make_case(spec_of(4, 2, 16), make_batch([8], [8], 4, 4), 4, 4)
    chunk = replace(case, batch=make_batch([8], [3], 4, 4), query=case.query[5:])
    torch.testing.assert_close(run(chunk), run(case)[5:], rtol=0, atol=FLOAT32_TOLERANCE)
