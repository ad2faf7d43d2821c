"""The mutants of the scheduler suite as a list, and a quick hunt."""

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

from jackfield.conformance.scheduler.laws import ALL_LAWS
from jackfield.conformance.scheduler.mutants import MUTANTS, Mutant
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.conformance.scheduler.suite import QUARRY

#: A hunt in a test goes for those that the table says are caught in so few stories.
FEW = 12


@pytest.fixture
def table(repository: Path) -> str:
    return read_table(repository, "scheduler-mutants")


def test_there_are_many_and_each_says_what_is_broken() -> None:
    assert_many(MUTANTS, at_least=110, published=10)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_the_plain_scheduler_but_for_something(mutant: Mutant) -> None:
    assert_well_described(mutant, word=r"[a-z]+")
    assert issubclass(mutant.part, PlainScheduler)


def test_the_table_is_of_these_mutants_and_all_are_caught(table: str) -> None:
    assert_table_of(table, MUTANTS, ALL_LAWS)


def test_those_that_are_caught_soon_are_caught(table: str) -> None:
    assert_soon_caught(QUARRY, table, FEW, at_least=60)
