"""What the backends on xformers hand to the library, and plans that are updated in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import xformers_double
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, UNTOUCHED, Case, attend, make_batch, make_case
from support.xformers_backends import XformersCutlassOnCpu, XformersOnCpu
from support.xformers_double import CALLS, CutlassFwOp, SplitKFwOp

from jackfield.backends.xformers import XformersOptions
from jackfield.core.attention import AttentionBatch, AttentionPlan, AttentionSpec

SPEC = AttentionSpec(6, 2, 32, 32, 0.2, torch.float16)


@pytest.fixture(autouse=True)
def calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def case_of(seq_lens: list[int], query_lens: list[int], block_size: int = 64, **more: Any) -> Case:
    batch = make_batch(seq_lens, query_lens, block_size, 40, **more)
    return make_case(SPEC, batch, block_size, 40)


def blocks(case: Case, sequence: int, count: int) -> list[int]:
    found: list[int] = case.batch.block_table_cpu[sequence, :count].tolist()
    return found


def test_decoding_is_one_call_that_pages() -> None:
    """Three sequences are rounded up to four, three columns to four."""
    case = case_of([65, 1, 64], [1, 1, 1], extra_columns=1)
    attend(XformersOnCpu(SPEC, case.cache_spec, CPU), case)
    (call,) = CALLS
    assert call.op is SplitKFwOp
    assert not call.wants_lse
    assert call.inputs.scale == 0.2
    assert call.query.shape == (1, 4, 2, 3, 32)
    assert call.key.shape == call.value.shape == (1, 40 * 64, 2, 3, 32)
    assert call.key.stride(3) == 0
    assert call.key.data_ptr() == case.cache.k.data_ptr()
    bias = call.bias
    assert bias.page_size == 64
    assert bias.block_tables.tolist() == [
        [*blocks(case, 0, 2), 0, 0],
        [*blocks(case, 1, 1), 0, 0, 0],
        [*blocks(case, 2, 1), 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert bias.q_seqinfo.seqstart.tolist() == bias.q_seqinfo.seqstart_py == [0, 1, 2, 3, 4]
    assert (bias.q_seqinfo.max_seqlen, bias.q_seqinfo.min_seqlen) == (1, 1)
    assert bias.k_seqinfo.seqlen.tolist() == bias.k_seqinfo.seqlen_py == [65, 1, 64, 0]
    assert bias.k_seqinfo.padding == bias.k_seqinfo.max_seqlen == 256


def test_a_power_of_two_of_sequences_is_read_where_it_lies() -> None:
    case = case_of([65, 5], [2, 2])
    attend(XformersOnCpu(SPEC, case.cache_spec, CPU), case)
    (call,) = CALLS
    assert call.query.data_ptr() == case.query.data_ptr()
    assert call.bias.q_seqinfo.seqstart.tolist() == [0, 2, 4]


def test_a_prefill_is_one_call_on_copied_keys() -> None:
    case = case_of([70, 20], [70, 17])
    attend(XformersOnCpu(SPEC, case.cache_spec, CPU), case, with_lse=True)
    (call,) = CALLS
    assert call.op is CutlassFwOp
    assert call.wants_lse
    assert type(call.bias) is xformers_double.BlockDiagonalCausalFromBottomRightMask
    assert call.query.shape == (1, 87, 6, 32)
    assert call.key.shape == (1, 90, 6, 32)
    assert call.bias.q_seqinfo.seqstart.tolist() == [0, 70, 87]
    assert call.bias.k_seqinfo.seqstart.tolist() == [0, 70, 90]
    keys = torch.cat(
        [case.cache.k[blocks(case, 0, 2)].flatten(0, 1)[:70], case.cache.k[blocks(case, 1, 1)][0]]
    )[:90]
    assert torch.equal(call.key[0], keys.repeat_interleave(3, dim=1))


def test_a_mixed_batch_is_a_call_for_each_operator() -> None:
    case = case_of([5, 70, 9, 20], [1, 30, 1, 20])
    attend(XformersOnCpu(SPEC, case.cache_spec, CPU), case)
    assert [call.op for call in CALLS] == [SplitKFwOp, CutlassFwOp]
    assert torch.equal(CALLS[0].query[0].flatten(1, 2), case.query[[0, 31]])
    assert CALLS[0].bias.k_seqinfo.seqlen_py == [5, 9]
    assert torch.equal(CALLS[1].query[0], case.query[[*range(1, 31), *range(32, 52)]])


def test_short_queries_of_one_length_are_paged_beside_decoding_and_others_are_not() -> None:
    for query_lens, operators in (
        ([1, 4, 4], [SplitKFwOp, SplitKFwOp]),
        ([1, 16, 16], [SplitKFwOp, SplitKFwOp]),
        ([1, 17, 17], [SplitKFwOp, CutlassFwOp]),
        ([1, 4, 5], [SplitKFwOp, CutlassFwOp]),
    ):
        CALLS.clear()
        case = case_of([40, 30, 70], query_lens)
        attend(XformersOnCpu(SPEC, case.cache_spec, CPU), case)
        assert [call.op for call in CALLS] == operators


def test_keys_before_the_window_are_not_copied() -> None:
    spec = AttentionSpec(6, 2, 32, 32, 0.2, torch.float16, sliding_window=10)
    batch = make_batch([50, 30], [1, 4], 16, 40)
    case = make_case(spec, batch, 16, 40)
    attend(XformersCutlassOnCpu(spec, case.cache_spec, CPU), case)
    (call,) = CALLS
    assert call.bias._window_size == 10
    assert call.bias.k_seqinfo.seqstart.tolist() == [0, 10, 23]
    newest = case.cache.k[blocks(case, 0, 4)].flatten(0, 1)[40:50]
    assert torch.equal(call.key[0, :10, ::3], newest)


def test_a_sequence_without_tokens_is_left_out_of_copies_and_in_pages() -> None:
    starts = torch.tensor([0, 1, 19, 38], dtype=torch.int32)
    lens = torch.tensor([0, 0, 20], dtype=torch.int32)
    slots = torch.full((38,), -1)
    real = case_of([1, 1, 20], [1, 18, 19])
    batch = AttentionBatch.from_host(starts, lens, real.batch.block_table_cpu, slots)
    case = make_case(SPEC, batch, 64, 40)
    out, lse = attend(XformersOnCpu(SPEC, case.cache_spec, CPU), case, with_lse=True)
    assert [call.op for call in CALLS] == [SplitKFwOp, CutlassFwOp]
    assert CALLS[0].bias.k_seqinfo.seqlen_py == [0]
    assert CALLS[1].bias.q_seqinfo.seqstart_py == [0, 19]
    assert not out[:19].any()
    assert bool((lse[:19] == -torch.inf).all())
    assert_meaning(case, out, lse)


def test_copies_are_bounded() -> None:
    """Elements of a key: 6 heads, 32 for the key and 32 for the value."""
    options = XformersOptions(max_gathered_elements=6 * 64 * 50)
    case = case_of([20, 30, 1, 70, 5], [20, 30, 1, 70, 5], 16)
    attend(XformersCutlassOnCpu(SPEC, case.cache_spec, CPU, options), case)
    assert [call.key.shape[1] for call in CALLS] == [50, 1, 70, 5]


def decode(seq_lens: list[int], seed: int = 0, columns: int = 4) -> Case:
    needed = -(-max(seq_lens) // 64)
    return case_of(seq_lens, [1] * len(seq_lens), seed=seed, extra_columns=columns - needed)


def test_a_plan_is_updated_in_place() -> None:
    first = decode([1, 1, 1])
    backend = XformersOnCpu(SPEC, first.cache_spec, CPU)
    plan = backend.plan(first.batch)
    bias = plan.paged[0].bias
    tensors = [bias.block_tables, bias.k_seqinfo.seqlen, bias.q_seqinfo.seqstart]
    places = [tensor.data_ptr() for tensor in tensors]
    for seed, lengths in enumerate(([200, 64, 65], [0, 256, 1], [5, 0, 0])):
        case = decode(lengths, seed)
        assert backend.plan(case.batch, into=plan) is plan
        assert [tensor.data_ptr() for tensor in tensors] == places
        assert bias.k_seqinfo.seqlen.tolist() == bias.k_seqinfo.seqlen_py == [*lengths, 0]
        out = torch.full(case.query.shape, UNTOUCHED, dtype=SPEC.dtype)
        lse = torch.full(case.query.shape[:2], UNTOUCHED)
        backend.forward(case.query, case.cache, plan, out, lse=lse)
        assert_meaning(case, out, lse)


def test_an_old_plan_stays_good() -> None:
    cases = [decode([65, 3]), decode([200, 1], 1), case_of([70, 20], [30, 20])]
    backend = XformersOnCpu(SPEC, cases[0].cache_spec, CPU)
    plans = [backend.plan(case.batch) for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        out = torch.full(case.query.shape, UNTOUCHED, dtype=SPEC.dtype)
        backend.forward(case.query, case.cache, plan, out)
        assert_meaning(case, out, None)


def test_plans_that_cannot_be_updated() -> None:
    first = decode([5, 3])
    backend = XformersOnCpu(SPEC, first.cache_spec, CPU)
    plan = backend.plan(first.batch)
    with pytest.raises(ValueError, match="other query lengths"):
        backend.plan(decode([5, 3, 1]).batch, into=plan)
    with pytest.raises(ValueError, match="at most 4 columns, not of 5"):
        backend.plan(decode([5, 3], columns=5).batch, into=plan)
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.plan(first.batch, into=AttentionPlan())
    prefill = case_of([70, 20], [30, 20])
    with pytest.raises(ValueError, match="copies keys from the cache"):
        backend.plan(prefill.batch, into=backend.plan(prefill.batch))
