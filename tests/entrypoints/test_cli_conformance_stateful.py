"""``jackfield conformance block-manager``, ``scheduler`` and their sisters, on small real runs."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield.conformance.block_manager import suite
from jackfield.conformance.report import read_report
from jackfield.conformance.results import Status
from jackfield.conformance.scheduler import suite as scheduler_suite
from jackfield.conformance.stateful import search as searching
from jackfield.conformance.stateful.search import Budget
from jackfield.entrypoints import cli, cli_conformance_stories
from jackfield.entrypoints.cli_conformance_progress import SuiteProgress

MUTANTS = "jackfield.conformance.block_manager.mutants"
SCHEDULER_MUTANTS = "jackfield.conformance.scheduler.mutants"
#: For each suite: arguments, and what is said of them.
BAD_INPUT = {
    "block-manager": [
        (("--name", "pagde"), "no plugin registers"),
        (("--name", "paged", "--profile", "tiny"), "--profile 'tiny' is unknown"),
        (("--name", "paged", "--options", "[1]"), "--options '[1]' is wrong"),
    ],
    "scheduler": [
        (("--name", "quue"), "did you mean 'queue'"),
        (("--name", "queue", "--policy", "fcsf"), "did you mean 'fcfs'"),
        (("--name", "queue", "--block-manager", "pagde"), "did you mean 'paged'"),
        (("--name", "queue", "--profile", "tiny"), "--profile 'tiny' is unknown"),
        (("--name", "queue", "--options", "{"), "--options '{' is wrong"),
        (("--name", "queue", "--options", '{"x": 1}'), "field 'x' is unknown"),
        (("--name", "queue", "--policy-options", "[1]"), "--policy-options '[1]' is wrong"),
        (("--name", "queue", "--block-manager-options", "7"), "--block-manager-options '7' is"),
        (("--name", "nowhere:Scheduler"), "No module named 'nowhere'"),
        (("--name", "jackfield.core.scheduler:Scheduler"), "does not implement add, finish"),
        (
            ("--name", "queue", "--block-manager-options", '{"eviction": "lfu"}'),
            "'paged' cannot be tried",
        ),
        (("--name", "queue", "--report", "/proc/nowhere/r.json"), "cannot be written"),
    ],
}
#: For each suite: lines about its laws.
LAWS = {
    "block-manager": [
        "B17_fork (power 'fork')",
        "Read through its block table, a request finds its own keys and values",
    ],
    "scheduler": [
        "S25_order (owed under the policy 'fcfs')",
        "S21_swap_space (owed with block managers of the power 'swap')",
        "A plan is empty only if nothing is live",
    ],
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs, and a logger without handlers of an earlier one."""
    logging.getLogger("jackfield").handlers.clear()
    small = Budget(stories=100, steps=30, seconds=30.0)
    monkeypatch.setitem(suite.PROFILES, "quick", small)
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 0.5)
    few = Budget(stories=12, steps=20, seconds=30.0)
    monkeypatch.setitem(scheduler_suite.PROFILES, "quick", few)
    monkeypatch.setattr(scheduler_suite, "_TO_COVER", (("operation", "step", ""),))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of ``jackfield conformance ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["jackfield", "conformance", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_right_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--report", tmp_path / "new" / "r.json", "--markdown", tmp_path / "r.md"]
    status = run(monkeypatch, "block-manager", "--name", "paged", "--jobs", 1, "--seed", 1, *files)
    printed = capsys.readouterr()
    assert status == 0, printed.out
    assert printed.out.splitlines()[-1].startswith("passed on the host")
    assert "B14_contents: pass, " in printed.err
    report = read_report(tmp_path / "new" / "r.json")
    assert (report.suite, report.part, report.seed, report.ok) == (
        "block-manager",
        "paged",
        1,
        True,
    )
    assert report.command.startswith("jackfield conformance block-manager --name paged")
    assert (tmp_path / "r.md").read_text().startswith("# Block-manager conformance: `paged`")


def test_a_broken_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{MUTANTS}.questions:_ReclaimableCountsSharedBlocks"
    arguments = ["--name", name, "--jobs", 1, "--reproducers", tmp_path]
    assert run(monkeypatch, "block-manager", *arguments) == 1
    printed = capsys.readouterr()
    assert "FAILED: 1 law failed on the host" in printed.out
    (file,) = tmp_path.iterdir()
    assert file.name == "reclaimable_counts_shared_blocks-B20_reclaimable.py"


def test_a_right_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With too few stories some laws are not checked, which is told apart from being broken."""
    files = ["--report", tmp_path / "r.json", "--markdown", tmp_path / "r.md"]
    parts = ["--name", "queue", "--policy", "fcfs", "--block-manager", "radix", "--seed", 1]
    status = run(monkeypatch, "scheduler", *parts, "--jobs", 1, *files)
    printed = capsys.readouterr()
    report = read_report(tmp_path / "r.json")
    broken = {one.law: one.reason for one in report.results if one.status is Status.FAILED}
    assert set(broken.values()) <= {"no story came to the point where it is checked"}
    assert status == (1 if broken else 0)
    first, second = printed.out.splitlines()[:2]
    assert first.startswith("block manager: radix; policy: fcfs; options: none; powers: fork, ")
    assert second == "scheduler conformance of queue"
    assert "S1_budget: pass, " in printed.err
    assert (report.suite, report.part, report.seed) == ("scheduler", "queue", 1)
    assert report.command.startswith("jackfield conformance scheduler --name queue --policy fcfs")
    assert report.capabilities["block manager"] == "radix"
    page = (tmp_path / "r.md").read_text()
    assert page.startswith("# Scheduler conformance: `queue`")
    assert "- `block manager`: radix\n- `policy`: fcfs\n" in page


def test_a_broken_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{SCHEDULER_MUTANTS}.planning:_ChunkOffByOne"
    arguments = ["--name", name, "--jobs", 1, "--reproducers", tmp_path]
    assert run(monkeypatch, "scheduler", *arguments) == 1
    printed = capsys.readouterr()
    assert "S3_shares: A scheduled request gets at least one token" in printed.out
    assert "the smallest case found:" in printed.out
    assert "chunk_off_by_one-S3_shares.py" in {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("suite_name", "arguments", "words"),
    [(name, *case) for name, cases in BAD_INPUT.items() for case in cases],
)
def test_bad_input(
    suite_name: str,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, suite_name, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_scheduler_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_scheduler_of_theirs.py").write_text(
        "from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler\n"
        "class Theirs(PlainScheduler):\n"
        "    name = 'theirs'\n"
        "    def schedule(self, now):\n"
        "        raise ZeroDivisionError('theirs')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["--name", "a_scheduler_of_theirs:Theirs", "--jobs", 1, "--reproducers", "found"]
    assert run(monkeypatch, "scheduler", *arguments) == 1
    assert "schedule raised ZeroDivisionError: theirs" in capsys.readouterr().out
    script = tmp_path / "found" / "theirs-errors.py"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, cwd="/")
    assert done.returncode == 1, done.stderr
    assert "law errors is broken: schedule raised ZeroDivisionError: theirs" in done.stdout


def test_ctrl_c_ends_a_run_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = SuiteProgress.progressed

    def pressed(self: SuiteProgress, law: str, variant: str, examples: int) -> None:
        if examples == 3:
            signal.raise_signal(signal.SIGINT)
        told(self, law, variant, examples)

    monkeypatch.setattr(SuiteProgress, "progressed", pressed)
    report = tmp_path / "r.json"
    arguments = ["--name", "queue", "--jobs", 1, "--report", report]
    assert run(monkeypatch, "scheduler", *arguments) == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["interrupted: no report is written"]
    assert printed.out == ""
    assert not report.exists()


def test_without_a_terminal_a_long_run_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_conformance_stories, "QUIET_SECONDS", 0.0)
    run(monkeypatch, "scheduler", "--name", "queue", "--jobs", 1)
    lines = [line for line in capsys.readouterr().err.splitlines() if " stories in " in line]
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, 13)]


@pytest.mark.parametrize("suite_name", LAWS)
def test_the_laws_are_listed(
    suite_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, f"{suite_name}-laws") == 0
    printed = capsys.readouterr().out
    for line in LAWS[suite_name]:
        assert line in printed


@pytest.mark.parametrize(
    ("suite_name", "names", "row", "wrong", "told"),
    [
        (
            "block-manager",
            ("leak_on_free", "table_of_int64"),
            "| `table_of_int64` | Block tables are int64. |",
            "leak",
            "no mutant is called 'leak'",
        ),
        (
            "scheduler",
            ("aborted_again_says_true", "chunk_off_by_one"),
            "| `chunk_off_by_one` | A chunk is one token longer than its limit. |",
            "chunk_of_by_one",
            "did you mean 'chunk_off_by_one'",
        ),
    ],
    ids=["block-manager", "scheduler"],
)
def test_mutants_are_hunted(
    suite_name: str,
    names: tuple[str, ...],
    row: str,
    wrong: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = tmp_path / "m.md"
    assert run(monkeypatch, f"{suite_name}-mutants", *names, "--output", table) == 0
    assert "2 of 2 mutants caught" in capsys.readouterr().out
    assert row in table.read_text()
    assert run(monkeypatch, f"{suite_name}-mutants", wrong) == 2
    assert told in capsys.readouterr().err
