"""The suite of schedulers passes right ones, and says what is wrong with others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.odd_schedulers import BatchByHash, Noisy

from jackfield.conformance.report import from_json, to_json
from jackfield.conformance.report_text import to_markdown
from jackfield.conformance.results import PropertyResult, Report, Status
from jackfield.conformance.scheduler import suite
from jackfield.conformance.scheduler.contract import SchedulerContract, assert_conforms
from jackfield.conformance.scheduler.elsewhere import told_in_process
from jackfield.conformance.scheduler.laws import ALL_LAWS
from jackfield.conformance.scheduler.mutants import MUTANTS
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.conformance.scheduler.processes import try_processes
from jackfield.conformance.scheduler.suite import (
    SchedulerRun,
    machine_of,
    run_suite,
    subject_of,
)
from jackfield.conformance.scheduler.world import Arrive, Step, World
from jackfield.conformance.stateful import search as searching
from jackfield.conformance.stateful.search import Budget, Found, search
from jackfield.conformance.stateful.suite import SilentObserver, StatefulOptions
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.sharing import SharingOptions
from jackfield.core.errors import ConfigError, JackfieldError
from jackfield.core.request import FinishReason
from jackfield.core.scheduler import Scheduler, SchedulerStats, StepPlan
from jackfield.core.scheduling_policy import Proposal, SchedulerView, SchedulingPolicy
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler

SMALL = Budget(stories=20, steps=20, seconds=60.0)
FEW = replace(SMALL, stories=8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few stories, little time to make them small, and nothing that must occur."""
    monkeypatch.setitem(suite.PROFILES, "quick", SMALL)
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 0.7)
    monkeypatch.setattr(suite, "_TO_COVER", (("operation", "step", ""),))


def mutant(name: str) -> type[Scheduler]:
    (found,) = [one.part for one in MUTANTS if one.name == name]
    return found


def result_of(report: Report, law: str) -> PropertyResult:
    (result,) = [one for one in report.results if one.law == law]
    return result


@pytest.mark.parametrize("scheduler", [PlainScheduler, QueueScheduler])
@pytest.mark.parametrize("manager", ["paged", "contiguous"])
def test_right_schedulers_pass(scheduler: type[Scheduler], manager: str) -> None:
    found = search(machine_of(subject_of(scheduler, manager)), SMALL, seed=1)
    assert {law: one.message for law, one in found.failures.items()} == {}
    assert found.stories == SMALL.stories
    assert found.exercised["S5_once"] > SMALL.stories // 2


def test_the_same_seed_tells_the_same_stories() -> None:
    def told(seed: int) -> Found:
        return search(machine_of(subject_of(PlainScheduler)), FEW, seed)

    one, same, other = told(3), told(3), told(4)
    assert (one.calls, one.coverage) == (same.calls, same.coverage)
    assert (one.calls, one.coverage) != (other.calls, other.coverage)


@pytest.mark.usefixtures("small")
def test_the_report_of_a_broken_scheduler(tmp_path: Path) -> None:
    options = StatefulOptions(reproducers=tmp_path, seed=1)
    report = run_suite(subject_of(mutant("scheduled_twice")), options)
    assert not report.ok
    assert report.suite == "scheduler"
    assert [one.law for one in report.results] == [law.name for law in ALL_LAWS]
    failed = result_of(report, "S5_once")
    assert failed.status is Status.FAILED
    assert failed.reason.startswith("the step schedules ['r")
    assert failed.case.startswith("World(")
    assert Path(failed.reproducer) == tmp_path / "scheduled_twice-S5_once.py"
    behind = result_of(report, "S7_chunks")
    assert behind.status is Status.NOT_CLAIMED
    assert behind.reason == "not reached: stories end where S5_once is broken"
    page = to_markdown(report)
    assert "# Scheduler conformance: `scheduled_twice`" in page
    assert failed.case in page
    again = from_json(to_json(report))
    assert [one.case for one in again.results] == [one.case for one in report.results]


@pytest.mark.usefixtures("small")
def test_the_report_of_a_right_scheduler() -> None:
    subject = replace(subject_of(PlainScheduler, "contiguous"), policy_options=None)
    report = run_suite(subject, StatefulOptions(seed=1))
    assert result_of(report, "S5_once").status is Status.PASSED
    assert result_of(report, "S34_processes").examples > 0
    reasons = {one.law: one.reason for one in report.results if one.status is Status.NOT_CLAIMED}
    assert reasons["S21_swap_space"] == "the block manager does not declare 'swap'"
    assert reasons["S19_gain"].startswith("the block manager reserves all blocks on admission")
    assert report.capabilities["block manager"] == "contiguous"
    assert report.capabilities["policy"] == "fcfs"


class OtherPolicy(FcfsPolicy):
    """What it does is no business of the laws of first come, first served."""

    name = "other"


class DreamingPolicy(FcfsPolicy):
    """Proposes in every third step what cannot be: to preempt somebody who does not exist."""

    name = "dreaming"
    asked = 0

    def propose(self, view: SchedulerView) -> Proposal:
        self.asked += 1
        return Proposal() if self.asked % 3 else Proposal(preempt=("nobody",))


@pytest.mark.usefixtures("small")
def test_a_policy_that_proposes_the_impossible_is_not_the_schedulers_fault() -> None:
    report = run_suite(subject_of(QueueScheduler, policy=DreamingPolicy), StatefulOptions(seed=2))
    assert [one.law for one in report.results if one.status is Status.FAILED] == []


