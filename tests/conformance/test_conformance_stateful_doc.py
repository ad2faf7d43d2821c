"""What the page about the block manager suite says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from jackfield.conformance.block_manager.laws import ALL_LAWS
from jackfield.conformance.block_manager.suite import PROFILES
from jackfield.entrypoints.cli import app


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "conformance-stateful.md").read_text(encoding="utf-8")


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_every_law_has_its_text(page: str) -> None:
    part = page.split("\n## The laws\n")[1].split("\n## ")[0]
    sections = re.split(r"^### `(\w+)`\n", part, flags=re.MULTILINE)[1:]
    assert sections[::2] == [law.name for law in ALL_LAWS]
    for law, text in zip(ALL_LAWS, sections[1::2], strict=True):
        title, *rest = (one_line(one).replace("``", "`") for one in law.paragraphs())
        power = [f"Owed by managers with the power `{law.power}`."] if law.power else []
        assert one_line(text) == " ".join([f"> {title}", *rest, *power])


def test_profiles_are_those_of_the_code(page: str) -> None:
    for name, budget in PROFILES.items():
        row = f"| `{name}` | {budget.stories:,} | {budget.steps} | {budget.seconds:g} |"
        assert row in page, f"write: {row}"


def test_every_flag_has_a_row(page: str) -> None:
    command = typer.main.get_command(app)
    for name in ("conformance", "block-manager"):
        command = command.commands[name]  # type: ignore[attr-defined]
    flags = {flag for one in command.params for flag in one.opts if flag.startswith("--")}
    rows = re.findall(r"^\| (`--.+?) \| ", page, flags=re.MULTILINE)
    assert {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)} == flags - {"--help"}


def test_links_and_paths_lead_somewhere(page: str, repository: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page):
        if "://" not in link:
            assert (repository / "docs" / link).exists(), link
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page):
        assert (repository / name).exists(), name
    headings = {
        re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-")
        for one in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings
