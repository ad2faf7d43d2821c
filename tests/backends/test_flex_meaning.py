"""flex, run eagerly, computes what the contract says, and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_asserts import (
    assert_meaning,
    assert_same_values,
    assert_write_kv,
    same_bytes,
)
from support.attention_cases import (
    CPU,
    UNTOUCHED,
    Case,
    attend,
    cases,
    make_batch,
    make_case,
    visible_slots,
)
from torch import Tensor

from jackfield.backends.flex import FlexBackend, FlexOptions
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache

few = settings(max_examples=20, deadline=None)


def backend_of(case: Case, max_score_elements: int = 1 << 22) -> FlexBackend:
    options = FlexOptions(max_score_elements=max_score_elements)
    return FlexBackend(case.spec, case.cache_spec, CPU, options)


def with_table(batch: AttentionBatch, table: Tensor) -> AttentionBatch:
    return replace(batch, block_table=table, block_table_cpu=table)


@few
@given(cases(), st.booleans(), st.sampled_from([1, 500, 1 << 22]))
def test_equals_the_oracle(case: Case, with_lse: bool, scores: int) -> None:
    out, lse = attend(backend_of(case, max_score_elements=scores), case, with_lse=with_lse)
    assert_meaning(case, out, lse if with_lse else None)


@few
@given(cases(), st.sampled_from([float("nan"), float("inf"), float("-inf"), 6e4]))
def test_slots_of_no_visible_key_do_not_matter(case: Case, poison: float) -> None:
    hidden = ~visible_slots(case)
    poisoned = KVCache(k=case.cache.k.clone(), v=case.cache.v.clone())
    poisoned.k[hidden], poisoned.v[hidden] = poison, poison
    backend = backend_of(case)
    assert_same_values(
        attend(backend, case, with_lse=True),
        attend(backend, replace(case, cache=poisoned), with_lse=True),
    )


@few
@given(cases(), st.integers(0, 99), st.sampled_from([-7, 2**31 - 1]))
def test_physical_places_and_stale_table_tails_do_not_matter(
    case: Case, seed: int, garbage: int
) -> None:
    num_blocks = case.cache_spec.num_blocks
    new_place = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    table = case.batch.block_table_cpu
    first_token = torch.arange(table.shape[1]) * case.cache_spec.block_size
    stale = first_token >= case.batch.seq_lens_cpu[:, None]
    moved = torch.where(stale, garbage, new_place[table.long().clamp(0, num_blocks - 1)]).int()
    elsewhere = replace(
        case,
        batch=with_table(case.batch, moved),
        cache=KVCache(
            k=case.cache.k[new_place.argsort()],
            v=case.cache.v[new_place.argsort()],
        ),
    )
    backend = backend_of(case)
    assert_same_values(
        attend(backend, case, with_lse=True), attend(backend, elsewhere, with_lse=True)
    )


@few
@given(cases())
def test_forward_repeats_itself_and_leaves_its_inputs_alone(case: Case) -> None:
    backend = backend_of(case)
    inputs = (case.cache.k, case.cache.v, case.query)
    before = [tensor.clone() for tensor in inputs]
    first = attend(backend, case, with_lse=True)
    assert all(same_bytes(old, new) for old, new in zip(before, inputs, strict=True))
    packed = replace(case, query=case.query.contiguous())
    assert_same_values(first, attend(backend, packed, with_lse=True))


@few
@given(cases(), st.data())
def test_write_kv_changes_the_named_slots_and_no_other_byte(
    case: Case, data: st.DataObject
) -> None:
    skipped = data.draw(st.lists(st.booleans(), min_size=len(case.key), max_size=len(case.key)))
    assert_write_kv(backend_of(case), case, skipped)


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 7},
    {"causal": False, "sliding_window": 7},
    {"logits_soft_cap": 3.0},
    {"alibi_slopes": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)},
    {"sinks": True},
    {"v_head_size": 40},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_every_feature_in_every_dtype(features: dict[str, Any], dtype: torch.dtype) -> None:
    spec = replace(AttentionSpec(6, 2, 24, 24, 0.2, dtype), **features)
    case = make_case(spec, make_batch([1, 15, 33, 40], [1, 1, 7, 20], 16, 12), 16, 12)
    out, lse = attend(backend_of(case), case, with_lse=True)
    assert_meaning(case, out, lse)


def test_a_block_at_several_logical_places() -> None:
    """Of two sequences, and twice of one: its keys stand at as many positions."""
    spec = AttentionSpec(2, 1, 16, 16, 0.25, torch.float32, alibi_slopes=(0.1, 0.4))
    case = make_case(spec, make_batch([12, 9], [3, 2], 4, 8), 4, 8)
    table = case.batch.block_table_cpu.clone()
    table[0, 2] = table[0, 0]
    table[1, 1] = table[0, 0]
    case = replace(case, batch=with_table(case.batch, table))
    out, lse = attend(backend_of(case), case, with_lse=True)
    assert_meaning(case, out, lse)


def test_sequences_that_see_different_parts_of_a_shared_block() -> None:
    """What lies between the parts is of no visible key, and poisoned."""
    spec = AttentionSpec(2, 1, 16, 16, 0.25, torch.float32, sliding_window=3)
    case = make_case(spec, make_batch([4, 16], [1, 1], 16, 4), 16, 4)
    table = case.batch.block_table_cpu.clone()
    table[1, 0] = table[0, 0]
    case = replace(case, batch=with_table(case.batch, table))
    hidden = ~visible_slots(case)
    expected, _ = attend(backend_of(case), case)
    assert int(hidden[table[0, 0]].sum()) == 10
    case.cache.k[hidden], case.cache.v[hidden] = torch.nan, torch.nan
    out, _ = attend(backend_of(case), case)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("scores", [1, 1 << 22])
def test_rows_without_a_visible_key_are_zero(causal: bool, sinks: bool, scores: int) -> None:
    """Two rows of a sequence of no tokens at all, with a usual one in their call or not."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32, causal=causal, sinks=sinks)
    case = make_case(spec, make_batch([0, 5], [0, 2], 4, 8), 4, 8)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    case = replace(
        case, batch=replace(case.batch, query_start_loc=starts, query_start_loc_cpu=starts)
    )
    out, lse = attend(backend_of(case, max_score_elements=scores), case, with_lse=True)
    assert bool((out[:2] == 0).all())
    assert bool((lse[:2] == -torch.inf).all())
    assert_meaning(case, out, lse)


