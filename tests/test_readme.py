"""The README is true: its commands run and its Python prints what a model says."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from pathlib import Path

import pytest

from jackfield.conformance.attention.suite import ALL_LAWS
from jackfield.entrypoints import cli
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind

pytestmark = pytest.mark.demo


#: What makes a command cheap enough for a test.
CHEAPER = {
    "conformance": ["--device", "cpu", "--dtype", "float32", "--scale", "tiny"],
    "bench": ["--device", "cpu", "--milliseconds", "1", "--no-ceilings"],
}


def _blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def _commands(text: str) -> list[str]:
    lines = (
        line.split("  #")[0].strip() for block in _blocks(text, "") for line in block.split("\n")
    )
    return [line for line in lines if "jackfield " in line and line != "jackfield chat"]


def _status() -> int:
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def test_first_commands_are_targets_of_the_makefile(readme: str, repository: Path) -> None:
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    first = _blocks(readme, "")[0].split("\n")
    targets = [line.removeprefix("make ") for line in first if line]
    assert targets == ["demo", "test"]
    for target in targets:
        assert f"\n{target}:" in makefile


@pytest.mark.usefixtures("demo_file")
def test_commands_run(
    readme: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = _commands(readme)
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            monkeypatch.setenv(name, value)
        assert words[0] == "jackfield"
        words += CHEAPER.get(words[1], [])
        logging.getLogger("jackfield").handlers.clear()
        monkeypatch.setattr(sys, "argv", words)
        assert _status() == 0, command
        printed = capsys.readouterr()
        assert printed.out.strip(), command
        if "DEBUG" in command:
            assert "step 0: " in printed.err
        if "conformance" in command:
            assert "passed on cpu" in printed.out


def test_built_in_attention_backends_and_laws_are_all_counted(readme: str) -> None:
    (row,) = re.findall(r"^\| attention backend \| .*$", readme, flags=re.MULTILINE)
    backends = {
        entry.name
        for entry in discover().registry.entries(PartKind.ATTENTION_BACKEND)
        if str(entry.origin).startswith("builtin")
    }
    assert backends
    assert all(f"`{name}`" in row for name in backends)
    assert f"its {len(ALL_LAWS)} laws" in readme


@pytest.mark.usefixtures("demo_file")
def test_python_example(readme: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = _blocks(readme, "python")
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.strip().split("\n")
    assert "Paris" in lines[0]
