"""Runs all laws on a scheduler and reports what held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.block_manager import BlockManager
from ...core.scheduler import Scheduler
from ...core.scheduling_policy import SchedulingPolicy
from ...plugins.discovery import discover
from ...plugins.registry import PartKind
from ..choices import named
from ..resolve import part_class
from ..results import Report
from ..stateful.hunt import Quarry
from ..stateful.run import StatefulRun
from ..stateful.search import Budget, Found, LawMachine
from ..stateful.suite import Law, StatefulObserver, StatefulOptions
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
class SchedulerRun(StatefulRun[Subject]):
    """A run on a scheduler with a policy and a block manager."""

    suite = "scheduler"
    all_laws = laws.ALL_LAWS
    processes = laws.Processes

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

    @property
    def part(self) -> type[Scheduler]:
        return self.subject.scheduler

    @property
    def powers(self) -> frozenset[str]:
        return self.subject.powers

    @property
    def importable(self) -> bool:
        return importable(self.subject)

    def machine(self) -> Callable[[], type[LawMachine]]:
        return partial(machine_of, self.subject)

    def try_processes(self, found: Found) -> None:
        try_processes(found.samples, found)

    def to_cover(self) -> Iterable[tuple[str, str, str]]:
        return _TO_COVER

    def declared(self) -> Mapping[str, str]:
        subject = self.subject
        return {
            "block manager": described(subject.manager, subject.manager_options),
            "policy": described(subject.policy, subject.policy_options),
            "options": described_options(subject.options) or "none",
            "powers": ", ".join(sorted(subject.manager.powers)) or "none",
        }

    def excuse(self, law: Law, found: Found) -> str:
        if law is laws.Processes and not self.importable:
            return "another process cannot import a class that a function or a script defines"
        if law.power and law.power not in self.powers:
            if law.power == laws.FCFS:
                return "owed under the policy fcfs only"
            return f"the block manager does not declare {law.power!r}"
        tried = found.exercised[law.name]
        if law is laws.Gain and not tried and reserves_everything(self.subject):
            return "the block manager reserves all blocks on admission: none can be wanted later"
        return ""

    def coverage(self, found: Found) -> dict[str, dict[str, int]]:
        """With what a scheduler is free not to do, if it did it."""
        table = super().coverage(found)
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
    return SchedulerRun.prepare(subject, options).try_all(observer)


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