def test_an_empty_batch_writes_nothing() -> None:
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32)
    case = make_case(spec, make_batch([], [], 4, 8), 4, 8)
    out, lse = attend(backend_of(case), case, with_lse=True)
    assert bool((out == UNTOUCHED).all())
    assert bool((lse == UNTOUCHED).all())


def test_a_large_cache_costs_nothing() -> None:
    """The scores of all its slots would take 4 GB."""
    spec = AttentionSpec(4, 1, 16, 16, 0.25, torch.float16)
    case = make_case(spec, make_batch([300], [256], 16, 1 << 16), 16, 1 << 16)
    out, lse = attend(backend_of(case), case, with_lse=True)
    assert_meaning(case, out, lse)


def test_a_plan_serves_many_layers_and_outlives_the_next_plan() -> None:
    spec = AttentionSpec(6, 2, 32, 32, 0.2, torch.float32)
    small = make_case(spec, make_batch([5, 20], [1, 3], 4, 20), 4, 20, seed=1)
    large = make_case(spec, make_batch([40, 33], [40, 1], 4, 20), 4, 20, seed=2)
    backend = backend_of(small)
    with torch.inference_mode():
        plans = backend.plan(small.batch), backend.plan(large.batch)
    for _ in range(2):
        for case, plan in zip((small, large), plans, strict=True):
            out = torch.full((len(case.query), 6, 32), UNTOUCHED)
            backend.forward(case.query, case.cache, plan, out)
            assert_meaning(case, out, None)
