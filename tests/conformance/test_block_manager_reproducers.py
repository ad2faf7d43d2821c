"""A failing story as a file: it fails as long as the manager is broken, and then no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jackfield.conformance.block_manager.calls import Call, Made, Outcome, Subject, make
from jackfield.conformance.block_manager.laws import Contents
from jackfield.conformance.block_manager.mutants import MUTANTS
from jackfield.conformance.block_manager.plain_manager import PlainBlockManager
from jackfield.conformance.block_manager.script import story_script, story_text
from jackfield.conformance.block_manager.suite import machine_of
from jackfield.conformance.stateful import search as searching
from jackfield.conformance.stateful.laws import LawBroken
from jackfield.conformance.stateful.search import Budget, search
from jackfield.core.block_manager import BlockManager, BlockManagerConfig


def mutant(name: str) -> type[BlockManager]:
    (found,) = [one.part for one in MUTANTS if one.name == name]
    return found


def check(script: str, manager: type[BlockManager], folder: Path) -> None:
    """The script fails with the manager, and not with the plain one in its place."""
    mended = script.replace(manager.__module__, PlainBlockManager.__module__)
    mended = mended.replace(manager.__qualname__, PlainBlockManager.__qualname__)
    for expected, text in ((1, script), (0, mended)):
        path = folder / f"{expected}.py"
        path.write_text(text, encoding="utf-8")
        command = [sys.executable, str(path)]
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        assert done.returncode == expected, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "leak_on_free",
        "freed_twice",
        "free_of_an_unknown_request_raises",
        "never_for_what_fits_alone",
        "free_list_turned_by_a_refusal",
        "probe_counted_in_statistics",
        "second_admission_overwrites_the_first",
        "copy_not_told",
    ],
)
def test_a_reproducer_fails_until_the_manager_is_mended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 0.7)
    manager = mutant(name)
    machine = machine_of(Subject(manager))
    found = search(machine, Budget(1000, 30, 30.0), seed=0, first_only=True)
    (failure,) = found.failures.values()
    assert f"Law {failure.law}:" in failure.script
    assert "jackfield.conformance.stateful" not in failure.script
    check(failure.script, manager, tmp_path)


CONFIG = BlockManagerConfig(4, 2, 8, 0.0, enable_prefix_caching=True)
TOKENS = (0, 0, 0)


def story_of(manager: type[BlockManager]) -> list[Made]:
    """Two requests with the same tokens and different salts, the first of them computed."""
    built, story = manager(CONFIG), []
    for call in (
        Call("allocate", ("r1", TOKENS, 3)),
        Call("note", ("write", "r1", list(TOKENS), 3)),
        Call("commit", ("r1", TOKENS, 3)),
        Call("can_allocate", (TOKENS, 3), {"salt": "x"}),
        Call("allocate", ("r2", TOKENS, 3), {"salt": "x"}),
    ):
        outcome = Outcome() if call.method == "note" else make(built, call)
        story.append(Made(call, outcome))
    return story


def test_a_reproducer_holds_the_contents_of_the_cache_where_they_matter(tmp_path: Path) -> None:
    manager = mutant("salt_ignored")
    broken = LawBroken(Contents, "as it says", ["assert not wrong('r2'), wrong('r2')"])
    script = story_script(Subject(manager), CONFIG, story_of(manager), [], broken)
    assert "write('r1', [0, 0, 0], 3)" in script
    check(script, manager, tmp_path)


def test_a_story_is_the_calls_with_what_came_of_them(repository: Path) -> None:
    """And the one that the page shows is such a story."""
    text = story_text(CONFIG, story_of(mutant("salt_ignored")))
    assert text.splitlines()[1:] == [
        "manager.allocate('r1', [0, 0, 0], 3)  # 0 cached, table [0, 1]",
        "manager.commit('r1', [0, 0, 0], 3)  # table [0, 1]",
        "manager.can_allocate([0, 0, 0], 3, salt='x')  # AllocationStatus.OK",
        "manager.allocate('r2', [0, 0, 0], 3, salt='x')  # 2 cached, table [0, 2]",
    ]
    page = (repository / "docs" / "conformance-block-manager.md").read_text(encoding="utf-8")
    assert text in page, f"write:\n\n{text}"
