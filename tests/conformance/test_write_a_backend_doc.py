"""``docs/write-a-backend.md``, followed from its first block to its last, as a reader would.

Every block is used, in order, in an empty folder: files are written, diffs are applied to the
backend's module, commands and scripts run in processes of their own, and what they print is
compared with the block below them. Numbers that differ from run to run are masked; "..." stands
for what the page leaves out. Replaced, because it would take long or need a package index:

- ``pip install "jackfield[conformance]"`` is not run: this is installed already.
- ``pip install -e .`` becomes the folder on the path, and the metadata that pip would have made of
  its ``pyproject.toml``; ``pip wheel`` runs without build isolation.
- ``--profile quick`` of the first run gets tiny cases; ``--profile full`` becomes quick, tiny, and
  a single law.
- The model gets a small KV cache, by environment variables.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PAGE = (Path(__file__).parents[2] / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
_MODULE = "jackfield_toy/attention.py"
_COMMANDS = {
    "python": "",
    "pip": "-m pip",
    "pytest": "-m pytest -p no:cacheprovider",
    "jackfield": "-m jackfield.entrypoints.cli",
}
_FASTER = (
    ("--profile quick", "--profile quick --scale tiny"),
    ("--profile full --jobs 2", "--profile quick --scale tiny --law write_kv"),
)
_SMALL_CACHE = {"JACKFIELD_MAX_MODEL_LEN": "512", "JACKFIELD_NUM_GPU_BLOCKS_OVERRIDE": "64"}
_MASKS = (
    (r"[━─┏┳┓┡╇┩└┴┘┃│]+", " "),  # lines of tables, whose lengths depend on numbers
    (r"on cpu, [A-Z]\w*", "on cpu"),
    (r"torch \d[\w.+]*", "torch #"),
    (r"_[0-9a-f]{8}\.py", "_#.py"),
    (r"(pass|FAIL)( \S+%)? \(\d+\)", r"\1 #"),
    (r"-?\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+", "#"),
    (r"\d+(?= examples| deselected)", "#"),
    (r": \d+\b", ": #"),
    (r"\s+", " "),
    # What ``_FASTER`` changes.
    (r"profile (quick, small|full, large) cases", "profile quick, tiny cases"),
    (r"[,;] narrowed to law=write_kv", ""),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of the page, with the heading that it stands under."""

    section: str
    language: str
    text: str


def _blocks() -> Iterator[Block]:
    for part in re.split(r"^## ", _PAGE, flags=re.MULTILINE):
        section = part.partition("\n")[0].lstrip("# ")
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL):
            yield Block(section, language, text)


_BLOCKS = tuple(_blocks())
_SECTIONS = tuple(dict.fromkeys(block.section for block in _BLOCKS))
#: The model is needed from here on.
_SERVING = next(index for index, name in enumerate(_SECTIONS) if name.startswith("7."))


class Reader:
    """Follows the page in a folder.

    Attributes:
        folder: current directory of the reader's shell.
        output: standard output of the last commands.
        status: their exit status.
    """

    def __init__(self, folder: Path) -> None:
        self._home = self.folder = folder
        self._blocks = list(_BLOCKS)
        self.output, self.status = "", 0
        programs = folder / "programs"
        programs.mkdir()
        for name, arguments in _COMMANDS.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            program.chmod(0o755)
        self._environ = {
            **os.environ,
            **_SMALL_CACHE,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        }

    def read(self, section: str) -> None:
        """Follow all blocks up to the end of a section that have not been followed yet."""
        end = _SECTIONS.index(section)
        while self._blocks and _SECTIONS.index(self._blocks[0].section) <= end:
            block = self._blocks.pop(0)
            next_one = self._blocks[0] if self._blocks else None
            shown = next_one.text if next_one and next_one.language == "text" else ""
            self._follow(block)
            if block.language == "text" or not shown:
                # A page that shows no fault promises none.
                fails = bool(re.search(r"^(FAILED|FAULT)", block.text, re.MULTILINE))
                assert self.status == int(fails), self.output
                self.status = 0

    def _follow(self, block: Block) -> None:
        path = re.match(r"# (\S+\.\w+)\n", block.text)
        if block.language == "text":
            _compare(block.text, self.output)
        elif block.language == "diff":
            target = self.folder / _MODULE
            target.write_text(_patched(target.read_text(), block.text))
        elif path is not None:
            (self.folder / path[1]).write_text(block.text)
        elif block.language == "python":
            self._run([sys.executable, "-"], block.text)
        else:
            assert block.language == "sh"
            self._shell(block.text)

    def _shell(self, commands: str) -> None:
        for old, new in _FASTER:
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
        self.output, self.status = result.stdout, result.returncode
        assert result.returncode in (0, 1), result.stdout + result.stderr
        assert "Traceback" not in result.stderr, result.stderr

    def _install(self) -> None:
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


def _patched(text: str, diff: str) -> str:
    """A text with the hunks of a diff applied, each of which fits in one place."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(old) == 1, hunk
        text = text.replace(old, new)
    return text


def _compare(shown: str, printed: str) -> None:
    """Whether all that is shown was printed, in that order, with nothing else but for "..."."""
    actual = _masked(printed)
    parts = [_masked(part) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    assert actual.startswith(parts[0]), printed
    assert actual.endswith(parts[-1]), printed
    position = 0
    for part in parts:
        found = actual.find(part, position)
        assert found >= 0, f"{part}\n\nis not in\n\n{printed}"
        position = found + len(part)
    if len(parts) == 1:
        assert actual == parts[0]


def _masked(text: str) -> str:
    for pattern, replacement in _MASKS:
        text = re.sub(pattern, replacement, text)
    return text.strip()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """One reader for all sections."""
    return Reader(tmp_path_factory.mktemp("reader"))


@pytest.mark.parametrize("section", _SECTIONS[:_SERVING])
def test_what_the_page_says(reader: Reader, section: str) -> None:
    reader.read(section)


@pytest.mark.demo
@pytest.mark.usefixtures("demo_file")
@pytest.mark.parametrize("section", _SECTIONS[_SERVING:])
def test_what_the_page_says_about_serving(reader: Reader, section: str) -> None:
    reader.read(section)


def test_all_blocks_are_of_a_known_kind() -> None:
    assert {block.language for block in _BLOCKS} == {"sh", "text", "python", "toml", "diff"}
    assert len(_BLOCKS) == _PAGE.count("```") // 2
    followers = dict(zip(_BLOCKS[1:], _BLOCKS, strict=False))
    for block in _BLOCKS:
        if block.language == "text":
            assert followers[block].language in ("sh", "python")
