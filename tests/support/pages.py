"""What tests of Markdown pages share: their text, links and tables, and what they have to show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from jackfield.conformance.published import published
from jackfield.conformance.report_text import to_markdown
from jackfield.conformance.results import Report
from jackfield.entrypoints.cli import app


def one_line(text: str) -> str:
    """The words alone: lines may be broken anywhere."""
    return " ".join(text.split())


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A Markdown table, without the end of its last line.

    Args:
        head: names of the columns.
        rows: the cells.
        numbers: whether all columns but the first stand at the right.
    """
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def assert_has(page: str, expected: str) -> None:
    """A text is on the page.

    Raises:
        AssertionError: it is not; says what to write.
    """
    assert expected in page, f"write:\n\n{expected}"


def assert_rows(page: str, rows: Iterable[str]) -> None:
    """All rows are on the page, one after the other.

    Raises:
        AssertionError: they are not, or there are none.
    """
    expected = "\n".join(rows)
    assert expected, "there are no rows"
    assert_has(page, expected)


def results(repository: Path, name: str) -> Any:
    """What a benchmark's committed JSON says."""
    path = repository / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def command_of(*names: str) -> Any:
    """A ``jackfield`` command, or a group of them."""
    command = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]  # type: ignore[attr-defined]
    return command


def command_flags(*names: str) -> set[str]:
    """The flags of a ``jackfield`` command."""
    options = command_of(*names).params
    return {flag for one in options for flag in one.opts if flag.startswith("--")}


def own_reports(*suites: str) -> dict[str, Report]:
    """Reports of some suites that come with Jackfield, by file name.

    Raises:
        AssertionError: a report, of whatever suite, cannot be read.
    """
    found = published("jackfield")
    problems = [one.problem for one in found if one.problem]
    assert problems == [], problems
    reports = {one.path.name: one.report for one in found}
    return {name: one for name, one in reports.items() if one and one.suite in suites}


def assert_published(section: str, report: Report, page: Path, counted: str) -> None:
    """A report passed, a section has one row about it, and its page is made of it.

    Args:
        section: Markdown with a row that leads to the page, and says how much was tried.
        report: the report.
        page: ``docs/conformance/NAME.md``.
        counted: what the row says was tried, such as "examples".

    Raises:
        AssertionError: something is otherwise.
    """
    assert report.ok, f"{page.name}: its report did not pass"
    rows = [line for line in section.splitlines() if f"conformance/{page.name}" in line]
    assert len(rows) == 1, rows
    assert f"(conformance/{page.name})" in rows[0], rows[0]
    assert_has(rows[0], f"{sum(one.examples for one in report.results):,} {counted}")
    same = page.read_text(encoding="utf-8") == to_markdown(report)
    assert same, f"{page.name} is not what the report says"


@dataclass(frozen=True)
class Link:
    """A link to a file of the repository.

    Attributes:
        file: relative to the page's folder; "" for the page itself.
        anchor: behind the "#"; None without one.
    """

    file: str
    anchor: str | None

    def __str__(self) -> str:
        return self.file if self.anchor is None else f"{self.file}#{self.anchor}"

    def target(self, page: Path) -> Path:
        """The file that it leads to from a page."""
        return page.parent / self.file if self.file else page


def local_links(page: Path) -> list[Link]:
    """The links of a page that do not lead out of the repository."""
    found = re.finditer(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    return [Link(one[1], one[2]) for one in found if not re.match("https?://", one[1])]


def anchors_of(page: Path) -> set[str]:
    """The anchors that the headings of a page get."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def assert_files_of_links(page: Path, *, folders: bool = True) -> None:
    """There is what links lead to.

    Args:
        page: the page.
        folders: whether they may lead to folders.

    Raises:
        AssertionError: names a link that leads nowhere.
    """
    for link in local_links(page):
        target = link.target(page)
        assert target.exists() if folders else target.is_file(), f"{page.name}: {link}"


def assert_headings_of_links(page: Path) -> None:
    """There are the headings that links lead to.

    Raises:
        AssertionError: names a link without one.
    """
    for link in local_links(page):
        if link.anchor is not None:
            assert link.anchor in anchors_of(link.target(page)), f"{page.name}: {link}"


def assert_paths(page: Path, repository: Path, *, folders: bool = True) -> None:
    """There are the modules and the folders that a page names in backquotes.

    Args:
        page: the page.
        repository: what the names are relative to.
        folders: whether all the folders that the page names are the repository's.

    Raises:
        AssertionError: names one that is not there.
    """
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page.read_text(encoding="utf-8")):
        path = repository / name
        if name.endswith(".py"):
            assert path.is_file(), f"{page.name}: {name}"
        elif folders:
            assert path.is_dir(), f"{page.name}: {name}"
