"""Runs a stateful suite on deliberately broken parts: every one of them has to be caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from ...core.errors import ConfigError
from ...plugins.validation import did_you_mean
from .search import Budget, Found, LawMachine, search
from .workers import pool

#: Stories of the first attempt at a mutant.
_FEW_STORIES = 60


@dataclass(frozen=True)
class Mutant:
    """A part that is wrong in one way.

    Attributes:
        name: unique, and the ``name`` of the part too.
        fault: one sentence that says what is broken.
        part: the broken part.
        published: where users of other libraries met such a fault: ``project#number``.
    """

    name: str
    fault: str
    part: type[Any]
    published: tuple[str, ...] = ()


class Mutants:
    """A list of mutants that a decorator fills."""

    def __init__(self) -> None:
        self._registered: list[Mutant] = []

    def mutant(
        self, name: str, fault: str, published: tuple[str, ...] = ()
    ) -> Callable[[type[Any]], type[Any]]:
        """Register the decorated part; the arguments are the fields of ``Mutant``."""

        def register(part: type[Any]) -> type[Any]:
            part.name = name
            self._registered.append(Mutant(name, fault, part, published))
            return part

        return register

    def registered_in(self, *modules: ModuleType) -> tuple[Mutant, ...]:
        """The mutants that modules define, in their order."""
        names = [module.__name__ for module in modules]
        return tuple(
            one for name in names for one in self._registered if one.part.__module__ == name
        )


@dataclass(frozen=True)
class Kill:
    """How a mutant fared.

    Attributes:
        mutant: name of who it is.
        caught_by: law that it broke; "" if none noticed.
        examples: stories up to then.
        seconds: time up to then.
        message: what the law said.
    """

    mutant: str
    caught_by: str
    examples: int
    seconds: float
    message: str

    @property
    def killed(self) -> bool:
        """Whether any law noticed."""
        return bool(self.caught_by)


@dataclass(frozen=True)
class Quarry:
    """A suite as far as a hunt needs it; can be pickled.

    Attributes:
        title: first line of the table, such as "Mutants of the block-manager suite".
        parts: what mutants are, such as "block managers".
        mutants: gives all of them.
        machine: from the broken part to the machine that tells its stories.
        budget: of one mutant.
        after: called with the part and what the stories found; may find more.
    """

    title: str
    parts: str
    mutants: Callable[[], Sequence[Mutant]]
    machine: Callable[[type[Any]], type[LawMachine]]
    budget: Budget
    after: Callable[[type[Any], Found], None] = lambda part, found: None

    def named(self, names: Sequence[str]) -> list[Mutant]:
        """The mutants of these names; all if there are none.

        Raises:
            ConfigError: a name is unknown.
        """
        by_name = {mutant.name: mutant for mutant in self.mutants()}
        for name in names:
            if name not in by_name:
                raise ConfigError(f"no mutant is called {name!r}{did_you_mean(name, by_name)}")
        return [by_name[name] for name in names] or list(by_name.values())


def hunt(
    quarry: Quarry,
    names: Sequence[str] = (),
    *,
    jobs: int = 1,
    seed: int = 0,
    report: Callable[[Kill], None] = lambda kill: None,
) -> list[Kill]:
    """Run the suite on mutants.

    Args:
        quarry: the suite.
        names: of the mutants; none is all.
        jobs: processes that mutants are shared among.
        seed: of the stories.
        report: called after each mutant.

    Returns:
        One entry for each mutant, in their order.

    Raises:
        ConfigError: a name is unknown.
    """
    mutants = quarry.named(names)
    found: dict[str, Kill] = {}
    hunt_one = partial(_hunt_one, quarry, seed)
    if jobs == 1:
        for mutant in mutants:
            found[mutant.name] = hunt_one(mutant.name)
            report(found[mutant.name])
    else:
        with pool(jobs) as processes:
            pending = [processes.submit(hunt_one, mutant.name) for mutant in mutants]
            for done in as_completed(pending):
                kill = done.result()
                found[kill.mutant] = kill
                report(kill)
    return [found[mutant.name] for mutant in mutants]


def _hunt_one(quarry: Quarry, seed: int, name: str) -> Kill:
    (mutant,) = quarry.named([name])
    started = time.perf_counter()
    stories, machine = 0, quarry.machine(mutant.part)
    # What comes after the stories takes as long for few stories as for many.
    few = replace(quarry.budget, stories=min(_FEW_STORIES, quarry.budget.stories))
    for attempt, budget in enumerate((few, quarry.budget)):
        found = search(machine, budget, seed + attempt, shrink=False, first_only=True)
        stories += found.stories
        quarry.after(mutant.part, found)
        for law, failure in found.failures.items():
            return Kill(name, law, stories, time.perf_counter() - started, failure.message)
    return Kill(name, "", stories, time.perf_counter() - started, "")


def to_markdown(quarry: Quarry, kills: Sequence[Kill], command: str) -> str:
    """The table of mutants, and how many the suite caught."""
    by_name = {mutant.name: mutant for mutant in quarry.mutants()}
    killed = sum(kill.killed for kill in kills)
    lines = [
        f"# {quarry.title}",
        "",
        f"{killed} of {len(kills)} deliberately broken {quarry.parts} are caught. Written by "
        f"`{command}`; a mutant is tried for at most {quarry.budget.stories} stories of "
        f"{quarry.budget.steps} steps, and the first law that notices is named.",
        "",
        "| mutant | fault | published as | caught by | stories |",
        "|---|---|---|---|---:|",
    ]
    for kill in kills:
        mutant = by_name[kill.mutant]
        caught = f"`{kill.caught_by}`" if kill.killed else "**nothing**"
        lines.append(
            f"| `{mutant.name}` | {mutant.fault} | {', '.join(mutant.published)} | {caught} | "
            f"{kill.examples} |"
        )
    return "\n".join(lines) + "\n"


def laws_of_table(table: str) -> Mapping[str, str]:
    """From a table of ``to_markdown``: mutant to the law that caught it."""
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("| `"): row[3].strip("`") for row in rows}
