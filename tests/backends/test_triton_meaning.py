"""The triton backend computes what the contract says, and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.attention_asserts import assert_meaning, same_bytes
from support.attention_cases import CPU, UNTOUCHED, make_batch, make_case, visible_slots
from support.triton_cases import (
    DEVICE,
    SMALL_TILES,
    attend,
    backend_of,
    empty_results,
    interpreted,
    layer,
    placed,
)
from torch import Tensor

from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.conformance.attention.oracle import write_kv_oracle
from jackfield.core.attention import AttentionSpec, KVCache

__all__ = ["interpreted"]

few = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 20},
    {"causal": False, "sliding_window": 20},
    {"sliding_window": 1},
    {"logits_soft_cap": 5.0},
    {"alibi_slopes": tuple(0.1 * head for head in range(6))},
    {"sinks": True},
    {"v_head_size": 16},
    {"head_size": 24, "v_head_size": 40},
    {"scale": -0.1},
    {
        "causal": False,
        "sliding_window": 9,
        "logits_soft_cap": 3.0,
        "alibi_slopes": (0.5,) * 6,
        "sinks": True,
    },
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BATCH = ([1, 16, 60, 70, 33], [1, 1, 7, 1, 12])


def assert_same_bits(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    assert same_bytes(first[0], second[0])
    assert same_bytes(first[1], second[1])


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_feature_with_poison_in_hidden_slots(
    features: dict[str, Any], dtype: torch.dtype
) -> None:
    spec = layer(dtype=dtype, **features)
    case = make_case(spec, make_batch(*BATCH, 16, 24), 16, 24)
    hidden = ~visible_slots(case)
    case.cache.k[hidden], case.cache.v[hidden] = torch.nan, torch.inf
    on_device = placed(case)
    assert_meaning(on_device, *attend(backend_of(on_device), on_device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [16, 64, 72, 128, 256])
def test_tiles_that_are_chosen_for_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(3, 1, head_size, head_size, 0.1, dtype)
    case = placed(make_case(spec, make_batch([100, 70], [1, 45], 32, 8), 32, 8))
    assert_meaning(case, *attend(backend_of(case, None), case))


@pytest.mark.parametrize("group_size", [1, 7, 8, 40])
def test_group_sizes(group_size: int) -> None:
    spec = AttentionSpec(2 * group_size, 2, 16, 16, 0.25, torch.float32)
    case = placed(make_case(spec, make_batch([33, 40, 19], [1, 5, 2], 8, 16), 8, 16))
    assert_meaning(case, *attend(backend_of(case), case))


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("length", [-1, 0, 1])
def test_lengths_beside_a_block_edge(block_size: int, length: int) -> None:
    seq_lens = [block_size + length, 2 * block_size + length, 2]
    batch = make_batch(seq_lens, [1, 9, 2], block_size, 12, garbage=-1)
    case = placed(make_case(layer(), batch, block_size, 12))
    assert_meaning(case, *attend(backend_of(case), case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_a_cache_of_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    batch = make_batch([37, 20], [1, 12], 16, 6)
    case = placed(make_case(layer(dtype=dtype), batch, 16, 6, kv_dtype=kv_dtype))
    assert_meaning(case, *attend(backend_of(case), case))


@few
@given(
    seq_lens=st.lists(st.integers(1, 50), max_size=4),
    data=st.data(),
    window=st.none() | st.integers(1, 40),
    causal=st.booleans(),
    garbage=st.sampled_from([-1, 2**31 - 1]),
    layout=st.booleans(),
)
def test_any_small_batch(
    seq_lens: list[int],
    data: st.DataObject,
    window: int | None,
    causal: bool,
    garbage: int,
    layout: bool,
) -> None:
    query_lens = [
        data.draw(st.just(1) | st.integers(1, length), label="query_len") for length in seq_lens
    ]
    batch = make_batch(seq_lens, query_lens, 8, 30, garbage=garbage)
    host = make_case(layer(sliding_window=window, causal=causal), batch, 8, 30)
    case = placed(host)
    if layout:  # the same numbers by token instead of by head: strides are all that tells
        case = replace(case, cache=KVCache(k=host.cache.k.to(DEVICE), v=host.cache.v.to(DEVICE)))
    assert_meaning(case, *attend(backend_of(case), case))


@pytest.mark.parametrize(
    ("poison", "features"),
    [(float("nan"), {}), (float("inf"), {"sliding_window": 20}), (6e4, {"causal": False})],
    ids=str,
)
def test_slots_of_no_visible_key_do_not_matter(poison: float, features: dict[str, Any]) -> None:
    spec = layer(dtype=torch.float16, **features)
    case = make_case(spec, make_batch(*BATCH, 16, 24), 16, 24)
    hidden = ~visible_slots(case)
    clean = placed(case)
    case.cache.k[hidden], case.cache.v[hidden] = poison, poison
    backend = backend_of(clean)
    assert_same_bits(attend(backend, clean), attend(backend, placed(case)))


def test_physical_places_and_stale_table_tails_do_not_matter() -> None:
    case = make_case(layer(), make_batch(*BATCH, 16, 24), 16, 24)
    new_place = torch.randperm(24, generator=torch.Generator().manual_seed(5))
    table = case.batch.block_table_cpu
    stale = torch.arange(table.shape[1]) * 16 >= case.batch.seq_lens_cpu[:, None]
    moved = torch.where(stale, -7, new_place[table.long().clamp(0, 23)]).int()
    elsewhere = replace(
        case,
        batch=replace(case.batch, block_table=moved, block_table_cpu=moved),
        cache=KVCache(k=case.cache.k[new_place.argsort()], v=case.cache.v[new_place.argsort()]),
    )
    backend = backend_of(case)
    assert_same_bits(attend(backend, placed(case)), attend(backend, placed(elsewhere)))


@pytest.mark.parametrize("features", [{}, {"sliding_window": 20}], ids=str)
@pytest.mark.parametrize("options", [SMALL_TILES, None], ids=["small", "chosen"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(
    features: dict[str, Any], options: TritonOptions | None
) -> None:
    case = placed(make_case(layer(**features), make_batch(*BATCH, 16, 24), 16, 24))
    backend = backend_of(case, options)
    out, lse = attend(backend, case)
    starts = case.batch.query_start_loc_cpu
    for index, query_len in enumerate(BATCH[1]):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        own_starts = torch.tensor([0, query_len], dtype=torch.int32)
        one = slice(index, index + 1)
        batch = replace(
            case.batch,
            query_start_loc=own_starts.to(DEVICE),
            query_start_loc_cpu=own_starts,
            seq_lens=case.batch.seq_lens[one],
            seq_lens_cpu=case.batch.seq_lens_cpu[one],
            block_table=case.batch.block_table[one],
            block_table_cpu=case.batch.block_table_cpu[one],
            max_query_len=query_len,
            max_seq_len=BATCH[0][index],
        )
        alone = attend(backend, replace(case, batch=batch, query=case.query[rows]))
        assert_same_bits(alone, (out[rows], lse[rows]))


def test_strided_and_packed_inputs_give_the_same_bits() -> None:
    case = placed(make_case(layer(), make_batch(*BATCH, 16, 24), 16, 24))
    backend = backend_of(case)
    odd = torch.zeros(len(case.query), 6 * 32 + 3, device=DEVICE)
    odd[:, 1:-2] = case.query.flatten(1)
    strided = replace(case, query=odd[:, 1:-2].view(-1, 6, 32))
    assert strided.query.stride(0) % 8
    assert_same_bits(attend(backend, case), attend(backend, strided))


def test_forward_repeats_itself_and_leaves_its_inputs_alone() -> None:
    case = placed(make_case(layer(), make_batch(*BATCH, 16, 24), 16, 24))
    inputs = (case.cache.k, case.cache.v, case.query)
    before = [tensor.clone() for tensor in inputs]
    backend = backend_of(case)
    first = attend(backend, case)
    assert_same_bits(first, attend(backend, case))
    assert all(same_bytes(old, new) for old, new in zip(before, inputs, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("sinks", [True, False])
def test_rows_without_a_visible_key_are_zero(causal: bool, rows: int, sinks: bool) -> None:
    """Query rows of a sequence of no tokens at all, decoded or prefilled, beside a usual one."""
    spec = layer(causal=causal, sinks=sinks)
    case = make_case(spec, make_batch([0, rows + 30], [0, rows + 10], 8, 8), 8, 8)
    starts = torch.tensor([0, rows, rows + 10], dtype=torch.int32)
    batch = replace(case.batch, query_start_loc=starts, query_start_loc_cpu=starts)
    case = placed(replace(case, batch=batch))
    out, lse = attend(backend_of(case), case)
    assert bool((out[:rows] == 0).all())
    assert bool((lse[:rows] == -torch.inf).all())
    assert_meaning(case, out, lse)


@pytest.mark.parametrize("num_heads", [2, 40])
def test_a_block_table_without_columns_is_no_null_pointer(num_heads: int) -> None:
    """A sequence without tokens alone: torch gives an empty tensor the address 0."""
    spec = AttentionSpec(num_heads, 1, 16, 16, 0.25, torch.float32)
    case = make_case(spec, make_batch([0], [0], 8, 2, extra_columns=0), 8, 2)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    batch = replace(case.batch, query_start_loc=starts, query_start_loc_cpu=starts)
    assert batch.block_table.numel() == 0
    case = placed(replace(case, batch=batch))
    backend = backend_of(case)
    assert backend.plan(case.batch).table.data_ptr() != 0
    out, lse = attend(backend, case)
    assert bool((out[:1] == 0).all())
    assert bool((lse[:1] == -torch.inf).all())


def test_an_empty_batch_does_nothing() -> None:
    case = placed(make_case(layer(), make_batch([], [], 8, 4), 8, 4))
    out, lse = attend(backend_of(case), case)
    assert bool((out == UNTOUCHED).all())
    assert bool((lse == UNTOUCHED).all())


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v_head_size", [24, 32])
def test_write_kv_changes_the_named_slots_and_no_other_byte(
    dtype: torch.dtype, kv_dtype: torch.dtype, v_head_size: int
) -> None:
    spec = layer(dtype=dtype, v_head_size=v_head_size)
    host = make_case(spec, make_batch([5, 17, 8], [5, 3, 1], 16, 6), 16, 6, kv_dtype=kv_dtype)
    host.cache.k[:, -1], host.cache.v[:, 0] = torch.nan, torch.nan
    slots = host.batch.slot_mapping_cpu.clone()
    slots[::3] = -1
    expected = write_kv_oracle(host.key, host.value, host.cache, slots)
    case = placed(host)
    backend_of(case).write_kv(case.key, case.value, case.cache, slots.to(DEVICE))
    assert same_bytes(case.cache.k.to(CPU), expected.k)
    assert same_bytes(case.cache.v.to(CPU), expected.v)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_write_kv_converts_all_numbers(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Every bfloat16, and every one with something to round."""
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    values = (bits + (0 if dtype == torch.bfloat16 else 0x8001)).view(torch.float32).to(dtype)
    spec = AttentionSpec(1, 1, 256, 256, 0.1, dtype)
    host = make_case(spec, make_batch([256], [256], 16, 17), 16, 17, kv_dtype=kv_dtype)
    host = replace(host, key=values.view(256, 1, 256), value=values.view(256, 1, 256))
    expected = write_kv_oracle(host.key, host.value, host.cache, host.batch.slot_mapping_cpu)
    case = placed(host)
    backend_of(case).write_kv(case.key, case.value, case.cache, case.batch.slot_mapping)
    torch.testing.assert_close(case.cache.k.to(CPU), expected.k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.cache.v.to(CPU), expected.v, rtol=0, atol=0, equal_nan=True)


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    """Its middle is never touched, so that no memory is needed for it."""
    spec = AttentionSpec(2, 1, 256, 256, 0.1, torch.float16)
    num_blocks = 2**31 // (16 * 256) + 8
    case = make_case(spec, make_batch([20, 40], [1, 20], 16, 6), 16, 6)
    sparse = [
        torch.empty(num_blocks, 1, 16, 256, dtype=torch.float16, device=DEVICE).transpose(1, 2)
        for _ in range(2)
    ]
    table = case.batch.block_table_cpu
    far = torch.where(table < 6, table + num_blocks - 6, table)
    for target, source in zip(sparse, (case.cache.k, case.cache.v), strict=True):
        target[-6:] = source.to(DEVICE)
    batch = replace(case.batch, block_table_cpu=far)
    cache_spec = replace(case.cache_spec, num_blocks=num_blocks)
    case = placed(case)
    backend = backend_of(replace(case, cache_spec=cache_spec))
    cache = KVCache(k=sparse[0], v=sparse[1])
    out, lse = empty_results(case)
    backend.forward(case.query, cache, backend.plan(batch), out, lse=lse)
    assert_meaning(case, out.to(CPU), lse.to(CPU))
    slots = torch.tensor([num_blocks * 16 - 1], device=DEVICE)
    backend.write_kv(case.key[:1], case.value[:1], cache, slots)
    assert torch.equal(cache.k[-1, -1], case.key[0])
    assert torch.equal(cache.v[-1, -1], case.value[0])
