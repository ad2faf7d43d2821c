"""flash_attn_4 over the double of its library: the suite's laws, and what the library is given."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, UNTOUCHED, Case, attend, make_batch, make_case
from support.flash_attn_4_cpu import FlashAttn4OnCpu, double
from support.flash_attn_4_double import SIGNATURE, Double

from jackfield.conformance.attention.contract import AttentionContract
from jackfield.core.attention import AttentionBatch, AttentionSpec

__all__ = ["double"]


class TestLaws(AttentionContract):
    """Few sizes: the double computes all that it is given."""

    backend = FlashAttn4OnCpu
    scale = "tiny"
    only: ClassVar = {
        "dtype": ["bfloat16"],
        "block_size": ["1", "16"],
        "head_size": ["64"],
        "group_size": ["1", "3"],
    }


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(6, 2, 64, 64, 0.2, torch.float16), **changes)


def batch_of(query_lens: list[int], seq_lens: list[int], table: list[list[int]]) -> AttentionBatch:
    return AttentionBatch.from_host(
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32).view(len(seq_lens), len(table[0]) if table else 0),
        torch.full((sum(query_lens),), -1),
    )


def given(
    double: Double, batch: AttentionBatch, spec: AttentionSpec | None = None, lse: bool = False
) -> dict[str, Any]:
    """What the library is given for a batch, but for what is None."""
    case = make_case(spec or layer(), batch, 16, 12)
    attend(FlashAttn4OnCpu(case.spec, case.cache_spec, CPU), case, with_lse=lse)
    (call,) = double.calls
    return {name: one for name, one in call.items() if one is not None}


def test_a_mixed_batch_is_one_call(double: Double) -> None:
    batch = batch_of(
        [1, 20, 0, 3], [18, 20, 9, 3], [[7, 3, -1], [2, 5, -1], [4, 4, 4], [6, -1, -1]]
    )
    call = given(double, batch)
    assert call["q"].shape == (24, 6, 64)
    assert call["cu_seqlens_q"].tolist() == [0, 1, 21, 24]
    assert call["seqused_k"].tolist() == [18, 20, 3]
    assert call["page_table"].tolist() == [[7, 3], [2, 5], [6, 0]]
    assert call["page_table"].is_contiguous()
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (20, 20)
    assert call["softmax_scale"] == 0.2
    assert call["causal"] is True
    assert call["window_size"] == (None, None)
    assert call["num_splits"] == 1
    assert call["return_lse"] is False
    assert "learnable_sink" not in call
    assert "cu_seqlens_k" not in call


@pytest.mark.parametrize(
    ("features", "sides"),
    [
        ({"sliding_window": 5}, (4, 0)),
        ({"sliding_window": 5, "causal": False}, (4, None)),
        ({"sliding_window": 17}, (16, 0)),
        ({"sliding_window": 18}, (None, None)),
        ({"causal": False}, (None, None)),
    ],
    ids=str,
)
def test_windows(
    double: Double, features: dict[str, Any], sides: tuple[int | None, int | None]
) -> None:
    call = given(double, batch_of([2], [18], [[7, 3]]), layer(**features))
    assert call["window_size"] == sides


def test_the_library_applies_sinks_unless_it_is_asked_for_an_lse(double: Double) -> None:
    batch = batch_of([2], [18], [[7, 3]])
    call = given(double, batch, layer(sinks=True))
    assert call["learnable_sink"].dtype == torch.float32
    double.calls.clear()
    call = given(double, batch, layer(sinks=True), lse=True)
    assert "learnable_sink" not in call
    assert call["return_lse"] is True


def test_an_empty_batch_is_no_call(double: Double) -> None:
    for batch in (batch_of([], [], []), batch_of([0], [5], [[1]])):
        case = make_case(layer(), batch, 16, 12)
        attend(FlashAttn4OnCpu(case.spec, case.cache_spec, CPU), case)
    assert not double.calls


@pytest.mark.parametrize("features", [{}, {"sliding_window": 7}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("with_lse", [True, False])
def test_rows_of_sequences_without_tokens_are_blank(
    double: Double, features: dict[str, Any], with_lse: bool
) -> None:
    """Such a sequence may have more rows than the table has columns, and no column at all."""
    batches: list[tuple[list[int], list[list[int]]]] = [
        ([0, 18, 0], [[-1, 9], [7, 3], [2, -1]]),
        ([0, 0, 0], [[], [], []]),
    ]
    for seq_lens, table in batches:
        case = idle_case(layer(**features), seq_lens, table)
        out, lse = attend(backend_of(case), case, with_lse=with_lse)
        assert_meaning(case, out, lse if with_lse else None)
        assert double.calls[-1]["seqused_k"].tolist() == [40, seq_lens[1] or 2, 1]


def idle_case(spec: AttentionSpec, seq_lens: list[int], table: list[list[int]]) -> Case:
    return make_case(spec, batch_of([40, 2, 1], seq_lens, table), 16, 12)


def backend_of(case: Case) -> FlashAttn4OnCpu:
    return FlashAttn4OnCpu(case.spec, case.cache_spec, CPU)


def test_padding_rows_are_left_alone() -> None:
    case = make_case(layer(), make_batch([30, 5], [3, 1], 16, 12), 16, 12)
    out, lse = attend(backend_of(case), case, with_lse=True)
    assert len(out) == 6
    assert bool((out[4:] == UNTOUCHED).all())
    assert bool((lse[4:] == UNTOUCHED).all())


def recorded(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in parameters
    )


def test_the_double_takes_what_the_library_takes() -> None:
    parameters = inspect.signature(Double.flash_attn_varlen_func).parameters
    assert recorded(list(parameters.values())[1:]) == SIGNATURE


@pytest.mark.gpu
def test_the_library_takes_what_is_recorded() -> None:
    module = pytest.importorskip("flash_attn.cute", exc_type=ImportError)
    parameters = inspect.signature(module.flash_attn_varlen_func).parameters
    assert recorded(list(parameters.values())) == SIGNATURE
