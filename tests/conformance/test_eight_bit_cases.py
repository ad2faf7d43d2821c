"""Cases with a cache of 8 bits: which are tried, what they hold, and what is asked of backends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.conformance.attention.axes import SCALES, Axes
from jackfield.conformance.attention.cases import AttentionCase, build, expect
from jackfield.conformance.attention.generate import EDGES, quantised
from jackfield.conformance.attention.laws_memory import WriteKv
from jackfield.conformance.attention.oracle import attention_oracle, write_kv_oracle
from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.conformance.attention.refusals import declared, undeclared
from jackfield.conformance.attention.strategies import (
    cases,
    directed_cases,
    few_cases,
    plain_case,
)
from jackfield.conformance.attention.subject import Subject
from jackfield.conformance.attention.suite import SuiteOptions, SuiteRun
from jackfield.conformance.attention.truth import attend, error_bounds
from jackfield.core.attention import Capabilities, KVCache
from jackfield.core.errors import ConfigError

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
DECLARED = PlainBackend.capabilities(CPU)
AXES = Axes.of(DECLARED, SCALES["tiny"])
#: Of a backend that wants query and cache alike, but for 8 bits.
ALIKE = Axes.of(replace(DECLARED, different_kv_dtype=False), SCALES["tiny"])


def eight_bit_case(**changes: object) -> AttentionCase:
    return replace(plain_case(replace(AXES, kv_dtype=(FP8,))), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", [AXES, ALIKE])
def test_every_law_has_a_case_with_8_bits(axes: Axes) -> None:
    few = [case for case in few_cases(axes) if case.kv_dtype == FP8]
    assert [(case.k_scale, case.v_scale) for case in few] == [(0.37, 3.1)]
    directed = [case for case in directed_cases(axes) if case.kv_dtype == FP8]
    assert len(directed) >= 2
    assert any(case.spec.sinks and case.spec.logits_soft_cap for case in directed)


def test_a_backend_that_wants_query_and_cache_alike_is_tried_with_8_bits_too() -> None:
    class Alike(PlainBackend):
        @classmethod
        def capabilities(cls, device: torch.device) -> Capabilities:
            return replace(super().capabilities(device), different_kv_dtype=False)

    options = SuiteOptions(scale="tiny", laws=("meaning",))
    axes = SuiteRun.unprobed(Subject(Alike, CPU), options).axes
    assert set(axes.kv_dtype) == {*axes.dtype, FP8}
    only = {"dtype": ("float32",), "kv_dtype": ("float8_e4m3fn",)}
    axes = SuiteRun.unprobed(Subject(Alike, CPU), replace(options, only=only)).axes
    assert (axes.dtype, axes.kv_dtype) == ((torch.float32,), (FP8,))
    only = {"dtype": ("float32",), "kv_dtype": ("float16",)}
    with pytest.raises(ConfigError, match=r"no dtype of the query \(float32\) is one of the cache"):
        SuiteRun.unprobed(Subject(Alike, CPU), replace(options, only=only))


def test_without_8_bits_no_case_has_scales() -> None:
    axes = replace(AXES, kv_dtype=(torch.float32,))
    assert {(case.k_scale, case.v_scale) for case in directed_cases(axes)} == {(1.0, 1.0)}
    assert all(case.kv_dtype == torch.float32 for case in few_cases(axes))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drawn_scales_are_those_of_8_bits_only(data: st.DataObject) -> None:
    case = data.draw(cases(ALIKE, "any"))
    assert case.kv_dtype in (FP8, case.spec.dtype)
    if case.kv_dtype != FP8:
        assert (case.k_scale, case.v_scale) == (1.0, 1.0)
    made = build(case, "NHD", CPU)
    assert (made.cache.k_scale, made.cache.v_scale) == (case.k_scale, case.v_scale)
    assert made.cache.k.dtype == case.kv_dtype


def test_the_oracle_reads_what_the_cache_stands_for() -> None:
    data = build(eight_bit_case(), "HND", CPU)
    wide = KVCache(
        k=data.cache.k.double() * data.cache.k_scale, v=data.cache.v.double() * data.cache.v_scale
    )
    query = data.query[: data.batch.num_tokens]
    exact, lse = attention_oracle(data.spec, query, data.cache, data.batch, data.sinks)
    expected, expected_lse = attention_oracle(data.spec, query, wide, data.batch, data.sinks)
    assert torch.equal(exact, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_bounds_are_those_of_the_querys_dtype_and_the_scales(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(9, 2, 16, generator=generator) for _ in range(3))
    truth = attend(query, keys, values, scale=0.25)
    own = error_bounds(truth, dtype, dtype, 16, None)
    eight = error_bounds(truth, dtype, FP8, 16, None)
    for wide, narrow in zip(eight, own, strict=True):
        assert bool((wide >= narrow).all())
    # The result may be rounded before the scale of the values multiplies it.
    rounding = torch.finfo(dtype).eps / 2 * (truth.out.abs() + eight[0])
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0
    assert bool((eight[0] - rounding - smallest <= 1.3 * own[0]).all())
    assert bool((eight[1] <= 1.3 * own[1]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_rounded_result_may_be_shrunk_by_its_sinks_and_rounded_again(dtype: torch.dtype) -> None:
    """With one key there is no other error: what is left are the two roundings, at their worst."""
    generator = torch.Generator().manual_seed(2)
    query, keys = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    worst = 0.0
    for _ in range(50):
        values = torch.randn(1, 1, 64, generator=generator, dtype=torch.float64)
        sinks = torch.randn(1, generator=generator)
        truth = attend(query, keys, values, scale=0.25, sinks=sinks)
        bound, _ = error_bounds(truth, dtype, dtype, 16, None)
        twice = (values.to(dtype).double() * torch.sigmoid(-sinks.double())).to(dtype).double()
        worst = max(worst, float(((twice - truth.out).abs() / bound).max()))
    assert 0.3 < worst <= 1.0


def test_written_edges_are_of_every_kind() -> None:
    case = WriteKv().fit(eight_bit_case(seed=0))
    assert case.distribution == EDGES
    data = build(case, "NHD", CPU)
    quotients = data.key.double() / case.k_scale
    assert bool(quotients.isnan().any())
    assert bool(quotients.isposinf().any())
    assert bool((quotients.abs() > 448).any())
    stored = quantised(data.key, FP8, case.k_scale).view(torch.uint8)
    assert {0x00, 0x80, 0x01, 0x7E, 0xFE} <= set(stored.flatten().tolist())
    after = write_kv_oracle(data.key, data.value, data.cache, data.batch.slot_mapping)
    slot = int(data.batch.slot_mapping[0])
    first = after.k.view(torch.uint8)[slot // case.block_size, slot % case.block_size]
    assert torch.equal(first, stored[0])
    assert WriteKv().fit(eight_bit_case(seed=3)).distribution == "normal"


def test_infinity_has_no_8_bits_and_nan_has() -> None:
    numbers = torch.tensor([torch.inf, -torch.inf, 1e9, torch.nan, -0.0])
    stored = quantised(numbers, FP8, 2.0)
    assert stored[:3].tolist() == [448.0, -448.0, 448.0]
    assert bool(stored[3].double().isnan())
    assert stored[4].view(torch.uint8) == 0x80
    assert quantised(numbers, torch.float16, 1.0).dtype == torch.float16


def test_requests_of_a_cache_dtype() -> None:
    case = plain_case(ALIKE)
    alike = replace(DECLARED, different_kv_dtype=False)
    asked = {one.value for one in declared(alike, ALIKE, case) if one.axis == "kv_dtype"}
    assert asked == {"float8_e4m3fn"}
    refused = {one.value for one in undeclared(alike, case) if one.axis == "kv_dtype"}
    assert "float8_e4m3fn" not in refused
    wide = replace(DECLARED, kv_dtypes=DECLARED.kv_dtypes - {FP8})
    refused = {one.value for one in undeclared(wide, case) if one.axis == "kv_dtype"}
    assert refused == {"float8_e4m3fn"}


def test_expectations_of_a_case_are_finite() -> None:
    expected = expect(build(eight_bit_case(distribution="large"), "NHD", CPU))
    assert bool(expected.out.isfinite().all())
    assert bool((expected.out_bound > 0).all())
