"""How cases are looked for, and what becomes of backends that fail in unusual ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.odd_backends import (
    DyingBackend,
    ExitingBackend,
    FlakyBackend,
    InterruptedBackend,
    NarrowBackend,
    NeverBothBackend,
    SaysNoButBuildsBackend,
    WrongBackend,
)

from jackfield.conformance.attention import suite
from jackfield.conformance.attention.axes import SCALES, Axes
from jackfield.conformance.attention.cases import AttentionCase
from jackfield.conformance.attention.laws import Law
from jackfield.conformance.attention.laws_meaning import Meaning
from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.conformance.attention.refusals import Refusals
from jackfield.conformance.attention.search import Search, search
from jackfield.conformance.attention.strategies import directed_cases, plain_case
from jackfield.conformance.attention.subject import LawViolation, Subject
from jackfield.conformance.attention.suite import SuiteOptions, SuiteRun, run_suite
from jackfield.conformance.results import Report, Status
from jackfield.core.attention import AttentionBackend

CPU = torch.device("cpu")


def try_meaning(backend: type[AttentionBackend], **options: object) -> Report:
    """The law ``meaning`` with tiny cases in float16."""
    chosen = SuiteOptions(
        laws=("meaning",),
        scale="tiny",
        only={"dtype": ("float16",), "batch": ("decode",), "head_size": ("8",)},
    )
    return run_suite(Subject(backend, CPU), replace(chosen, **options))  # type: ignore[arg-type]


def tried(law: Law, seed: int, examples: int = 30) -> list[AttentionCase]:
    """The cases of a search in which nothing fails."""
    cases: list[AttentionCase] = []
    subject = Subject(NarrowBackend, CPU)
    axes = Axes.of(subject.capabilities, SCALES["tiny"])
    found = search(law, subject, axes, examples=examples, seconds=60, seed=seed, seen=cases.append)
    assert not found.failed
    assert found.examples == len(cases)
    return cases


class AlwaysTrue(Meaning):
    """Nothing is asked for."""

    def check(self, subject: Subject, case: AttentionCase) -> float:
        return 0.0


def test_a_seed_gives_the_same_cases_again() -> None:
    first = tried(AlwaysTrue(), seed=3)
    assert len(first) == 30
    assert tried(AlwaysTrue(), seed=3) == first
    assert tried(AlwaysTrue(), seed=4) != first


class FailsWithManySequences(AlwaysTrue):
    """Batches of three sequences and more fail."""

    def check(self, subject: Subject, case: AttentionCase) -> float:
        if len(case.sequences) >= 3:
            raise LawViolation("too many")
        return 0.0


def test_a_failing_case_is_made_small_and_nothing_after_it_counts() -> None:
    subject = Subject(NarrowBackend, CPU)
    axes = Axes.of(subject.capabilities, SCALES["tiny"])
    seen: list[AttentionCase] = []
    found = search(
        FailsWithManySequences(), subject, axes, examples=50, seconds=60, seed=1, seen=seen.append
    )
    assert found.failed
    assert not found.flaky
    assert found.case is not None
    assert [shape.seq_len for shape in found.case.sequences] == [1, 1, 1]
    assert found.examples == len(seen) + 1


class FailsNowAndThen(AlwaysTrue):
    """Each call with a number of ``failing`` fails."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.calls = 0

    def check(self, subject: Subject, case: AttentionCase) -> float:
        self.calls += 1
        if self.calls in self.failing:
            raise LawViolation("now")
        return 0.0


@pytest.mark.parametrize(
    ("failing", "repeats"), [((), False), ((1, 2, 3), False), (range(1, 99), True)]
)
def test_a_failure_that_ever_passes_does_not_repeat(failing: range, repeats: bool) -> None:
    subject = Subject(NarrowBackend, CPU)
    case = plain_case(Axes.of(subject.capabilities, SCALES["tiny"]))
    found = Search(case=case, violation=LawViolation("before"))
    law = FailsNowAndThen(*failing)
    assert found.repeats(law, subject) is repeats


