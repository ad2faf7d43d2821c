"""The oracle against results that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.attention_cases import (
    PADDING_ROWS,
    Case,
    cases,
    make_batch,
    make_case,
    visible_keys,
    visible_slots,
)
from torch import Tensor

from jackfield.conformance.attention.oracle import attention_oracle, write_kv_oracle
from jackfield.core.attention import AttentionSpec, KVCache


def one_head(**features: Any) -> AttentionSpec:
    return AttentionSpec(1, 1, 16, 16, 1.0, torch.float32, **features)


def uniform_case(spec: AttentionSpec, seq_len: int, query_len: int) -> Case:
    """Every score is 0 and the value of key ``j`` is the unit vector ``e_j``: the output shows the
    weights themselves."""
    case = make_case(spec, make_batch([seq_len], [query_len], 4, 5), 4, 5)
    cache = KVCache(k=torch.zeros_like(case.cache.k), v=torch.zeros_like(case.cache.v))
    for position in range(seq_len):
        block = int(case.batch.block_table_cpu[0, position // 4])
        cache.v[block, position % 4, :, position] = 1
    return replace(case, cache=cache, query=torch.zeros_like(case.query))


def results(case: Case) -> tuple[Tensor, Tensor]:
    return attention_oracle(case.spec, case.query, case.cache, case.batch, case.sinks)


@pytest.mark.parametrize("window", [1, 4, 9, 50])
@pytest.mark.parametrize("query_len", [1, 3, 9])
def test_a_window_counts_the_row_itself(window: int, query_len: int) -> None:
    out, lse = results(uniform_case(one_head(sliding_window=window), 9, query_len))
    for row, position in enumerate(range(9 - query_len, 9)):
        first = max(0, position - window + 1)
        expected = torch.zeros(16, dtype=torch.float64)
        expected[first : position + 1] = 1 / (position + 1 - first)
        torch.testing.assert_close(out[row, 0], expected, rtol=0, atol=1e-15)
        assert float(lse[row, 0]) == pytest.approx(math.log(position + 1 - first))


def test_without_causality_every_row_sees_every_key() -> None:
    out, _ = results(uniform_case(one_head(causal=False), 8, 3))
    torch.testing.assert_close(
        out[:3, 0, :8], torch.full((3, 8), 1 / 8, dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_a_window_without_causality_hides_the_past_only() -> None:
    out, _ = results(uniform_case(one_head(causal=False, sliding_window=2), 8, 3))
    assert [int((row != 0).sum()) for row in out[:3, 0]] == [4, 3, 2]


def test_alibi_lowers_a_score_by_slope_times_distance() -> None:
    out, _ = results(uniform_case(one_head(alibi_slopes=(math.log(2),)), 3, 1))
    assert out[0, 0, :3].tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=1e-14)


def test_a_sink_takes_weight_and_is_not_in_the_lse() -> None:
    case = replace(uniform_case(one_head(sinks=True), 3, 1), sinks=torch.tensor([math.log(5)]))
    out, lse = results(case)
    assert out[0, 0, :3].tolist() == pytest.approx([1 / 8] * 3)
    assert float(lse[0, 0]) == pytest.approx(math.log(3))


def test_the_soft_cap_bends_scores() -> None:
    case = uniform_case(one_head(logits_soft_cap=2.0), 2, 1)
    newest = int(case.batch.block_table_cpu[0, 0])
    case.query[0, 0, 0], case.cache.k[newest, 1, 0, 0] = 6.0, 1.0
    out, _ = results(case)
    weight = math.exp(2 * math.tanh(3.0))
    assert out[0, 0, :2].tolist() == pytest.approx([1 / (1 + weight), weight / (1 + weight)])


def test_query_heads_read_the_head_of_their_group() -> None:
    spec = AttentionSpec(4, 2, 16, 16, 1.0, torch.float32)
    case = make_case(spec, make_batch([1], [1], 4, 2), 4, 2)
    out, _ = results(case)
    stored = case.cache.v[int(case.batch.block_table_cpu[0, 0]), 0].double()
    assert torch.equal(out[0], stored[[0, 0, 1, 1]])


def test_huge_scores_and_sinks_do_not_overflow() -> None:
    case = uniform_case(one_head(sinks=True), 2, 1)
    case.query[0, 0], case.cache.k[:] = 1e3, 1e3
    out, lse = results(replace(case, sinks=torch.tensor([16e6])))
    assert out[0, 0, :2].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert float(lse[0, 0]) == pytest.approx(16e6 + math.log(2))


def test_a_row_with_no_visible_key_is_zero() -> None:
    batch = make_batch([0], [0], 4, 2)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    case = make_case(
        one_head(), replace(batch, query_start_loc=starts, query_start_loc_cpu=starts), 4, 2
    )
    out, lse = results(case)
    assert bool((out[0] == 0).all())
    assert float(lse[0, 0]) == -math.inf


def test_sinks_are_given_exactly_if_the_spec_has_them() -> None:
    case = make_case(one_head(), make_batch([1], [1], 4, 2), 4, 2)
    with pytest.raises(ValueError, match="sinks must be given exactly"):
        attention_oracle(case.spec, case.query, case.cache, case.batch, torch.zeros(1))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_rows_that_nobody_owns_are_nan_and_hidden_slots_do_not_matter(case: Case) -> None:
    out, lse = results(case)
    assert bool(out[case.batch.num_tokens :].isnan().all())
    assert len(out) == case.batch.num_tokens + PADDING_ROWS
    hidden = ~visible_slots(case)
    case.cache.k[hidden], case.cache.v[hidden] = math.nan, math.nan
    again, lse_again = results(case)
    owned = case.batch.num_tokens
    assert torch.equal(out[:owned], again[:owned])
    assert torch.equal(lse[:owned], lse_again[:owned])


def test_visible_keys_are_a_range_of_positions() -> None:
    assert visible_keys(one_head(), 8, 5) == range(6)
    assert visible_keys(one_head(sliding_window=3), 8, 5) == range(3, 6)
    assert visible_keys(one_head(causal=False, sliding_window=3), 8, 5) == range(3, 8)
    assert len(visible_keys(one_head(), 0, -1)) == 0


def test_write_kv_stores_by_slot_and_skips_minus_one() -> None:
    cache = KVCache(k=torch.zeros(3, 2, 1, 1), v=torch.zeros(3, 2, 1, 1))
    new = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    after = write_kv_oracle(new, 10 * new, cache, torch.tensor([5, -1, 2]))
    assert after.k.flatten().tolist() == [0, 0, 3, 0, 0, 1]
    assert after.v.flatten().tolist() == [0, 0, 30, 0, 0, 10]
    assert not cache.k.any()
