"""flash_attn over the double of its library: every feature, idle rows, plans updated in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, UNTOUCHED, Case, attend, make_batch, make_case
from support.flash_attn_cpu import FlashAttnOnCpu, double

from jackfield.core.attention import AttentionBatch, AttentionSpec

__all__ = ["double"]

SLOPES = tuple(0.05 * head for head in range(6))
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 30},
    {"sliding_window": 2000},
    {"causal": False, "sliding_window": 30},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES, "sliding_window": 30},
    {"alibi_slopes": SLOPES, "sinks": True},
    {"sinks": True},
    {"num_heads": 2},
]
# Decoding; equal short queries; prefill; decoding on both sides of a prefill; long chunks.
BATCHES = [
    ([1, 256, 257, 40], [1, 1, 1, 1]),
    ([90, 3, 300], [3, 3, 3]),
    ([80, 300, 65], [80, 300, 65]),
    ([300, 70, 20, 258, 9], [1, 70, 1, 40, 1]),
    ([600], [100]),
]


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(6, 2, 32, 32, 0.2, torch.float16), **changes)


def case_of(spec: AttentionSpec, seq_lens: list[int], query_lens: list[int], **more: Any) -> Case:
    num_blocks = 5 + sum(-(-length // 256) for length in seq_lens)
    return make_case(
        spec, make_batch(seq_lens, query_lens, 256, num_blocks, **more), 256, num_blocks
    )


def backend_of(case: Case) -> FlashAttnOnCpu:
    return FlashAttnOnCpu(case.spec, case.cache_spec, CPU)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_feature(features: dict[str, Any], dtype: torch.dtype) -> None:
    for seq_lens, query_lens in BATCHES:
        case = case_of(layer(dtype=dtype, **features), seq_lens, query_lens)
        assert_meaning(case, *attend(backend_of(case), case, with_lse=True))


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [70, 300, 2], [1, 600, 1]], ids=str)
def test_rows_of_sequences_without_tokens_are_blank(
    features: dict[str, Any], query_lens: list[int]
) -> None:
    """Also where nobody has a block, and where such a sequence has more rows than all columns."""
    spec = layer(**features)
    for seq_lens in ([0, 300, 0], [0, 0, 0]):
        lengths = [
            max(have, new if have else 0) for have, new in zip(seq_lens, query_lens, strict=True)
        ]
        case = case_with_idle(spec, lengths, query_lens)
        assert_meaning(case, *attend(backend_of(case), case, with_lse=True))


def case_with_idle(spec: AttentionSpec, seq_lens: list[int], query_lens: list[int]) -> Case:
    """Query rows of sequences without tokens have no place in the cache."""
    stored = [new if have else 0 for have, new in zip(seq_lens, query_lens, strict=True)]
    real = make_batch(seq_lens, stored, 256, 12, extra_columns=0)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    slots = torch.full((sum(query_lens),), -1)
    batch = AttentionBatch.from_host(starts, real.seq_lens, real.block_table, slots)
    return make_case(spec, batch, 256, 12)


def test_an_output_and_a_query_at_odd_places_are_copied() -> None:
    case = case_of(layer(), [300, 20, 5], [1, 20, 1])
    expected = attend(backend_of(case), case)[0]
    rows, heads, size = case.query.shape
    storage = torch.zeros(rows * heads * size + 1, dtype=torch.float16)
    query = storage[1:].view(rows, heads, size).copy_(case.query)
    out = torch.full((rows * heads * size + 1,), UNTOUCHED, dtype=torch.float16)
    backend = backend_of(case)
    result = out[1:].view(rows, heads, size)
    backend.forward(query, case.cache, backend.plan(case.batch), result)
    assert torch.equal(result, expected)
    assert out[0] == UNTOUCHED


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 90, 1, 30], [4, 4, 4, 4]], ids=str)
def test_a_plan_updated_in_place(features: dict[str, Any], query_lens: list[int]) -> None:
    spec = layer(**features)
    first = case_of(spec, [600, 90, 300, 33], query_lens)
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    places = [part.arrays.tensors[0].data_ptr() for part in plan.parts]
    for seed, seq_lens in enumerate(([4, 700, 5, 40], [600, 600, 600, 600], [9, 90, 0, 30])):
        if seq_lens[2] == 0:
            later = case_with_idle(spec, seq_lens, query_lens)
        else:
            later = case_of(spec, seq_lens, query_lens, seed=seed, extra_columns=0)
        assert backend.plan(later.batch, into=plan) is plan
        assert [part.arrays.tensors[0].data_ptr() for part in plan.parts] == places
        fitting = FlashAttnOnCpu(later.spec, later.cache_spec, CPU)
        out = torch.full_like(later.query.contiguous(), UNTOUCHED)
        lse = torch.full(out.shape[:2], UNTOUCHED)
        fitting.forward(later.query, later.cache, plan, out, sinks=later.sinks, lse=lse)
        assert_meaning(later, out, lse)


def test_an_old_plan_stays_good() -> None:
    case = case_of(layer(), [300, 20, 5], [1, 20, 1])
    backend = backend_of(case)
    expected = attend(backend, case)[0]
    plan = backend.plan(case.batch)
    other = case_of(layer(), [100, 257], [1, 2])
    backend.plan(other.batch)
    out = torch.full_like(expected, UNTOUCHED)
    backend.forward(case.query, case.cache, plan, out)
    assert torch.equal(out, expected)
