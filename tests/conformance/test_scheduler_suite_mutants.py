"""The mutants of the scheduler suite as a list, and a quick hunt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jackfield.conformance.scheduler.laws import ALL_LAWS
from jackfield.conformance.scheduler.mutants import MUTANTS, Mutant
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.conformance.scheduler.suite import QUARRY
from jackfield.conformance.stateful.hunt import hunt, laws_of_table

#: A hunt in a test goes for those that the table says are caught in so few stories.
FEW = 12


@pytest.fixture
def table(repository: Path) -> str:
    path = repository / "docs" / "conformance" / "scheduler-mutants.md"
    return path.read_text(encoding="utf-8")


def test_there_are_many_and_each_says_what_is_broken() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 110
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(bool(mutant.published) for mutant in MUTANTS) >= 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_the_plain_scheduler_but_for_something(mutant: Mutant) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", mutant.name)
    assert re.fullmatch(r"[A-Za-z][^.]*\.", mutant.fault), "one sentence"
    for place in mutant.published:
        assert re.fullmatch(r"[\w-]+#\d+", place)
    assert issubclass(mutant.part, PlainScheduler)
    assert mutant.part.name == mutant.name


def test_the_table_is_of_these_mutants_and_all_are_caught(table: str) -> None:
    caught = laws_of_table(table)
    assert list(caught) == [mutant.name for mutant in MUTANTS]
    assert set(caught.values()) <= {law.name for law in ALL_LAWS}
    for mutant in MUTANTS:
        assert f"| `{mutant.name}` | {mutant.fault} | {', '.join(mutant.published)} |" in table
    assert f"{len(MUTANTS)} of {len(MUTANTS)} deliberately broken" in table


def test_those_that_are_caught_soon_are_caught(table: str) -> None:
    stories = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", table, re.MULTILINE))
    quick = [name for name, count in stories.items() if int(count) <= FEW]
    assert len(quick) >= 60
    kills = hunt(QUARRY, quick, jobs=2)
    assert [kill.mutant for kill in kills if not kill.killed] == []
    assert [kill.mutant for kill in kills] == quick
