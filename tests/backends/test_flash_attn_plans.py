"""What flash-attn is given for a batch: which function, which lengths, blocks and switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cases import CPU, attend, make_batch, make_case
from support.flash_attn_cpu import FlashAttnOnCpu, double
from support.flash_attn_double import Call, Double

from jackfield.core.attention import AttentionBatch, AttentionPlan, AttentionSpec, KVCacheSpec

__all__ = ["double"]

GARBAGE = 2**31 - 1


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(6, 2, 32, 32, 0.2, torch.float16), **changes)


def batch_of(query_lens: list[int], seq_lens: list[int], table: list[list[int]]) -> AttentionBatch:
    return AttentionBatch.from_host(
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32).view(len(seq_lens), len(table[0]) if table else 0),
        torch.full((sum(query_lens),), -1),
    )


def calls_of(
    double: Double, batch: AttentionBatch, spec: AttentionSpec | None = None, lse: bool = False
) -> list[Call]:
    """The calls that a batch takes."""
    case = make_case(spec or layer(), batch, 256, 12)
    attend(FlashAttnOnCpu(case.spec, case.cache_spec, CPU), case, with_lse=lse)
    calls: list[Call] = double.calls
    return calls


def test_decoding_is_one_call_in_which_heads_of_a_group_are_rows(double: Double) -> None:
    batch = batch_of([1, 1], [300, 5], [[7, 3, GARBAGE, GARBAGE], [2, -1, -1, 0]])
    (call,) = calls_of(double, batch)
    given = call.arguments
    assert call.function == "fwd_kvcache"
    assert given["q"].shape == given["out_"].shape == (2, 3, 2, 32)
    assert given["seqlens_k_"].tolist() == [300, 5]
    assert given["block_table_"].tolist() == [[7, 3], [2, 0]]
    assert given["is_causal"] is False
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    assert given["softmax_scale"] == 0.2
    assert given["softcap"] == 0.0
    assert given["num_splits"] == 0
    assert given["alibi_slopes_"] is None


def test_decoding_writes_to_its_place(double: Double) -> None:
    case = make_case(layer(), batch_of([1, 1], [300, 5], [[7, 3], [2, 0]]), 256, 12)
    backend = FlashAttnOnCpu(case.spec, case.cache_spec, CPU)
    out = torch.zeros(len(case.query), 6, 32, dtype=torch.float16)
    backend.forward(case.query, case.cache, backend.plan(case.batch), out)
    assert double.calls[0].arguments["out_"].data_ptr() == out.data_ptr()
    assert double.calls[0].arguments["q"].data_ptr() == case.query.data_ptr()


def test_decoding_with_a_window_keeps_heads_apart(double: Double) -> None:
    batch = batch_of([1, 1], [300, 5], [[7, 3], [2, 0]])
    (call,) = calls_of(double, batch, layer(sliding_window=100))
    assert call.arguments["q"].shape == (2, 1, 6, 32)
    assert call.arguments["is_causal"] is True
    assert (call.arguments["window_size_left"], call.arguments["window_size_right"]) == (99, 0)


@pytest.mark.parametrize(("window", "left"), [(None, 511), (100, 99), (4096, 511)])
@pytest.mark.parametrize("query_lens", [[1, 1], [65, 2]])
def test_alibi_always_has_a_window(
    double: Double, query_lens: list[int], window: int | None, left: int
) -> None:
    """Without one the library would add other numbers, with other sums."""
    batch = batch_of(query_lens, [300, 5], [[7, 3], [2, 0]])
    slopes = tuple(0.1 * head for head in range(6))
    (call,) = calls_of(double, batch, layer(sliding_window=window, alibi_slopes=slopes))
    given = call.arguments
    assert given["is_causal"] is True
    assert (given["window_size_left"], given["window_size_right"]) == (left, 0)
    assert given["alibi_slopes_"].tolist() == pytest.approx(slopes)


@pytest.mark.parametrize(("window", "left"), [(511, 510), (512, -1), (4096, -1)])
def test_a_window_that_hides_nothing_is_left_out(double: Double, window: int, left: int) -> None:
    batch = batch_of([1, 1], [300, 5], [[7, 3, 9], [2, 0, 9]])
    (call,) = calls_of(double, batch, layer(sliding_window=window))
    assert call.arguments["window_size_left"] == left


def test_equal_short_queries_are_not_packed(double: Double) -> None:
    batch = batch_of([64, 64], [300, 64], [[7, 3], [2, 0]])
    (call,) = calls_of(double, batch)
    assert call.function == "fwd_kvcache"
    assert call.arguments["q"].shape == (2, 64, 6, 32)
    assert call.arguments["is_causal"] is True


@pytest.mark.parametrize("query_lens", [[65, 65], [64, 63]])
def test_other_queries_are_packed(double: Double, query_lens: list[int]) -> None:
    batch = batch_of(query_lens, [300, 65], [[7, 3, GARBAGE], [2, GARBAGE, GARBAGE]])
    (call,) = calls_of(double, batch, layer(causal=False, sliding_window=9))
    given = call.arguments
    assert call.function == "varlen_fwd"
    assert given["cu_seqlens_q"].tolist() == [0, query_lens[0], sum(query_lens)]
    assert given["cu_seqlens_k"].tolist() == [0, 300, 365]
    assert given["max_seqlen_q"] == query_lens[0]
    assert given["max_seqlen_k"] == 512
    assert given["block_table_"].tolist() == [[7, 3], [2, 0]]
    assert given["is_causal"] is False
    assert (given["window_size_left"], given["window_size_right"]) == (8, -1)


def test_a_mixed_batch_is_two_calls(double: Double) -> None:
    batch = batch_of(
        [1, 70, 0, 1, 3], [300, 70, 9, 4, 3], [[7, 3], [2, -1], [4, 4], [5, 8], [6, 6]]
    )
    decode, prefill = calls_of(double, batch)
    assert decode.arguments["seqlens_k_"].tolist() == [300, 4]
    assert decode.arguments["block_table_"].tolist() == [[7, 3], [5, 0]]
    assert prefill.arguments["cu_seqlens_q"].tolist() == [0, 70, 73]
    assert prefill.arguments["cu_seqlens_k"].tolist() == [0, 70, 73]
    assert prefill.arguments["block_table_"].tolist() == [[2], [6]]


def test_a_packed_sequence_without_tokens_reads_keys_of_block_0(double: Double) -> None:
    batch = batch_of([300, 2], [0, 2], [[-1], [2]])
    (call,) = calls_of(double, batch)
    assert call.arguments["cu_seqlens_k"].tolist() == [0, 300, 302]
    assert call.arguments["block_table_"].tolist() == [[0, 0], [2, 0]]


def test_an_empty_batch_is_no_call(double: Double) -> None:
    assert calls_of(double, batch_of([], [], [])) == []
    assert calls_of(double, batch_of([0], [5], [[1]])) == []


def test_what_cannot_be_updated_in_place() -> None:
    cache = KVCacheSpec(12, 256, 2, 32, 32, torch.float16)
    backend = FlashAttnOnCpu(layer(), cache, CPU)
    plan = backend.plan(batch_of([1, 1], [300, 5], [[7, 3], [2, 0]]))
    with pytest.raises(
        ValueError, match=r"planned for query_start_loc=\[0, 1, 2\], not .*\[0, 1\]"
    ):
        backend.plan(batch_of([1], [300], [[7, 3]]), into=plan)
    with pytest.raises(ValueError, match="up to 2 columns, not for 3"):
        backend.plan(batch_of([1, 1], [300, 5], [[7, 3, 1], [2, 0, 1]]), into=plan)
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.plan(batch_of([1], [300], [[7, 3]]), into=AttentionPlan())


def test_an_update_widens_and_narrows_what_is_read(double: Double) -> None:
    case = make_case(layer(), batch_of([1, 1], [300, 5], [[7, 3, 0], [2, 0, 0]]), 256, 12)
    backend = FlashAttnOnCpu(case.spec, case.cache_spec, CPU)
    plan = backend.plan(case.batch)
    out = torch.zeros(len(case.query), 6, 32, dtype=torch.float16)
    tables = []
    for later in (
        batch_of([1, 1], [5, 700], [[7, -1, -1], [2, 4, 5]]),
        batch_of([1, 1], [5, 9], [[7], [2]]),
    ):
        backend.plan(later, into=plan)
        backend.forward(case.query, case.cache, plan, out)
        tables.append(double.calls[-1].arguments["block_table_"].clone())
    assert tables[0].tolist() == [[7, 0, 0], [2, 4, 5]]
    assert tables[1].tolist() == [[7], [2]]


def test_mixed_batches_in_any_order_equal_a_batch_in_order() -> None:
    """A part whose rows are not consecutive is gathered and put back."""
    batch = make_batch([300, 70, 20, 90], [1, 70, 1, 40], 256, 12)
    case = make_case(layer(), batch, 256, 12)
    plan = FlashAttnOnCpu(case.spec, case.cache_spec, CPU).plan(batch)
    first, second = (part.rows for part in plan.parts)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert first.tolist() == [0, 71]
    assert second.tolist() == [*range(1, 71), *range(72, 112)]
