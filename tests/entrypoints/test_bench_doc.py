"""What the page on benchmarks says is what the commands do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from jackfield.entrypoints.bench.cases import CPU_CASES, CUDA_CASES
from jackfield.entrypoints.cli import app


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def flags(*path: str) -> set[str]:
    """The flags of a command."""
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    return {flag for one in command.params for flag in one.opts if flag.startswith("--")}


def test_every_flag_has_a_row(page: str) -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", page, flags=re.MULTILINE)
    assert sorted(rows) == sorted(flags("bench", "attention") - {"--help"})


def test_commands_have_the_flags_that_are_shown(page: str, repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"jackfield bench ([a-z]+)(.*?)(?:  #.*)?[`\n]", page + readme)
    assert len(shown) >= 5
    for name, rest in shown:
        assert set(re.findall(r"--[a-z-]+", rest)) <= flags("bench", name), f"{name}{rest}"


def test_every_case_is_named(page: str) -> None:
    for device, cases in (("CUDA", CUDA_CASES), ("CPU", CPU_CASES)):
        listed = ", ".join(f"`{case.name}`" for case in cases)
        assert f"| {device} | {listed} |" in page, f"write:\n\n{listed}"


def test_links_lead_somewhere(page: str, repository: Path) -> None:
    headings = {
        file: {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(
                r"^#+ (.+)$", (repository / "docs" / file).read_text(encoding="utf-8"), re.MULTILINE
            )
        }
        for file in ("benchmarks.md", "conformance.md")
    }
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page)
    assert len(links) > 5
    for file, anchor in links:
        assert anchor in headings[file or "benchmarks.md"], f"{file}#{anchor}"
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page):
        assert (repository / name).is_file(), name
