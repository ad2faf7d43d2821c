"""What the page on benchmarks says is what the commands do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages import (
    assert_files_of_links,
    assert_has,
    assert_headings_of_links,
    assert_paths,
    command_flags,
    local_links,
)

from jackfield.entrypoints.bench.cases import CPU_CASES, CUDA_CASES

PAGE = "benchmarks.md"


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / PAGE).read_text(encoding="utf-8")


def test_every_flag_has_a_row(page: str) -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", page, flags=re.MULTILINE)
    assert sorted(rows) == sorted(command_flags("bench", "attention") - {"--help"})


def test_commands_have_the_flags_that_are_shown(page: str, repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"jackfield bench ([a-z]+)(.*?)(?:  #.*)?[`\n]", page + readme)
    assert len(shown) >= 5
    for name, rest in shown:
        assert set(re.findall(r"--[a-z-]+", rest)) <= command_flags("bench", name), f"{name}{rest}"


def test_every_case_is_named(page: str) -> None:
    for device, cases in (("CUDA", CUDA_CASES), ("CPU", CPU_CASES)):
        listed = ", ".join(f"`{case.name}`" for case in cases)
        assert_has(page, f"| {device} | {listed} |")


def test_links_lead_somewhere(repository: Path) -> None:
    path = repository / "docs" / PAGE
    assert len([link for link in local_links(path) if link.anchor]) > 5
    assert_files_of_links(path)
    assert_headings_of_links(path)
    assert_paths(path, repository)
