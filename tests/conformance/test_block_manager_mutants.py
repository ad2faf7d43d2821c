"""The mutants of the block manager suite as a list, and a quick hunt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jackfield.conformance.block_manager.laws import ALL_LAWS
from jackfield.conformance.block_manager.mutants import MUTANTS, Mutant
from jackfield.conformance.block_manager.plain_manager import PlainBlockManager
from jackfield.conformance.block_manager.suite import QUARRY
from jackfield.conformance.stateful.hunt import Kill, hunt, laws_of_table, to_markdown
from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.errors import ConfigError

#: A hunt in a test goes for those that the table says are caught in so few stories.
FEW = 30


@pytest.fixture
def table(repository: Path) -> str:
    path = repository / "docs" / "conformance" / "block-manager-mutants.md"
    return path.read_text(encoding="utf-8")


def test_there_are_many_and_each_says_what_is_broken() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(bool(mutant.published) for mutant in MUTANTS) >= 12


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_the_plain_manager_but_for_something(mutant: Mutant) -> None:
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", mutant.name)
    assert re.fullmatch(r"[A-Za-z][^.]*\.", mutant.fault), "one sentence"
    for place in mutant.published:
        assert re.fullmatch(r"[\w-]+#\d+", place)
    assert mutant.part.__mro__[1] is PlainBlockManager
    assert mutant.part.name == mutant.name
    mutant.part(BlockManagerConfig(4, 2, 8))


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


def test_a_survivor_is_told() -> None:
    page = to_markdown(QUARRY, [Kill(MUTANTS[0].name, "", 7, 1.0, "")], "a command")
    assert page.startswith("# Mutants of the block manager suite\n\n0 of 1 deliberately broken")
    assert page.endswith("| **nothing** | 7 |\n")


def test_an_unknown_mutant_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mutant is called 'leak_on_fre'; did you mean"):
        hunt(QUARRY, ["leak_on_fre"])
