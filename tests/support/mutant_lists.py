"""What holds for the mutants of every stateful suite, and for the committed table of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jackfield.conformance.stateful.hunt import Mutant, Quarry, hunt, laws_of_table
from jackfield.conformance.stateful.laws import StatefulLaw


def read_table(repository: Path, name: str) -> str:
    """The page ``docs/conformance/NAME.md``."""
    return (repository / "docs" / "conformance" / f"{name}.md").read_text(encoding="utf-8")


def assert_many(mutants: Sequence[Mutant], at_least: int, published: int) -> None:
    """There are so many, each with a name and a fault of its own, and so many met elsewhere.

    Raises:
        AssertionError: something is otherwise.
    """
    names = {mutant.name for mutant in mutants}
    assert len(names) == len(mutants) >= at_least, (len(names), len(mutants))
    assert len({mutant.fault for mutant in mutants}) == len(mutants), "a fault stands twice"
    met = [mutant.name for mutant in mutants if mutant.published]
    assert len(met) >= published, met


def assert_well_described(mutant: Mutant, word: str) -> None:
    """A mutant says in its name and in one sentence what is broken, and where it was met.

    Args:
        mutant: the mutant.
        word: pattern of the words of its name, of which there are two or more.

    Raises:
        AssertionError: something is otherwise.
    """
    assert re.fullmatch(f"{word}(_{word})+", mutant.name), mutant.name
    assert re.fullmatch(r"[A-Za-z][^.]*\.", mutant.fault), "one sentence"
    for place in mutant.published:
        assert re.fullmatch(r"[\w-]+#\d+", place), place
    assert mutant.part.name == mutant.name, mutant.part.name


def assert_table_of(
    table: str, mutants: Sequence[Mutant], laws: Sequence[type[StatefulLaw]]
) -> None:
    """A table is of these mutants, in their order, and these laws caught all.

    Raises:
        AssertionError: something is otherwise.
    """
    caught = laws_of_table(table)
    assert list(caught) == [mutant.name for mutant in mutants], list(caught)
    unknown = set(caught.values()) - {law.name for law in laws}
    assert unknown == set(), unknown
    for mutant in mutants:
        row = f"| `{mutant.name}` | {mutant.fault} | {', '.join(mutant.published)} |"
        assert row in table, row
    total = f"{len(mutants)} of {len(mutants)} deliberately broken"
    assert total in table, total


def assert_soon_caught(quarry: Quarry, table: str, few: int, at_least: int) -> None:
    """A hunt catches those mutants that a table says are caught in few stories.

    Args:
        quarry: the suite.
        table: the table.
        few: the largest number of stories that is few.
        at_least: how many mutants there have to be of the kind.

    Raises:
        AssertionError: there are fewer of them, or one is not caught.
    """
    stories = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", table, re.MULTILINE))
    quick = [name for name, count in stories.items() if int(count) <= few]
    assert len(quick) >= at_least, len(quick)
    kills = hunt(quarry, quick, jobs=2)
    survivors = [kill.mutant for kill in kills if not kill.killed]
    assert survivors == [], survivors
    hunted = [kill.mutant for kill in kills]
    assert hunted == quick, hunted
