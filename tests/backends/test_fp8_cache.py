"""A KV cache of 8 bits: what is written to it, byte for byte, and what is read from it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, Case, make_batch, make_case, visible_slots
from support.triton_cases import DEVICE, attend, backend_of, interpreted, layer, placed
from torch import Tensor

from jackfield.backends._kv_store import as_stored
from jackfield.backends._nhd_cache import NhdCache
from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.backends.triton_paged import store
from jackfield.backends.triton_paged.backend import TritonBackend
from jackfield.backends.triton_paged.store import KernelStore, by_token_places
from jackfield.backends.triton_paged.tensors import cache_places
from jackfield.conformance.attention.generate import quantised
from jackfield.core.attention import AttentionBackend, KVCacheSpec, KVLayout, allocate_kv_cache
from jackfield.core.errors import UnsupportedError

__all__ = ["interpreted"]

FP8 = torch.float8_e4m3fn
ALL = torch.arange(256, dtype=torch.uint8).view(FP8)
FINITE = torch.tensor(
    sorted({one for one in ALL.double().tolist() if one == one}), dtype=torch.float64
)
SCALES = [(1.0, 1.0), (0.37, 3.1), (4.0, 0.25)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False, "sliding_window": 20},
    {"logits_soft_cap": 1.5},
    {"alibi_slopes": tuple(0.1 * head for head in range(6)), "sinks": True},
    {"head_size": 24, "v_head_size": 40},
    {"scale": -0.1},
]
BATCH = ([1, 16, 60, 33], [1, 1, 7, 12])


def between() -> Tensor:
    """Every number that has 8 bits, the numbers half way between two, and those next to them; both
    infinities and NaN. float32, a multiple of 16 of them."""
    exact = FINITE.float()
    middle = ((FINITE[1:] + FINITE[:-1]) / 2).float()
    up, down = (torch.nextafter(middle, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    beyond = torch.tensor([449.0, 464.0, 464.1, 480.0, 1e6, 3e38, torch.inf, 1e-30, 1e-45, 0.0])
    numbers = torch.cat([exact, middle, up, down, beyond, -beyond, torch.tensor([torch.nan])])
    return torch.cat([numbers, torch.zeros(-len(numbers) % 16)])


def nearest(numbers: Tensor) -> Tensor:
    """The bytes of the nearest numbers of 8 bits; of two that are equally near, the even one."""
    distances = (numbers.double()[:, None].clamp(-448, 448) - FINITE[None]).abs()
    near = distances == distances.amin(dim=1, keepdim=True)
    odd = FINITE.to(FP8).view(torch.uint8) % 2
    best = FINITE[(near * (2 - odd)).argmax(dim=1)]
    # Zero is one number in FINITE: its sign is that of what was rounded.
    signed = best.abs().copysign(numbers.double())
    return torch.where(numbers.isnan(), torch.nan, signed).to(FP8).view(torch.uint8)


def same_stored(one: Tensor, other: Tensor) -> bool:
    """The same bytes; NaN of either sign."""
    first, second = (
        torch.where(half.double().isnan(), 0x7F, half.view(torch.uint8)) for half in (one, other)
    )
    return torch.equal(first, second)


def test_rounding_is_to_nearest_even() -> None:
    numbers = between()
    assert same_stored(as_stored(numbers, FP8, 1.0), nearest(numbers).view(FP8))
    assert same_stored(quantised(numbers, FP8, 1.0), nearest(numbers).view(FP8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.1, 0.25])
def test_stored_numbers_are_divided_by_the_scale_in_float32(
    scale: float, dtype: torch.dtype
) -> None:
    numbers = (between() * scale).to(dtype)
    quotient = numbers.float() / torch.tensor(scale, dtype=torch.float32)
    assert same_stored(as_stored(numbers, FP8, scale), nearest(quotient).view(FP8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layout", "head_size", "scales"),
    [("HND", 16, (1.0, 0.37)), ("NHD", 16, (3.1, 0.25)), ("HND", 24, (1.0, 1.0))],
)
def test_the_kernel_writes_what_the_definition_says(
    layout: KVLayout, head_size: int, scales: tuple[float, float], dtype: torch.dtype
) -> None:
    numbers = between()
    count = -(-len(numbers) // head_size)
    flat = torch.zeros(count * head_size)
    flat[: len(numbers)] = numbers
    key, value = ((flat * scale).to(dtype).view(count, 1, head_size).to(DEVICE) for scale in scales)
    spec = KVCacheSpec(-(-count // 16) + 1, 16, 1, head_size, head_size, FP8)
    cache = allocate_kv_cache(spec, layout, DEVICE, *scales)
    slots = torch.arange(count, device=DEVICE) + 3
    if layout == "HND":
        places = cache_places(cache, spec)
    else:
        places = by_token_places(cache.k.flatten(0, 1), cache.v.flatten(0, 1))
    KernelStore(spec, DEVICE).write(key, value, cache, slots, places)
    for stored, new, scale in ((cache.k, key, scales[0]), (cache.v, value, scales[1])):
        tokens = stored.cpu().view(torch.uint8).flatten(0, 1)
        right = quantised(new.cpu(), FP8, scale)
        assert same_stored(tokens[3 : count + 3].view(FP8), right)
        assert not tokens[:3].any()
        assert not tokens[count + 3 :].any()


def test_slots_of_minus_one_are_left_alone() -> None:
    case = make_case(layer(), make_batch(*BATCH, 16, 12), 16, 12, kv_dtype=FP8, scales=(0.5, 2.0))
    case = placed(case)
    slots = case.batch.slot_mapping.clone()
    slots[::2] = -1
    layout: KVLayout = "NHD"
    mine = allocate_kv_cache(case.cache_spec, layout, DEVICE, 0.5, 2.0)
    NhdCache("test", case.cache_spec, DEVICE).write(case.key, case.value, mine, slots)
    theirs = allocate_kv_cache(case.cache_spec, "HND", DEVICE, 0.5, 2.0)
    backend_of(case).write_kv(case.key, case.value, theirs, slots)
    assert same_stored(mine.k.cpu(), theirs.k.cpu())
    assert same_stored(mine.v.cpu(), theirs.v.cpu())
    written = (mine.k.cpu().double() != 0).flatten(2).any(dim=2).flatten()
    assert set(written.nonzero().flatten().tolist()) == set(slots[1::2].tolist())


def eight_bits(spec_changes: dict[str, Any], scales: tuple[float, float], seed: int = 0) -> Case:
    """A batch on a cache of 8 bits, with NaN and the largest numbers in slots that nobody sees."""
    batch = make_batch(*BATCH, 16, 12, seed=seed)
    case = make_case(layer(**spec_changes), batch, 16, 12, kv_dtype=FP8, scales=scales)
    hidden = ~visible_slots(case)
    case.cache.k.view(torch.uint8)[hidden] = 0x7F
    case.cache.v.view(torch.uint8)[hidden] = 0xFE
    return case


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_the_kernels_read_what_the_cache_stands_for(
    features: dict[str, Any], dtype: torch.dtype
) -> None:
    case = placed(eight_bits({"dtype": dtype, **features}, SCALES[len(features)]))
    assert_meaning(case, *attend(backend_of(case), case))


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_torch_reads_what_the_cache_stands_for(
    features: dict[str, Any], dtype: torch.dtype, with_lse: bool
) -> None:
    case = eight_bits({"dtype": dtype, **features}, SCALES[len(features)])
    case = placed(case, TorchSdpaBackend)
    backend = TorchSdpaBackend(case.spec, case.cache_spec, DEVICE)
    out, lse = attend(backend, case, with_lse=with_lse)
    assert_meaning(case, out, lse if with_lse else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [TritonBackend, TorchSdpaBackend])
def test_every_number_of_8_bits_is_read_exactly(
    kind: type[AttentionBackend], dtype: torch.dtype
) -> None:
    """A sequence of one token returns its value, whatever its key is."""
    spec = layer(num_heads=2, num_kv_heads=1, dtype=dtype)
    # 8 blocks of one token each; the cache has 32 elements in a head.
    batch = make_batch([1] * 8, [1] * 8, 16, 8)
    case = make_case(spec, batch, 16, 8, kv_dtype=FP8, scales=(1.0, 2.0))
    tokens = torch.where(ALL.double().isnan(), 0, ALL.view(torch.uint8)).view(8, 1, 32)
    slots = batch.slot_mapping_cpu
    case.cache.v.view(torch.uint8)[slots // 16, slots % 16] = tokens
    case = placed(case, kind)
    out, _ = attend(kind(spec, case.cache_spec, DEVICE), case)
    expected = 2 * tokens.view(FP8).double().expand(8, 2, 32)
    assert torch.equal(out[:8].double(), expected)


def test_a_result_does_not_depend_on_the_batch() -> None:
    case = placed(eight_bits({"dtype": torch.float16}, (0.37, 3.1)))
    together, lse = attend(backend_of(case), case)
    batch = case.batch
    starts = batch.query_start_loc_cpu.tolist()
    for index, length in enumerate(BATCH[0]):
        rows = slice(starts[index], starts[index + 1])
        alone = make_batch([length], [BATCH[1][index]], 16, 12)
        table = batch.block_table[index : index + 1]
        alone = replace(
            alone,
            block_table=table,
            block_table_cpu=table.cpu(),
            seq_lens=alone.seq_lens.to(DEVICE),
            query_start_loc=alone.query_start_loc.to(DEVICE),
        )
        own = replace(case, batch=alone, query=case.query[rows])
        out, own_lse = attend(backend_of(own), own)
        assert torch.equal(out, together[rows])
        assert torch.equal(own_lse, lse[rows])


def test_an_old_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    cuda = torch.device("cuda")
    spec, cache = layer(), KVCacheSpec(4, 16, 2, 32, 32, FP8)
    reasons = TritonBackend.unsupported(spec, cache, cuda)
    assert reasons == [
        "kv_cache_dtype=float8_e4m3fn is not supported (supported: bfloat16, float16, float32)",
        "kv_cache_dtype=float8_e4m3fn needs compute capability 8.9, not 8.6",
    ]
    assert TritonBackend.unsupported(spec, replace(cache, dtype=torch.float32), cuda) == []
    with pytest.raises(UnsupportedError, match=r"needs compute capability 8\.9"):
        TritonBackend(spec, cache, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert TritonBackend.unsupported(spec, cache, cuda) == []


def test_torch_writes_where_triton_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_compiler(spec: KVCacheSpec, device: torch.device) -> KernelStore:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(store, "KernelStore", without_compiler)
    store._compiles.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="jackfield"):
            assert not store._compiles(CPU)
            assert not store._compiles(CPU)
    finally:
        store._compiles.cache_clear()
    assert len(caplog.records) == 1
    assert "RuntimeError: Failed to find C compiler" in caplog.text
    assert "torch writes the KV cache" in caplog.text


def test_what_the_kernel_cannot_write_is_left_to_torch() -> None:
    spec = KVCacheSpec(4, 16, 2, 32, 32, FP8)
    assert not store.kernel_writes(spec, CPU)
    assert not store.kernel_writes(replace(spec, head_size=2048), DEVICE)
    assert not store.kernel_writes(replace(spec, dtype=torch.float64), DEVICE)
    rows = torch.zeros(3, 2, 32)
    assert store.kernel_reads(rows, rows)
    assert not store.kernel_reads(rows.double(), rows.double())
    assert not store.kernel_reads(rows, rows.half())
    assert not store.kernel_reads(rows.transpose(1, 2), rows.transpose(1, 2))
