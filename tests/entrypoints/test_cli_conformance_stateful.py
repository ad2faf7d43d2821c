"""``jackfield conformance block-manager`` and its sisters, on small runs of the real suite."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from jackfield.conformance.block_manager import suite
from jackfield.conformance.report import read_report
from jackfield.conformance.stateful import search as searching
from jackfield.conformance.stateful.search import Budget
from jackfield.entrypoints import cli

MUTANTS = "jackfield.conformance.block_manager.mutants"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs, and a logger without handlers of an earlier one."""
    logging.getLogger("jackfield").handlers.clear()
    small = Budget(stories=100, steps=30, seconds=30.0)
    monkeypatch.setitem(suite.PROFILES, "quick", small)
    monkeypatch.setattr(searching, "SHRINK_SECONDS", 0.5)


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--name", "pagde"), "no plugin registers"),
        (("--name", "paged", "--profile", "tiny"), "--profile 'tiny' is unknown"),
        (("--name", "paged", "--options", "[1]"), "--options '[1]' is wrong"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "block-manager", *arguments) == 2
    assert words in capsys.readouterr().err


def test_the_laws_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "block-manager-laws") == 0
    printed = capsys.readouterr().out
    assert "B17_fork (power 'fork')" in printed
    assert "Read through its block table, a request finds its own keys and values" in printed


def test_mutants_are_hunted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "m.md"
    names = ["leak_on_free", "table_of_int64"]
    assert run(monkeypatch, "block-manager-mutants", *names, "--output", table) == 0
    assert "2 of 2 mutants caught" in capsys.readouterr().out
    assert "| `table_of_int64` | Block tables are int64. |" in table.read_text()
    assert run(monkeypatch, "block-manager-mutants", "leak") == 2
