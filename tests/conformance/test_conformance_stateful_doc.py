"""What the pages about the suites of block managers and schedulers say is what the code does."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from support.pages import (
    assert_files_of_links,
    assert_has,
    assert_headings_of_links,
    assert_paths,
    assert_published,
    command_flags,
    command_of,
    one_line,
    own_reports,
)

from jackfield.conformance.block_manager import suite as block_manager_suite
from jackfield.conformance.block_manager.contract import BlockManagerContract
from jackfield.conformance.block_manager.laws import ALL_LAWS as BLOCK_MANAGER_LAWS
from jackfield.conformance.block_manager.plain_manager import PlainBlockManager
from jackfield.conformance.resolve import part_class
from jackfield.conformance.scheduler import suite as scheduler_suite
from jackfield.conformance.scheduler.contract import SchedulerContract
from jackfield.conformance.scheduler.laws import ALL_LAWS as SCHEDULER_LAWS
from jackfield.conformance.scheduler.laws import FCFS, Contents
from jackfield.conformance.scheduler.mutants import MUTANTS
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.conformance.scheduler.replay import retold
from jackfield.conformance.scheduler.reproduce import show
from jackfield.conformance.scheduler.script import story_script, story_text
from jackfield.conformance.scheduler.suite import subject_of
from jackfield.conformance.scheduler.world import Arrive, Operation, Step, World
from jackfield.conformance.stateful.laws import LawBroken, StatefulLaw
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind

COMMON = "conformance-stateful.md"
BLOCK_MANAGER = "conformance-block-manager.md"
SCHEDULER = "conformance-scheduler.md"
PAGES = [COMMON, BLOCK_MANAGER, SCHEDULER]
KINDS = {"block-manager": PartKind.BLOCK_MANAGER, "scheduler": PartKind.SCHEDULER}
SUITES = {"block-manager": block_manager_suite, "scheduler": scheduler_suite}


@pytest.fixture
def read(repository: Path) -> Callable[[str], str]:
    """Reads a page."""
    return lambda name: (repository / "docs" / name).read_text(encoding="utf-8")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def owed_by(law: type[StatefulLaw]) -> str:
    if law.power == FCFS:
        return "Owed under the policy `fcfs`."
    kind = (
        "Owed with block managers that have" if law in SCHEDULER_LAWS else "Owed by managers with"
    )
    return f"{kind} the power `{law.power}`."


@pytest.mark.parametrize(
    ("name", "laws"), [(BLOCK_MANAGER, BLOCK_MANAGER_LAWS), (SCHEDULER, SCHEDULER_LAWS)]
)
def test_every_law_has_its_text(
    name: str, laws: Sequence[type[StatefulLaw]], read: Callable[[str], str]
) -> None:
    part = read(name).split("\n## The laws\n")[1].split("\n## ")[0]
    sections = re.split(r"^### `(\w+)`\n", part, flags=re.MULTILINE)[1:]
    assert sections[::2] == [law.name for law in laws]
    for law, text in zip(laws, sections[1::2], strict=True):
        title, *rest = (one_line(one).replace("``", "`") for one in law.paragraphs())
        power = [owed_by(law)] if law.power else []
        expected = " ".join([f"> {title}", *rest, *power])
        assert one_line(re.sub(r"(?<=\S)\n> ", "\n", text)) == expected


def test_profiles_are_those_of_the_code(read: Callable[[str], str]) -> None:
    page = read(COMMON)
    for suite, module in SUITES.items():
        for name, budget in module.PROFILES.items():
            size = f"{budget.stories:,} | {budget.steps} | {budget.seconds:g}"
            assert_has(page, f"| `{suite}` | `{name}` | {size} |")


def test_every_flag_has_a_row(read: Callable[[str], str]) -> None:
    flags = {flag for suite in SUITES for flag in command_flags("conformance", suite)}
    rows = re.findall(r"^\| (`--.+?) \| ", read(COMMON), flags=re.MULTILINE)
    assert {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)} == flags - {"--help"}


def test_a_subclass_may_set_what_the_page_says(read: Callable[[str], str]) -> None:
    (said,) = re.findall(r"A subclass may set (.+?) and nothing else", one_line(read(COMMON)))
    settings = {
        name
        for contract in (BlockManagerContract, SchedulerContract)
        for one in contract.__mro__
        for name in vars(one).get("__annotations__", ())
        if not name.startswith("_")
    }
    assert set(re.findall(r"`(\w+)`", said)) | {"manager", "scheduler"} == settings


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a page, word by word."""
    for block in fenced(text, "bash"):
        yield from (shlex.split(line, comments=True) for line in block.splitlines() if line.strip())


