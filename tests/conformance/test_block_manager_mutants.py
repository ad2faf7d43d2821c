"""The mutants of the block manager suite as a list, and a quick hunt."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mutant_lists import (
    assert_many,
    assert_soon_caught,
    assert_table_of,
    assert_well_described,
    read_table,
)

from jackfield.conformance.block_manager.laws import ALL_LAWS
from jackfield.conformance.block_manager.mutants import MUTANTS, Mutant
from jackfield.conformance.block_manager.plain_manager import PlainBlockManager
from jackfield.conformance.block_manager.suite import QUARRY
from jackfield.conformance.stateful.hunt import Kill, hunt, to_markdown
from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.errors import ConfigError

#: A hunt in a test goes for those that the table says are caught in so few stories.
FEW = 30


@pytest.fixture
def table(repository: Path) -> str:
    return read_table(repository, "block-manager-mutants")


def test_there_are_many_and_each_says_what_is_broken() -> None:
    assert_many(MUTANTS, at_least=80, published=12)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_the_plain_manager_but_for_something(mutant: Mutant) -> None:
    assert_well_described(mutant, word=r"[a-z0-9]+")
    assert mutant.part.__mro__[1] is PlainBlockManager
    mutant.part(BlockManagerConfig(4, 2, 8))


def test_the_table_is_of_these_mutants_and_all_are_caught(table: str) -> None:
    assert_table_of(table, MUTANTS, ALL_LAWS)


def test_those_that_are_caught_soon_are_caught(table: str) -> None:
    assert_soon_caught(QUARRY, table, FEW, at_least=60)


def test_a_survivor_is_told() -> None:
    page = to_markdown(QUARRY, [Kill(MUTANTS[0].name, "", 7, 1.0, "")], "a command")
    assert page.startswith("# Mutants of the block manager suite\n\n0 of 1 deliberately broken")
    assert page.endswith("| **nothing** | 7 |\n")


def test_an_unknown_mutant_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mutant is called 'leak_on_fre'; did you mean"):
        hunt(QUARRY, ["leak_on_fre"])
