"""Runs all laws on a scheduler and reports what held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...core.block_manager import BlockManager
from ...core.scheduler import Scheduler
from ...core.scheduling_policy import SchedulingPolicy
from ...plugins.discovery import discover
from ...plugins.registry import PartKind
from ..resolve import part_class
from ..results import PropertyResult, Report, Status
from ..stateful.hunt import Quarry
from ..stateful.laws import named
from ..stateful.search import Budget, Found, LawMachine
from ..stateful.suite import (
    SilentObserver,
    StatefulObserver,
    StatefulOptions,
    report_of,
    results_of,
)
from ..stateful.workers import shared_search
from . import laws
from .machine import SchedulerMachine
from .mutants import MUTANTS, Mutant
from .parts import check_parts, described, described_options, reserves_everything
from .processes import importable, try_processes
from .world import Subject

PROFILES: Mapping[str, Budget] = {
    "quick": Budget(stories=1000, steps=25, seconds=20.0),
    "full": Budget(stories=10_000, steps=50, seconds=110.0),
    "soak": Budget(stories=1_000_000, steps=80, seconds=3600.0),
}
#: What has to occur at least once, and the power without which it cannot.
_TO_COVER: tuple[tuple[str, str, str], ...] = (
    ("operation", "abort", ""),
    ("operation", "arrive", ""),
    ("operation", "misfit", ""),
    ("operation", "step", ""),
    ("world", "plain", ""),
    ("world", "strict", ""),
    ("world", "wishful", ""),
    ("world", "groups", ""),
    ("world", "no groups", ""),
    ("world", "no prefix caching", ""),
    ("world", "prefix caching", "prefix_caching"),
    ("plan", "preempted", ""),
    ("plan", "swapped in", "swap"),
    ("plan", "swapped out", "swap"),
    ("plan", "prefix hit", "prefix_caching"),
    ("plan", "clipped", ""),
    ("failure", "strict", ""),
    ("failure", "propose", ""),
    ("failure", "on_progress", ""),
    ("failure", "on_finish", ""),
)
#: What may occur; a scheduler is free not to do it.
_OPTIONAL = (("plan", "forked"),)
#: The block manager and the policy of a run that names none.
BLOCK_MANAGER = "paged"
POLICY = "fcfs"


def subject_of(
    scheduler: type[Scheduler],
    block_manager: str | type[BlockManager] = BLOCK_MANAGER,
    policy: str | type[SchedulingPolicy] = POLICY,
) -> Subject:
    """A scheduler class with its parts: their classes, or their names.

    Raises:
        PluginError: a name is unknown or contested, or a class cannot be loaded.
    """
    host = discover()
    if isinstance(block_manager, str):
        block_manager = part_class(host, PartKind.BLOCK_MANAGER, block_manager)
    if isinstance(policy, str):
        policy = part_class(host, PartKind.SCHEDULING_POLICY, policy)
    return Subject(scheduler, block_manager, policy)


def machine_of(subject: Subject) -> type[LawMachine]:
    """The machine that tells stories of a scheduler."""
    return type("Stories", (SchedulerMachine,), {"subject": subject})


@dataclass(frozen=True)
class SchedulerRun:
    """A run that is ready to go.

    Attributes:
        subject, options: what to run on what.
        budget: of the whole run.
    """

    subject: Subject
    options: StatefulOptions
    budget: Budget

    @staticmethod
    def prepare(subject: Subject, options: StatefulOptions) -> SchedulerRun:
        """Check the options, and whether the parts can be built at all.

        Raises:
            ConfigError: the profile is unknown, a class is abstract, the block manager declares a
                power that does not exist, or the block manager or the policy cannot be built for
                the tiny worlds of the suite.
        """
        check_parts(subject)
        return SchedulerRun(subject, options, named("profile", options.profile, PROFILES))

    def run(self, observer: StatefulObserver) -> Found:
        """Tell the stories.

        Raises:
            JackfieldError: a process of the run died.
        """
        observer.started("stories", "", self.budget.stories)
        jobs = self.options.processes if importable(self.subject) else 1
        found = shared_search(
            partial(machine_of, self.subject),
            self.budget,
            self.options.seed,
            jobs,
            lambda stories: observer.progressed("stories", "", stories),
        )
        observer.started(laws.Processes.name, "", len(found.samples))
        try_processes(found.samples, found)
        return found

    def results(self, found: Found) -> list[PropertyResult]:
        """What became of each law."""
        subject = self.subject
        name = str(getattr(subject.scheduler, "name", subject.scheduler.__name__))
        results = results_of(laws.ALL_LAWS, found, subject.powers, name, self.options.reproducers)
        return [self._explained(one, found) for one in results]

    def _explained(self, result: PropertyResult, found: Found) -> PropertyResult:
        """A result that says in words of schedulers why a law is not owed."""
        why = self._excuse(result, found)
        if not why:
            return result
        return replace(result, status=Status.NOT_CLAIMED, reason=why, seconds=0.0)

    def _excuse(self, result: PropertyResult, found: Found) -> str:
        (law,) = [one for one in laws.ALL_LAWS if one.name == result.law]
        if result.law in found.failures:
            return ""
        if law is laws.Processes and not importable(self.subject):
            return "another process cannot import a class that a function or a script defines"
        if law.power and law.power not in self.subject.powers:
            if law.power == laws.FCFS:
                return "owed under the policy fcfs only"
            return f"the block manager does not declare {law.power!r}"
        tried = found.exercised[law.name]
        if law is laws.Gain and not tried and reserves_everything(self.subject):
            return "the block manager reserves all blocks on admission: none can be wanted later"
        return ""

    def report(self, found: Found, results: list[PropertyResult]) -> Report:
        """All results, with what they depend on."""
        subject = self.subject
        declared = {
            "block manager": described(subject.manager, subject.manager_options),
            "policy": described(subject.policy, subject.policy_options),
            "options": described_options(subject.options) or "none",
            "powers": ", ".join(sorted(subject.manager.powers)) or "none",
        }
        # After a failure the rest of the budget may not suffice for everything.
        complete = not found.failures
        return report_of(
            "scheduler",
            subject.scheduler,
            results,
            found.stories,
            self.budget,
            self.options,
            self.coverage(found) if complete else {},
            declared,
        )

    def coverage(self, found: Found) -> dict[str, dict[str, int]]:
        """How often each thing occurred that the block manager's powers make possible."""
        table: dict[str, dict[str, int]] = {}
        for axis, value, power in _TO_COVER:
            if not power or power in self.subject.powers:
                count = found.coverage.get(axis, Counter())[value]
                table.setdefault(axis, {})[value] = count
        for axis, value in _OPTIONAL:
            if count := found.coverage.get(axis, Counter())[value]:
                table.setdefault(axis, {})[value] = count
        return table


def run_suite(
    subject: Subject, options: StatefulOptions, observer: StatefulObserver | None = None
) -> Report:
    """Try every law on a scheduler.

    Raises:
        ConfigError: as ``SchedulerRun.prepare`` says.
        JackfieldError: a process of the run died.
    """
    observer = observer or SilentObserver()
    run = SchedulerRun.prepare(subject, options)
    found = run.run(observer)
    results = run.results(found)
    for result in results:
        observer.finished(result)
    return run.report(found, results)


def _machine_of_mutant(scheduler: type[Any]) -> type[LawMachine]:
    return machine_of(subject_of(scheduler))


def _mutants() -> tuple[Mutant, ...]:
    return MUTANTS


def _after(scheduler: type[Scheduler], found: Found) -> None:
    if not found.failures:
        try_processes(found.samples, found)


QUARRY = Quarry(
    title="Mutants of the scheduler suite",
    parts="schedulers",
    mutants=_mutants,
    machine=_machine_of_mutant,
    budget=Budget(stories=1000, steps=25, seconds=60.0),
    after=_after,
)
