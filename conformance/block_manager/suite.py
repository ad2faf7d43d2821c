"""Runs all laws on a block manager and reports what held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...core.block_manager import BlockManager
from ...core.errors import ConfigError
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
from .calls import Subject
from .machine import BlockManagerMachine
from .mutants import MUTANTS, Mutant
from .processes import importable, try_processes

PROFILES: Mapping[str, Budget] = {
    "quick": Budget(stories=1000, steps=30, seconds=12.0),
    "full": Budget(stories=20_000, steps=50, seconds=300.0),
    "soak": Budget(stories=1_000_000, steps=80, seconds=3600.0),
}
#: Powers that a manager may declare.
POWERS = ("fork", "lookahead", "prefix_caching", "swap")
#: What has to occur at least once, and the power without which it cannot.
_TO_COVER: tuple[tuple[str, str, str], ...] = (
    ("operation", "allocate", ""),
    ("operation", "append", ""),
    ("operation", "can_allocate", ""),
    ("operation", "commit", ""),
    ("operation", "fork", "fork"),
    ("operation", "free", ""),
    ("operation", "reset_prefix_cache", "prefix_caching"),
    ("operation", "swap_in", "swap"),
    ("operation", "swap_out", "swap"),
    ("can_allocate", "LATER", ""),
    ("can_allocate", "OK", ""),
    ("append", "no copies", ""),
    ("append", "copies", "fork"),
    ("prefix hit", "of none", "prefix_caching"),
    ("prefix hit", "of some tokens", "prefix_caching"),
    ("prefix hit", "of a whole prompt", "prefix_caching"),
    ("swap_out", "done", "swap"),
    ("swap_out", "no room", "swap"),
    ("swap_in", "done", "swap"),
    ("swap_in", "no room", "swap"),
)


def machine_of(subject: Subject) -> type[LawMachine]:
    """The machine that tells stories of a manager."""
    return type("Stories", (BlockManagerMachine,), {"subject": subject})


@dataclass(frozen=True)
class BlockManagerRun:
    """A run that is ready to go.

    Attributes:
        subject, options: what to run on what.
        budget: of the whole run.
    """

    subject: Subject
    options: StatefulOptions
    budget: Budget

    @staticmethod
    def prepare(subject: Subject, options: StatefulOptions) -> BlockManagerRun:
        """Check the options.

        Raises:
            ConfigError: the profile is unknown, or the manager declares a power that does not
                exist.
        """
        unknown = sorted(set(subject.manager.powers) - set(POWERS))
        if unknown:
            raise ConfigError(
                f"block manager {subject.manager.name!r} declares the power {unknown[0]!r}, which "
                f"does not exist (powers: {', '.join(POWERS)})"
            )
        return BlockManagerRun(subject, options, named("profile", options.profile, PROFILES))

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
        try_processes(found.samples, found)
        return found

    def results(self, found: Found) -> list[PropertyResult]:
        """What became of each law."""
        powers = frozenset(self.subject.manager.powers)
        name, options = str(self.subject.manager.name), self.options
        results = results_of(laws.ALL_LAWS, found, powers, name, options.reproducers)
        if importable(self.subject):
            return results
        why = "another process cannot import the class, which is defined in a function or a script"
        return [
            replace(one, status=Status.NOT_CLAIMED, reason=why, seconds=0.0)
            if one.law == laws.Processes.name
            else one
            for one in results
        ]

    def report(self, found: Found, results: list[PropertyResult]) -> Report:
        """All results, with what they depend on."""
        manager = self.subject.manager
        declared = {"powers": ", ".join(sorted(manager.powers)) or "none"}
        # After a failure the rest of the budget may not suffice for everything.
        complete = not found.failures
        return report_of(
            "block-manager",
            manager,
            results,
            found.stories,
            self.budget,
            self.options,
            self.coverage(found) if complete else {},
            declared,
        )

    def coverage(self, found: Found) -> dict[str, dict[str, int]]:
        """How often each thing occurred that the manager's powers make possible."""
        table: dict[str, dict[str, int]] = {}
        for axis, value, power in _TO_COVER:
            if not power or power in self.subject.manager.powers:
                count = found.coverage.get(axis, Counter())[value]
                table.setdefault(axis, {})[value] = count
        return table


def run_suite(
    subject: Subject, options: StatefulOptions, observer: StatefulObserver | None = None
) -> Report:
    """Try every law on a block manager.

    Raises:
        ConfigError: as ``BlockManagerRun.prepare`` says.
        JackfieldError: a process of the run died.
    """
    observer = observer or SilentObserver()
    run = BlockManagerRun.prepare(subject, options)
    found = run.run(observer)
    results = run.results(found)
    for result in results:
        observer.finished(result)
    return run.report(found, results)


def _machine_of_mutant(manager: type[Any]) -> type[LawMachine]:
    return machine_of(Subject(manager))


def _mutants() -> tuple[Mutant, ...]:
    return MUTANTS


def _after(manager: type[BlockManager], found: Found) -> None:
    if not found.failures:
        try_processes(found.samples, found)


QUARRY = Quarry(
    title="Mutants of the block manager suite",
    parts="block managers",
    mutants=_mutants,
    machine=_machine_of_mutant,
    budget=Budget(stories=1000, steps=30, seconds=20.0),
    after=_after,
)