def test_some_laws_are_owed_under_first_come_first_served_only() -> None:
    def reasons(policy: type[SchedulingPolicy]) -> dict[str, str]:
        run = SchedulerRun.prepare(subject_of(PlainScheduler, policy=policy), StatefulOptions())
        return {one.law: one.reason for one in run.results(Found())}

    others, fcfs = reasons(OtherPolicy), reasons(FcfsPolicy)
    assert others["S25_order"] == "owed under the policy fcfs only"
    assert fcfs["S25_order"] == "no story came to the point where it is checked"
    assert others["S1_budget"] == fcfs["S1_budget"] == fcfs["S25_order"]


@pytest.mark.usefixtures("small")
def test_a_broken_scheduler_fails_with_its_story() -> None:
    with pytest.raises(AssertionError) as error:
        assert_conforms(mutant("chunk_off_by_one"), seed=1)
    first, *rest = str(error.value).splitlines()
    assert first == "_ChunkOffByOne does not conform:"
    assert "S3_shares: A scheduled request gets at least one token" in rest[1]
    assert "tokens; it has" in rest[2]
    assert any(line.startswith("Step(") for line in rest)


@pytest.mark.usefixtures("small")
def test_what_another_process_cannot_import_is_not_tried_there() -> None:
    class Local(PlainScheduler):
        pass

    report = run_suite(subject_of(Local), StatefulOptions(jobs=2, seed=1))
    processes = result_of(report, "S34_processes")
    assert processes.status is Status.NOT_CLAIMED
    assert "another process cannot import" in processes.reason


def test_an_order_that_depends_on_the_hash_of_text_shows_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 2.0)
    found = search(machine_of(subject_of(BatchByHash)), FEW, seed=1)
    assert not found.failures
    try_processes(found.samples, found)
    failure = found.failures["S34_processes"]
    assert re.match(r"in a process with PYTHONHASHSEED=\d there is the plan ", failure.message)
    assert " instead of the plan r" in failure.message
    assert len(failure.story.splitlines()) < 15, "the story was not made small"
    path = tmp_path / "story.py"
    path.write_text(failure.script, encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, check=False, text=True)
    assert done.returncode == 1, done.stderr
    assert "law S34_processes is broken: in a process with PYTHONHASHSEED=" in done.stdout


def test_another_process_may_print_and_its_death_is_told() -> None:
    subject = subject_of(Noisy)
    story = subject, World(), (Arrive(completion=2), Step())
    (log,) = told_in_process([story], "1")
    assert isinstance(log[1], StepPlan)
    with pytest.raises(JackfieldError, match=r"died with status 7; the last line .*: a last word"):
        told_in_process([(subject, World(), (Arrive(length=5), Step()))], "1")


def test_processes_share_the_stories() -> None:
    run = SchedulerRun(subject_of(QueueScheduler), StatefulOptions(jobs=2, seed=1), FEW)
    found = run.run(SilentObserver())
    assert found.stories == FEW.stories
    assert found.exercised["S34_processes"] == len(found.samples) > 0


class _Dead(PlainScheduler):
    def __init__(self, *arguments: Any) -> None:
        raise RuntimeError("no engine today")


class _OfAnotherType(PlainScheduler):
    def schedule(self, now: float) -> Any:
        return [super().schedule(now)]


class _NoStats(PlainScheduler):
    def stats(self) -> SchedulerStats:
        raise ZeroDivisionError("oh")


class _NothingEnds(PlainScheduler):
    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], now: float
    ) -> Mapping[str, FinishReason]:
        super().update(plan, sampled, now)
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (_Dead, "the constructor raised RuntimeError: no engine today"),
        (_OfAnotherType, "AttributeError: 'list' object has no attribute 'scheduled'"),
        (_NoStats, "ZeroDivisionError: oh (test_scheduler_suite.py, line"),
        (_NothingEnds, "update raised TypeError"),
    ],
)
def test_a_scheduler_that_raises_or_returns_the_wrong_thing(
    scheduler: type[Scheduler], words: str
) -> None:
    found = search(machine_of(subject_of(scheduler)), SMALL, 1, shrink=False, first_only=True)
    assert words in found.failures["errors"].message


@pytest.mark.usefixtures("small")
def test_a_scheduler_that_cannot_be_built_is_told_once() -> None:
    with pytest.raises(AssertionError, match="does not conform:\n\nerrors: ") as error:
        assert_conforms(_Dead, seed=1)
    assert "the constructor raised RuntimeError: no engine today\nWorld(" in str(error.value)


def test_what_cannot_be_tried_is_refused() -> None:
    class Unfinished(Scheduler):
        name = "unfinished"

    class Odd(PagedBlockManager):
        powers = frozenset({"telepathy"})

    with pytest.raises(ConfigError, match="Unfinished is abstract: it does not define add, fin"):
        assert_conforms(Unfinished)  # type: ignore[type-abstract]
    with pytest.raises(ConfigError, match="declares the power 'telepathy', which does not exist"):
        assert_conforms(PlainScheduler, block_manager=Odd)
    with pytest.raises(ConfigError, match="--profile 'quik' is unknown; did you mean 'quick'"):
        assert_conforms(PlainScheduler, profile="quik")
    options = SharingOptions(eviction="lfu")
    subject = replace(subject_of(PlainScheduler), manager_options=options)
    with pytest.raises(ConfigError, match=r"'paged' cannot be tried: .*prefix_caching=False"):
        run_suite(subject, StatefulOptions())


def test_a_class_without_a_scheduler_is_refused() -> None:
    class Nothing(SchedulerContract):
        pass

    with pytest.raises(TypeError, match="Nothing has to set `scheduler`"):
        Nothing.suite_report()


@pytest.mark.usefixtures("small")
class TestContract(SchedulerContract):
    """The contract as it is used, on a scheduler that conforms."""

    scheduler = QueueScheduler
    seed = 1
