"""The mutants as a list, and the right backend that they are made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from support.attention_asserts import assert_meaning
from support.attention_cases import (
    CPU,
    Case,
    attend,
    cases,
    make_batch,
    make_case,
    visible_slots,
)
from torch import Tensor

from jackfield.conformance.attention.mutants import MUTANTS, Mutant
from jackfield.conformance.attention.oracle import write_kv_oracle
from jackfield.conformance.attention.plain_backend import PlainBackend, PlainPlan
from jackfield.core.attention import AttentionPlan, AttentionSpec, KVCache

PLAIN = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32)
FEATURES = replace(
    PLAIN,
    v_head_size=24,
    sliding_window=150,
    logits_soft_cap=5.0,
    alibi_slopes=(0.5, 0.25, 0.1, 0.0),
    sinks=True,
)

by_name = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def test_there_are_many_mutants_and_each_has_its_own_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 70
    assert len(set(names)) == len(names)
    assert len({mutant.fault for mutant in MUTANTS}) == len(names)


@by_name
def test_a_mutant_says_what_is_broken(mutant: Mutant) -> None:
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", mutant.name)
    assert re.fullmatch(r"[A-Z0-9][^.]*(\.\d[^.]*)*\.", mutant.fault), "one sentence"
    assert mutant.backend.name == mutant.name
    for place in mutant.published:
        assert re.fullmatch(r"[\w./-]+#\d+|\w+ [\d.]+", place)


@by_name
def test_a_mutant_is_the_plain_backend_but_for_something(mutant: Mutant) -> None:
    own = [set(vars(one)) for one in mutant.backend.__mro__ if issubclass(one, PlainBackend)]
    changed = set().union(*own[:-1])
    assert any(callable(getattr(PlainBackend, name, None)) for name in changed)


@by_name
def test_a_mutant_can_be_constructed_for_a_plain_layer(mutant: Mutant) -> None:
    case = make_case(PLAIN, make_batch([5], [1], 16, 3), 16, 3)
    assert isinstance(mutant.backend(PLAIN, case.cache_spec, CPU), PlainBackend)


def test_published_faults_are_named() -> None:
    assert sum(bool(mutant.published) for mutant in MUTANTS) >= 40


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_plain_backend_is_right(case: Case) -> None:
    assert_meaning(
        case, *attend(PlainBackend(case.spec, case.cache_spec, CPU), case, with_lse=True)
    )


@pytest.mark.parametrize("length", [64, 65, 128, 257])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", [PLAIN, FEATURES])
def test_decode_in_several_runs_is_right(spec: AttentionSpec, length: int, causal: bool) -> None:
    spec = replace(spec, causal=causal)
    case = make_case(spec, make_batch([length, 3, length], [1, 3, 1], 16, 40), 16, 40)
    assert_meaning(case, *attend(PlainBackend(spec, case.cache_spec, CPU), case, with_lse=True))


def test_a_row_of_a_sequence_without_tokens_is_zero() -> None:
    batch = make_batch([0, 4], [1, 1], 16, 3)
    case = make_case(PLAIN, replace(batch, slot_mapping=batch.slot_mapping[-1:]), 16, 3)
    out, lse = attend(PlainBackend(PLAIN, case.cache_spec, CPU), case, with_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()


@pytest.mark.parametrize("spec", [PLAIN, FEATURES, replace(PLAIN, sliding_window=3)])
def test_nan_in_slots_of_no_visible_key_changes_nothing(spec: AttentionSpec) -> None:
    case = make_case(spec, make_batch([21, 200, 5], [1, 7, 5], 16, 20), 16, 20)
    backend = PlainBackend(spec, case.cache_spec, CPU)
    unseen = ~visible_slots(case)
    spoilt = KVCache(k=case.cache.k.clone(), v=case.cache.v.clone())
    spoilt.k[unseen] = math.nan
    spoilt.v[unseen] = math.inf
    results = [attend(backend, replace(case, cache=one))[0] for one in (case.cache, spoilt)]
    assert torch.equal(*results)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_the_plain_backend_stores_what_it_is_given(case: Case) -> None:
    slots = case.batch.slot_mapping.clone()
    slots[::3] = -1
    expected = write_kv_oracle(case.key, case.value, case.cache, slots)
    PlainBackend(case.spec, case.cache_spec, CPU).write_kv(case.key, case.value, case.cache, slots)
    assert torch.equal(case.cache.k, expected.k)
    assert torch.equal(case.cache.v, expected.v)


def test_a_plan_can_be_updated_in_place() -> None:
    case = make_case(PLAIN, make_batch([21, 40], [1, 1], 16, 20), 16, 20)
    backend = PlainBackend(PLAIN, case.cache_spec, CPU)
    plan = backend.plan(make_batch([3, 17], [1, 1], 16, 20, seed=5))
    assert backend.plan(case.batch, into=plan) is plan
    out = torch.empty(len(case.query), 4, 16)
    backend.forward(case.query, case.cache, plan, out)
    assert torch.equal(out[:2], attend(backend, case)[0][:2])


def forward_with_sinks(backend: PlainBackend, case: Case) -> None:
    attend(backend, replace(case, sinks=torch.zeros(4)))


def forward_with_a_foreign_plan(backend: PlainBackend, case: Case) -> None:
    out: Tensor = torch.empty(len(case.query), 4, 16)
    backend.forward(case.query, case.cache, AttentionPlan(), out)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (forward_with_sinks, ValueError, "spec.sinks"),
        (forward_with_a_foreign_plan, TypeError, "AttentionPlan"),
    ],
)
def test_wrong_calls_are_refused(
    call: Callable[[PlainBackend, Case], None], error: type[Exception], words: str
) -> None:
    case = make_case(PLAIN, make_batch([5], [1], 16, 3), 16, 3)
    with pytest.raises(error, match=words):
        call(PlainBackend(PLAIN, case.cache_spec, CPU), case)


def test_an_empty_batch_gives_an_empty_plan() -> None:
    case = make_case(PLAIN, make_batch([], [], 16, 3), 16, 3)
    plan = PlainBackend(PLAIN, case.cache_spec, CPU).plan(case.batch)
    assert isinstance(plan, PlainPlan)
    assert plan.sequences == ()
