"""A step-by-step page of the documentation, followed from its first block to its last.

Every block is used, in order, in an empty folder: files are written, diffs are applied to the
page's module, commands and scripts run in processes of their own, and what they print is compared
with the block below them. Numbers that differ from run to run are masked; "..." stands for what a
page leaves out. ``pip install`` is not run: an editable install becomes the folder on the path, and
the metadata that pip would have made of its ``pyproject.toml``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from support.warm_programs import warm_programs

_DOCS = Path(__file__).parents[2] / "docs"
_PLAIN = {"python": "", "pip": "-m pip"}
_WARM = {
    "jackfield": ("jackfield.entrypoints.cli",),
    "pytest": ("pytest", "-p", "no:cacheprovider"),
}
_FAULT = re.compile(r"^(FAILED|FAULT|AssertionError)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the heading that it stands under."""

    section: str
    language: str
    text: str


@dataclass(frozen=True)
class Guide:
    """A page, and what is changed of it so that it can be followed here.

    Attributes:
        page: its file in ``docs``.
        module: the file that its diffs are applied to.
        prelude: Python that is executed before each program of Jackfield and pytest.
        replaced: what commands say, and what is run in its place.
        environ: variables of the reader's shell.
        masks: patterns and replacements, applied to what is shown and to what is printed.
    """

    page: str
    module: str
    replaced: tuple[tuple[str, str], ...]
    environ: Mapping[str, str]
    masks: tuple[tuple[str, str], ...] = field(repr=False)
    prelude: str = ""

    @cached_property
    def text(self) -> str:
        """The page."""
        return (_DOCS / self.page).read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        return tuple(self._blocks())

    @cached_property
    def sections(self) -> tuple[str, ...]:
        """Headings that have blocks under them, in order."""
        return tuple(dict.fromkeys(block.section for block in self.blocks))

    def _blocks(self) -> Iterator[Block]:
        fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
        for part in re.split(r"^## ", self.text, flags=re.MULTILINE):
            section = part.partition("\n")[0].lstrip("# ")
            for language, text in fence.findall(part):
                yield Block(section, language, text)

    def check_kinds(self) -> None:
        """Every fence of the page is a block, and every block is of a kind that is followed.

        Raises:
            AssertionError: one is not.
        """
        assert {one.language for one in self.blocks} == {"sh", "text", "python", "toml", "diff"}
        assert len(self.blocks) == self.text.count("```") // 2
        for before, block in zip(self.blocks, self.blocks[1:], strict=False):
            if block.language == "text":
                assert before.language in ("sh", "python"), block.text


class Reader:
    """Follows a guide in a folder; see ``reading``.

    Attributes:
        folder: current directory of the reader's shell.
        output: what the last commands printed: standard output, or errors if that is empty.
        errors: their standard error.
        status: their exit status.
    """

    def __init__(self, guide: Guide, folder: Path) -> None:
        self._guide = guide
        self._home = self.folder = folder
        self._blocks = list(guide.blocks)
        self.output, self.errors, self.status = "", "", 0
        programs = folder / "programs"
        self._environ = {
            **os.environ,
            **guide.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        }

    def read(self, section: str) -> None:
        """Follow all blocks up to the end of a section that have not been followed yet.

        Raises:
            AssertionError: something is not as the page says.
        """
        sections = self._guide.sections
        end = sections.index(section)
        while self._blocks and sections.index(self._blocks[0].section) <= end:
            block = self._blocks.pop(0)
            next_one = self._blocks[0] if self._blocks else None
            shown = next_one.text if next_one and next_one.language == "text" else ""
            self._follow(block)
            if block.language == "text" or not shown:
                # A page that shows no fault promises none.
                fails = block.language == "text" and bool(_FAULT.search(block.text))
                assert self.status == int(fails), self.output + self.errors
                if "Traceback" not in block.text:
                    assert "Traceback" not in self.errors, self.errors
                self.errors, self.status = "", 0

    def _follow(self, block: Block) -> None:
        path = re.match(r"# (\S+\.\w+)\n", block.text)
        if block.language == "text":
            compare(block.text, self.output, self._guide.masks)
        elif block.language == "diff":
            target = self.folder / self._guide.module
            target.write_text(patched(target.read_text(), block.text))
        elif path is not None:
            (self.folder / path[1]).write_text(block.text)
        elif block.language == "python":
            self._run([sys.executable, "-"], block.text)
        else:
            assert block.language == "sh"
            self._shell(block.text)

    def _shell(self, commands: str) -> None:
        for old, new in self._guide.replaced:
            commands = commands.replace(old, new)
        commands = commands.replace("pip wheel", "pip wheel --quiet --no-build-isolation")
        if "pip install -e .\n" in commands:
            self._install()
        commands = re.sub(r"^pip install .*\n", "", commands, flags=re.MULTILINE)
        place = self._home / "directory"
        self._run(["sh", "-e", "-c", f'{commands}\npwd > "{place}"'], "")
        if place.exists():
            self.folder = Path(place.read_text().strip())
            place.unlink()

    def _run(self, command: list[str], text: str) -> None:
        result = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            env=self._environ,
            cwd=self.folder,
            check=False,
        )
        self.output, self.errors = result.stdout or result.stderr, result.stderr
        self.status = result.returncode
        assert result.returncode in (0, 1), result.stdout + result.stderr

    def _install(self) -> None:
        """What ``pip install -e .`` would do: the folder on the path, and its metadata."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        name, version = project["name"], project["version"]
        metadata = self._home / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        points = project["entry-points"]["jackfield"].items()
        lines = ["[jackfield]", *(f"{point} = {module}" for point, module in points)]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        self._environ["PYTHONPATH"] = os.pathsep.join(map(str, (metadata.parent, self.folder)))


@contextmanager
def reading(guide: Guide, folder: Path) -> Iterator[Reader]:
    """A reader with the programs that pages use."""
    programs = folder / "programs"
    programs.mkdir()
    for name, arguments in _PLAIN.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    with warm_programs(programs, _WARM, guide.prelude):
        yield Reader(guide, folder)


def patched(text: str, diff: str) -> str:
    """A text with the hunks of a diff applied, each of which fits in one place.

    Raises:
        AssertionError: one fits nowhere, or in several places.
    """
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(old) == 1, hunk
        text = text.replace(old, new)
    return text


def compare(shown: str, printed: str, masks: tuple[tuple[str, str], ...]) -> None:
    """Whether all that is shown was printed, in that order, with nothing else but for "...".

    Raises:
        AssertionError: it was not.
    """
    actual = _masked(printed, masks)
    parts = [_masked(one, masks) for one in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    assert actual.startswith(parts[0]), printed
    assert actual.endswith(parts[-1]), printed
    position = 0
    for part in parts:
        found = actual.find(part, position)
        assert found >= 0, f"{part}\n\nis not in\n\n{printed}"
        position = found + len(part)
    if len(parts) == 1:
        assert actual == parts[0]


def _masked(text: str, masks: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in masks:
        text = re.sub(pattern, replacement, text)
    return text.strip()
