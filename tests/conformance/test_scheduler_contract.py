"""The suite of schedulers in a test suite of others: the contract class, and the plugin's suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: A plugin that makes runs small; with a profile of the suite this would take minutes.
SMALL_RUNS = """
from jackfield.conformance.scheduler import suite
from jackfield.conformance.stateful import search
from jackfield.conformance.stateful.search import Budget

suite.PROFILES["quick"] = Budget(stories=10, steps=12, seconds=60.0)
suite._TO_COVER = (("operation", "step", ""),)
search.SHRINK_SECONDS = 0.5
"""
THEIRS = '''
from jackfield.conformance.scheduler.contract import SchedulerContract
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.core.block_managers.radix import RadixBlockManager


class Theirs(PlainScheduler):
    """Says yes to whatever has to end."""

    name = "theirs"

    def finish(self, request_id):
        super().finish(request_id)
        return True


class TestTheirs(SchedulerContract):
    scheduler = Theirs
    block_manager = RadixBlockManager
'''


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of pytest in a folder of its own, and what it printed."""
    (folder / "small_runs.py").write_text(SMALL_RUNS, encoding="utf-8")
    plugins = ["-p", "small_runs", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", *plugins, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_subclass_is_a_test_of_each_law(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS, encoding="utf-8")
    status, printed = run_pytest(tmp_path, "test_theirs.py")
    assert status == 1, printed
    told = "said True, then True; it must be True, then False"
    assert "errors: Right calls raise nothing, and wrong calls raise the error" in printed
    assert re.search(rf"^finish\('r\d'\) {told}$", printed, re.MULTILINE)
    assert re.search(r"^World\(.+\n(Arrive|Step|Misfit|Abort)\(", printed, re.MULTILINE)
    assert "Traceback" not in printed
    assert "FAILED test_theirs.py::TestTheirs::test_law[errors]" in printed
    (passed,) = re.findall(r"1 failed, (\d+) passed", printed)
    assert int(passed) > 20


PLUGIN = ["-p", "jackfield.conformance.pytest_plugin"]
SUITE = ["--pyargs", "jackfield.conformance.scheduler_suite"]


def test_the_plugin_names_the_parts(tmp_path: Path) -> None:
    chosen = ["--scheduler", "queue", "--block-manager", "contiguous", "--scheduling-policy"]
    law = ["-k", "S1_budget or S21_swap_space"]
    status, printed = run_pytest(tmp_path, *PLUGIN, *SUITE, *chosen, "fcfs", *law)
    assert status == 0, printed
    assert "1 passed, 1 skipped" in printed
    assert "the block manager does not declare 'swap'" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SUITE], "--scheduler NAME is needed, with -p jackfield.conformance.pytest_plugin"),
        ([*PLUGIN, *SUITE, "--scheduler", "quue"], "did you mean 'queue'"),
    ],
)
def test_the_plugin_says_what_is_missing(arguments: list[str], words: str, tmp_path: Path) -> None:
    status, printed = run_pytest(tmp_path, *arguments, "-x")
    assert status != 0
    assert words in printed
