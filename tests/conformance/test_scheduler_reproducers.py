"""A failing story as a file: it fails as long as the scheduler is broken, and then no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jackfield.conformance.scheduler.laws import ALL_LAWS, Drain
from jackfield.conformance.scheduler.mutants import MUTANTS
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.conformance.scheduler.reproduce import show
from jackfield.conformance.scheduler.script import story_script, story_text
from jackfield.conformance.scheduler.suite import machine_of, subject_of
from jackfield.conformance.scheduler.world import Arrive, Operation, Step, Subject, Wish, World
from jackfield.conformance.stateful import search as searching
from jackfield.conformance.stateful.laws import LawBroken
from jackfield.conformance.stateful.search import Budget, search
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.sharing import SharingOptions
from jackfield.core.scheduler import Scheduler


def mutant(name: str) -> type[Scheduler]:
    (found,) = [one.part for one in MUTANTS if one.name == name]
    return found


def run(script: str, folder: Path) -> tuple[int, str]:
    """The exit status of a script, and what it printed."""
    path = folder / "story.py"
    path.write_text(script, encoding="utf-8")
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "leak_on_abort",
        "policy_errors_not_attributed",
        "chunk_off_by_one",
        "hit_covers_the_last_token",
        "absolute_time_matters",
    ],
)
def test_a_reproducer_fails_until_the_scheduler_is_mended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 0.5)
    scheduler = mutant(name)
    budget = Budget(500, 25, 60.0)
    found = search(machine_of(subject_of(scheduler)), budget, seed=0, first_only=True)
    (failure,) = found.failures.values()
    (law,) = [one for one in ALL_LAWS if one.name == failure.law]
    assert f"Law {law.name}: {law.title()}" in failure.script.replace("\n", " ")
    status, printed = run(failure.script, tmp_path)
    assert status == 1, printed
    assert printed.splitlines()[0] == failure.story.splitlines()[0]
    assert printed.splitlines()[-1] == f"law {law.name} is broken: {failure.message}"
    mended = failure.script.replace(scheduler.__module__, PlainScheduler.__module__)
    mended = mended.replace(scheduler.__qualname__, PlainScheduler.__qualname__)
    status, printed = run(mended, tmp_path)
    assert status == 0, printed
    assert printed.splitlines()[-1] == f"law {law.name} is kept"


def test_another_law_that_stops_the_story_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    subject = subject_of(mutant("scheduled_twice"))
    operations: list[Operation] = [Arrive(), Arrive(completion=3), Step()]
    assert show(subject, World(), operations, "B8_no_leak") == 1
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith("the story cannot be told to its end, because another law is broken")
    assert "S5_once: the step schedules ['r0'," in told[-1]
    assert told[3].startswith("Step()  # r0:0+1 ")


def test_a_reproducer_needs_no_hypothesis() -> None:
    module = "jackfield.conformance.scheduler.reproduce"
    code = f"import {module}, sys; sys.exit('hypothesis' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


BROKEN = LawBroken(Drain, 'a path C:\\new, and """quotes""" in the message')


def test_many_equal_operations_are_counted() -> None:
    operations: list[Operation] = [Arrive(), *[Step()] * 7, Step(fails="propose"), Step()]
    lines = ["r0: 1 of 2 tokens", *["nothing scheduled"] * 7]
    assert story_text(World(), operations, lines).splitlines() == [
        "World()",
        "Arrive()  # r0: 1 of 2 tokens",
        "Step()  # nothing scheduled (7 times)",
        "Step(fails='propose')",
        "Step()",
    ]
    script = story_script(subject_of(PlainScheduler), World(), operations, BROKEN)
    assert '    *[Step()] * 7,\n    Step(fails="propose"),\n    Step(),\n]' in script


def test_a_script_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that were set, the folder of a module that is not installed, wishes."""
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "their_scheduler.py").write_text(
        "from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler\n"
        "class Theirs(PlainScheduler):\n    name = 'theirs'\n"
    )
    monkeypatch.syspath_prepend(str(package))
    theirs = __import__("their_scheduler").Theirs
    policy = subject_of(theirs).policy
    options = SharingOptions(eviction="fifo")
    subject = Subject(theirs, PagedBlockManager, policy, manager_options=options)
    world = World(caching=True, wishful=True, max_model_len=12, num_host_blocks=2, mode="swap")
    wish = Wish(admission=(1, 0), grants=((0, 1),), preempt=(0,), swaps=True)
    script = story_script(subject, world, [Arrive(length=3), Step(wish), Step()], BROKEN)
    assert f"sys.path.append({str(package)!r})" in script
    assert 'SharingOptions.model_validate({"eviction": "fifo"})' in script
    assert "a path C:\\\\new, and '''quotes''' in the message" in script
    status, printed = run(script, tmp_path)
    assert (status, printed.splitlines()[-1]) == (0, "law S24_drain is kept"), printed


def test_a_script_says_that_a_class_cannot_be_imported(tmp_path: Path) -> None:
    class Local(PlainScheduler):
        pass

    script = story_script(subject_of(Local), World(), [Arrive()], BROKEN)
    status, printed = run(script, tmp_path)
    assert status == 1
    assert printed.startswith("Local is defined in a function or a script")
