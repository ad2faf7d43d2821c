"""The suite of block managers passes right ones, and says what is wrong with others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from jackfield.conformance.block_manager import suite
from jackfield.conformance.block_manager.calls import Subject
from jackfield.conformance.block_manager.contract import BlockManagerContract, assert_conforms
from jackfield.conformance.block_manager.laws import ALL_LAWS
from jackfield.conformance.block_manager.mutants import MUTANTS
from jackfield.conformance.block_manager.plain_manager import PlainBlockManager
from jackfield.conformance.block_manager.suite import machine_of, run_suite
from jackfield.conformance.report import from_json, to_json
from jackfield.conformance.report_text import to_markdown
from jackfield.conformance.results import Status
from jackfield.conformance.stateful import search as searching
from jackfield.conformance.stateful.laws import LawBroken, StatefulLaw
from jackfield.conformance.stateful.search import Budget, Found, LawMachine, search
from jackfield.conformance.stateful.suite import StatefulOptions
from jackfield.core.block_manager import BlockManager
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.errors import ConfigError

SMALL = Budget(stories=60, steps=30, seconds=30.0)
MANAGERS = [PlainBlockManager, PagedBlockManager, RadixBlockManager, ContiguousBlockManager]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few stories, and little time to make them small."""
    monkeypatch.setitem(suite.PROFILES, "quick", SMALL)
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 1.5)


def mutant(name: str) -> type[BlockManager]:
    (found,) = [one.part for one in MUTANTS if one.name == name]
    return found


@pytest.mark.parametrize("manager", MANAGERS)
def test_right_managers_pass(manager: type[BlockManager]) -> None:
    found = search(machine_of(Subject(manager)), SMALL, seed=1)
    assert {law: one.message for law, one in found.failures.items()} == {}
    assert found.stories == SMALL.stories
    owed = {law.name for law in ALL_LAWS if not law.power or law.power in manager.powers}
    assert owed - {"B24_processes"} <= {law for law, count in found.exercised.items() if count}


def test_a_law_that_is_broken_is_set_aside_and_others_are_found() -> None:
    class Twice(mutant("reclaimable_counts_shared_blocks")):  # type: ignore[misc]
        def largest_request(self) -> int:
            return 1

    found = search(machine_of(Subject(Twice)), SMALL, seed=1, shrink=False)
    assert {"B20_reclaimable", "largest_request"} <= found.failures.keys()
    first = search(machine_of(Subject(Twice)), SMALL, seed=1, shrink=False, first_only=True)
    assert len(first.failures) == 1


def test_the_same_seed_tells_the_same_stories() -> None:
    def told(seed: int) -> Found:
        return search(machine_of(Subject(PlainBlockManager)), replace(SMALL, stories=15), seed)

    one, same, other = told(3), told(3), told(4)
    assert (one.calls, one.coverage) == (same.calls, same.coverage)
    assert (one.calls, one.coverage) != (other.calls, other.coverage)


@pytest.mark.usefixtures("small")
def test_the_report_of_a_broken_manager(tmp_path: Path) -> None:
    options = StatefulOptions(reproducers=tmp_path, seed=1)
    report = run_suite(Subject(mutant("hit_covers_the_last_token")), options)
    assert not report.ok
    assert report.suite == "block-manager"
    assert [one.law for one in report.results] == [law.name for law in ALL_LAWS]
    (failed,) = [one for one in report.results if one.law == "S12_last_token"]
    assert failed.status is Status.FAILED
    assert "nothing of the" in failed.reason
    assert failed.case.splitlines()[0].startswith("manager = Manager(BlockManagerConfig(num_blocks")
    assert Path(failed.reproducer).parent == tmp_path
    page = to_markdown(report)
    assert "# Block-manager conformance: `hit_covers_the_last_token`" in page
    assert failed.case in page
    again = from_json(to_json(report))
    assert [one.case for one in again.results] == [one.case for one in report.results]


@pytest.mark.usefixtures("small")
def test_the_report_of_a_right_manager() -> None:
    report = assert_conforms(ContiguousBlockManager, seed=1)
    by_law = {one.law: one for one in report.results}
    assert by_law["B16_swap"].status is Status.NOT_CLAIMED
    assert by_law["B16_swap"].reason == "the power 'swap' is not declared"
    assert by_law["B24_processes"].examples > 0
    assert report.uncovered == ()
    assert set(report.coverage) == {"operation", "can_allocate", "append"}


@pytest.mark.usefixtures("small")
def test_what_another_process_cannot_import_is_not_tried_there() -> None:
    class Local(PlainBlockManager):
        pass

    report = assert_conforms(Local, jobs=2, seed=1)
    (processes,) = [one for one in report.results if one.law == "B24_processes"]
    assert processes.status is Status.NOT_CLAIMED
    assert "another process cannot import the class" in processes.reason


@pytest.mark.usefixtures("small")
def test_ids_that_depend_on_the_hash_of_text_show_in_another_process() -> None:
    with pytest.raises(AssertionError, match="does not conform:\n\nB24_processes") as error:
        assert_conforms(mutant("ids_depend_on_hash_order"), seed=1)
    assert "PYTHONHASHSEED=" in str(error.value)


@pytest.mark.usefixtures("small")
def test_processes_share_the_stories() -> None:
    report = assert_conforms(PagedBlockManager, jobs=2, seed=1)
    (first,) = [one for one in report.results if one.law == "B1_partition"]
    assert first.examples >= SMALL.stories - 2


def test_a_manager_with_an_unknown_power_is_refused() -> None:
    class Odd(PlainBlockManager):
        powers = frozenset({"telepathy"})

    with pytest.raises(ConfigError, match="declares the power 'telepathy', which does not exist"):
        assert_conforms(Odd)
    with pytest.raises(ConfigError, match="--profile 'quik' is unknown; did you mean 'quick'"):
        assert_conforms(PlainBlockManager, profile="quik")


def test_a_class_without_a_manager_is_refused() -> None:
    class Nothing(BlockManagerContract):
        pass

    with pytest.raises(TypeError, match="Nothing has to set `manager`"):
        Nothing.suite_report()


@pytest.mark.usefixtures("small")
class TestContract(BlockManagerContract):
    """The contract as it is used."""

    manager = PagedBlockManager


class Counting(StatefulLaw):
    """Counts stay below three.

    A law for a machine without a part.
    """

    name = "counting"


class CountingMachine(LawMachine):
    """Counts up; the story is the count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @rule(by=st.integers(1, 2))
    def up(self, by: int) -> None:
        self.count += by
        self.check(Counting, self.count < 3, lambda: f"the count is {self.count}")

    def text(self) -> str:
        return f"count {self.count}"

    def script(self, broken: LawBroken) -> str:
        return broken.message

    def size(self) -> tuple[int, ...]:
        return (self.count,)


def test_the_smallest_story_is_kept() -> None:
    found = search(CountingMachine, Budget(50, 10, 10.0), seed=0)
    failure = found.failures["counting"]
    assert (failure.story, failure.message) == ("count 3", "the count is 3")
    assert found.exercised["counting"] == found.stories - 1
    assert Counting.title() == "Counts stay below three."


def test_an_error_of_the_machine_itself_is_not_swallowed() -> None:
    class Faulty(CountingMachine):
        def finish(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        search(Faulty, Budget(5, 1, 10.0), seed=0)


def test_no_story_is_begun_after_the_time() -> None:
    assert search(CountingMachine, Budget(50, 10, 0.0), seed=0).stories == 0