def test_commands_are_understood(read: Callable[[str], str]) -> None:
    seen = [words for name in PAGES for words in commands(read(name))]
    assert len(seen) >= 10
    for words in seen:
        if words[0] == "jackfield":
            assert words[1] == "conformance"
            command = command_of(*words[1:3])
            context = command.make_context(words[2], list(words[3:]))
            check_names(words[2], context)
        elif words[0] == "pytest":
            check_pytest(words)
        else:
            assert words == ["pip", "install", "jackfield[conformance]"]


def check_names(command: str, context: click.Context) -> None:
    """What a command names exists."""
    suite = command.removesuffix("-mutants")
    if command.endswith("-mutants"):
        SUITES[suite].QUARRY.named(context.params["names"] or ())
    else:
        part_class(discover(), KINDS[suite], context.params["name"])


def check_pytest(words: Sequence[str]) -> None:
    """The plugin and the suite exist, and the plugin knows the options."""
    parser = pytest.Parser(_ispytest=True)
    plugin = __import__(words[words.index("-p") + 1], fromlist=["pytest_addoption"])
    plugin.pytest_addoption(parser)
    known = parser.parse_known_args(words[1:])
    assert "NAME" in (known.block_manager, known.scheduler)
    assert __import__(words[words.index("--pyargs") + 1])


def test_python_blocks_run(read: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the common page makes classes of tests, as if there were such a package."""
    package = ModuleType("my_package")
    manager, scheduler = ModuleType("my_package.manager"), ModuleType("my_package.scheduler")
    manager.MyManager = PlainBlockManager  # type: ignore[attr-defined]
    scheduler.MyScheduler = PlainScheduler  # type: ignore[attr-defined]
    for module in (package, manager, scheduler):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (block,) = fenced(read(COMMON), "python")
    made: dict[str, Any] = {}
    exec(block, made)
    run = made["TestMyScheduler"]._run()
    assert run.subject.scheduler is PlainScheduler
    assert run.subject.manager.name == "radix"
    assert made["TestMyManager"]._run().subject.manager is PlainBlockManager


def test_the_failing_story_of_a_scheduler(
    read: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    (mutant,) = [one.part for one in MUTANTS if one.name == "swap_out_not_copied"]
    subject, world = subject_of(mutant), World(num_blocks=4, num_host_blocks=4, mode="swap")
    arrivals = Arrive(length=3, completion=3), Arrive(pattern=1, length=3, completion=3)
    story: list[Operation] = [*arrivals, Step(), Step(), Step(), Step()]
    lines, _ = retold(subject, world, story)
    page = read(SCHEDULER)
    text = story_text(world, story, lines)
    assert_has(page, f"```\n{text}\n```")
    assert show(subject, world, story, Contents.name) == 1
    (message,) = re.findall(r"law B14_contents is broken: (.+)", capsys.readouterr().out)
    assert f"what broke is {Contents.name}: `{message}`" in one_line(page)
    script = story_script(subject, world, story, LawBroken(Contents, message))
    assert fenced(page, "python") == [script], f"write:\n\n{script}"


def test_published_reports_are_those_of_the_page(
    read: Callable[[str], str], repository: Path
) -> None:
    section = read(COMMON).split("\n## Published reports\n")[1]
    reports = own_reports(*SUITES)
    rows = re.findall(r"^\| ([\w ]+) `(\w+)` \| \[.+?\]\(conformance/(.+?)\.md\)", section, re.M)
    assert sorted(f"{file}.json" for *_, file in rows) == sorted(reports)
    for suite, part, file in rows:
        report = reports[f"{file}.json"]
        assert (report.suite.replace("-", " "), report.part) == (suite, part)
        assert report.profile.startswith("full")
        page = repository / "docs" / "conformance" / f"{file}.md"
        assert_published(section, report, page, "checks")
        laws = BLOCK_MANAGER_LAWS if report.suite == "block-manager" else SCHEDULER_LAWS
        assert [one.law for one in report.results] == [law.name for law in laws]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_lead_somewhere(name: str, repository: Path) -> None:
    page = repository / "docs" / name
    assert_files_of_links(page)
    assert_headings_of_links(page)
    assert_paths(page, repository)
