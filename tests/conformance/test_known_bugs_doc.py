"""What the page on published faults names exists, and it names the mutants that name its faults."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch

from jackfield.conformance.attention.mutants import MUTANTS
from jackfield.conformance.attention.suite import ALL_LAWS
from jackfield.conformance.resolve import part_class
from jackfield.core.attention import Capabilities
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conformance" / "known-bugs.md").read_text(encoding="utf-8")
#: Fault, what went wrong, what notices it.
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| fault", "| ---"))
]


def named(kind: str) -> list[str]:
    """What stands in backquotes behind a word, or behind its plural, separated by commas."""
    lists = re.findall(rf"\b{kind}s? ((?:`[^`]+`(?:, | and )?)+)", PAGE, re.IGNORECASE)
    return sorted({name for one in lists for name in re.findall(r"`([^`]+)`", one)})


@cache
def names_in(path: str) -> set[str]:
    """Names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}


def test_the_page_has_a_row_for_each_fault() -> None:
    assert len(ROWS) > 55
    assert all(len(row) == 3 for row in ROWS)
    faults = [fault for row in ROWS for fault in row[0].split(", ") if fault != "documented"]
    assert len(set(faults)) == len(faults)
    for fault in faults:
        assert re.fullmatch(r"[\w./-]+#\d+|\w+ [\d.]+", fault)


def test_every_row_names_what_notices_the_fault_or_says_why_nothing_does() -> None:
    known = r"\b(law|mutant|test|refusal)s? `|\bany law\b|\bevery law\b|\bout of reach\b"
    for fault, _, notice in ROWS:
        assert re.search(known, notice, re.IGNORECASE), fault


def test_laws_exist() -> None:
    assert len(named("law")) > 8
    assert set(named("law")) <= {law.name for law in ALL_LAWS}


def test_mutants_exist() -> None:
    assert len(named("mutant")) > 40
    assert set(named("mutant")) <= {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("name", named("test"))
def test_tests_exist(name: str) -> None:
    path, _, test = name.partition("::")
    assert test in names_in(path)


@pytest.mark.parametrize("name", [one for one in named("refusal") if one != "backend:capability"])
def test_what_is_refused_is_not_declared(name: str) -> None:
    backend, _, capability = name.partition(":")
    assert capability in {field.name for field in fields(Capabilities)}
    cls = part_class(discover(environ={}), PartKind.ATTENTION_BACKEND, backend)
    declared = getattr(cls.capabilities(torch.device("cuda")), capability)
    if isinstance(declared, frozenset):
        assert all(dtype.itemsize > 1 for dtype in declared)
    else:
        assert declared is False


def test_mutants_of_a_fault_stand_in_its_row() -> None:
    for mutant in MUTANTS:
        for row in ROWS:
            if set(mutant.published) & set(row[0].split(", ")):
                assert f"`{mutant.name}`" in row[2], row[0]
