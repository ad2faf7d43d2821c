"""Runs all laws on a block manager and reports what held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.block_manager import BlockManager
from ..choices import named
from ..results import Report
from ..stateful.hunt import Quarry
from ..stateful.run import StatefulRun
from ..stateful.search import Budget, Found, LawMachine
from ..stateful.suite import Law, StatefulObserver, StatefulOptions
from . import laws
from .calls import Subject
from .machine import BlockManagerMachine
from .mutants import MUTANTS, Mutant
from .powers import check_powers
from .processes import importable, try_processes

PROFILES: Mapping[str, Budget] = {
    "quick": Budget(stories=1000, steps=30, seconds=12.0),
    "full": Budget(stories=20_000, steps=50, seconds=300.0),
    "soak": Budget(stories=1_000_000, steps=80, seconds=3600.0),
}
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
class BlockManagerRun(StatefulRun[Subject]):
    """A run on a block manager."""

    suite = "block-manager"
    all_laws = laws.ALL_LAWS
    processes = laws.Processes

    @staticmethod
    def prepare(subject: Subject, options: StatefulOptions) -> BlockManagerRun:
        """Check the options.

        Raises:
            ConfigError: the profile is unknown, or the manager declares a power that does not
                exist.
        """
        check_powers(subject.manager)
        return BlockManagerRun(subject, options, named("profile", options.profile, PROFILES))

    @property
    def part(self) -> type[BlockManager]:
        return self.subject.manager

    @property
    def powers(self) -> frozenset[str]:
        return frozenset(self.subject.manager.powers)

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
        return {"powers": ", ".join(sorted(self.powers)) or "none"}

    def excuse(self, law: Law, found: Found) -> str:
        if law is laws.Processes and not self.importable:
            return (
                "another process cannot import the class, which is defined in a function or a "
                "script"
            )
        return ""


def run_suite(
    subject: Subject, options: StatefulOptions, observer: StatefulObserver | None = None
) -> Report:
    """Try every law on a block manager.

    Raises:
        ConfigError: as ``BlockManagerRun.prepare`` says.
        JackfieldError: a process of the run died.
    """
    return BlockManagerRun.prepare(subject, options).try_all(observer)


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