def test_a_flaky_backend_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlakyBackend, "failures", 0)
    (result,) = try_meaning(FlakyBackend).results
    assert result.status is Status.FAILED
    assert "the failure did not repeat" in result.reason


def test_a_wrong_backend_is_not_called_flaky() -> None:
    (result,) = try_meaning(WrongBackend).results
    assert result.status is Status.FAILED
    assert "is wrong in" in result.reason
    assert "did not repeat" not in result.reason


def test_a_backend_that_exits_fails() -> None:
    # Without a scale the speed is measured first, which meets the exit too.
    (result,) = try_meaning(ExitingBackend, scale=None).results
    assert result.status is Status.FAILED
    assert result.reason == "SystemExit: no licence"


def test_an_interruption_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        try_meaning(InterruptedBackend)


def test_a_failure_without_data_has_no_reproducer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(self: Subject, case: AttentionCase) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Subject, "build", build)
    (result,) = try_meaning(NarrowBackend, reproducers=tmp_path).results
    assert result.status is Status.FAILED
    assert "illegal memory access" in result.reason
    assert "(no reproducer: RuntimeError" in result.reason
    assert result.reproducer == ""
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_kills_its_process_fails_and_the_rest_goes_on() -> None:
    # Without a scale the speed is measured first, which kills a process too.
    options = SuiteOptions(laws=("meaning", "write_kv"), jobs=2, only={"dtype": ("float16",)})
    report = run_suite(Subject(DyingBackend, CPU), options)
    assert [one.law for one in report.results] == ["meaning", "write_kv"]
    killed, other = report.results
    assert killed.status is Status.FAILED
    assert killed.reason == "the process died with exit status 7"
    assert other.status is Status.PASSED
    assert other.examples > 0


def test_cases_of_a_slow_backend_are_tiny_and_still_have_several_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suite, "SLOW_SECONDS", -1.0)
    run = SuiteRun.prepare(Subject(NarrowBackend, CPU), SuiteOptions())
    assert run.profile.scale == "tiny"
    assert run.options.scale is None
    assert run.axes.scale.max_heads == SCALES["tiny"].max_heads


class SeesEveryFeature(AlwaysTrue):
    """Remembers what it was tried on."""

    seen: ClassVar[list[AttentionCase]] = []

    def check(self, subject: Subject, case: AttentionCase) -> float:
        self.seen.append(case)
        return 0.0


def test_what_a_backend_refuses_together_is_not_tried_and_what_it_does_alone_is() -> None:
    subject = Subject(NeverBothBackend, torch.device("cpu"))
    axes = Axes.of(subject.capabilities, SCALES["tiny"])
    SeesEveryFeature.seen.clear()
    search(
        SeesEveryFeature(),
        subject,
        axes,
        examples=100,
        seconds=60.0,
        seed=0,
        first=directed_cases(axes),
    )
    found = {
        (case.spec.sliding_window is not None, case.spec.alibi_slopes is not None)
        for case in SeesEveryFeature.seen
    }
    assert found == {(False, False), (True, False), (False, True)}


def test_a_combination_that_is_refused_in_words_only_is_a_failure() -> None:
    law = Refusals()
    for backend, honest in ((NeverBothBackend, True), (SaysNoButBuildsBackend, False)):
        subject = Subject(backend, torch.device("cpu"))
        case = plain_case(Axes.of(subject.capabilities, SCALES["tiny"]))
        if honest:
            assert law.check(subject, case) == 0.0
        else:
            with pytest.raises(LawViolation, match="names reasons against"):
                law.check(subject, case)


def test_the_case_with_the_largest_error_is_remembered() -> None:
    subject = Subject(PlainBackend, torch.device("cpu"))
    axes = Axes.of(subject.capabilities, SCALES["tiny"])
    found = search(Meaning(), subject, axes, examples=20, seconds=60.0, seed=0)
    assert found.worst is not None
    assert Meaning().check(subject, found.worst) == found.max_error
