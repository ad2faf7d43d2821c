"""``jackfield conformance matrix`` and ``pairwise`` in this process."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from support.reports import FAILED, PASSED, make_report

from jackfield.conformance.matrix import BEGIN, END
from jackfield.conformance.report import to_json
from jackfield.entrypoints import cli


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    logging.getLogger("jackfield").handlers.clear()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of ``jackfield conformance ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["jackfield", "conformance", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "100")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_matrix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.json").write_text(to_json(make_report(PASSED)))
    Path("b.json").write_text(to_json(make_report(PASSED, FAILED, part="flex")))
    assert run(monkeypatch, "matrix", "a.json") == 0
    assert "torch_sdpa" in capsys.readouterr().out
    assert run(monkeypatch, "matrix", "a.json", "b.json", "--markdown", "new/m.md") == 1
    block = Path("new/m.md").read_text()
    assert block.startswith("|  | `torch_sdpa` | `flex` |")
    Path("page.md").write_text(f"# Page\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    assert run(monkeypatch, "matrix", "a.json", "b.json", "--markdown", "page.md") == 1
    assert Path("page.md").read_text() == f"# Page\n\n{BEGIN}\n\n{block}\n{END}\n\nMore.\n"
    assert run(monkeypatch, "matrix", "a.json", "a.json") == 2
    assert run(monkeypatch, "matrix", "none.json") == 2
    assert run(monkeypatch, "matrix", "a.json", "--markdown", ".") == 2
    assert "cannot be" in capsys.readouterr().err


PAIR = ("pairwise", "--device", "cpu", "--scale", "tiny", "--only", "head_size=16")
PLAIN = "jackfield.conformance.attention.plain_backend:PlainBackend"


def test_pairwise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backends = ("--backend", "torch_sdpa", "--backend", PLAIN, "--dtype", "float32")
    files = ("--report", "new/p.json", "--markdown", "new/p.md", "--batches", 6, "--seed", 3)
    assert run(monkeypatch, *PAIR, *backends, *files) == 0
    printed = capsys.readouterr()
    assert "6 batches (tiny cases, seed 3)" in printed.out
    content = json.loads(Path("new/p.json").read_text())
    assert (content["batches"], content["seed"]) == (6, 3)
    assert content["axes"]["dtype"] == ["float32"]
    assert content["command"].startswith("jackfield conformance pairwise --device cpu")
    assert Path("new/p.md").read_text().startswith("# torch_sdpa and plain side by side")


def test_pairwise_of_a_wrong_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong_backends.py").write_text(
        "from jackfield.conformance.attention.plain_backend import PlainBackend\n"
        "class Wrong(PlainBackend):\n"
        "    name = 'wrong'\n"
        "    def forward(self, query, cache, plan, out, **others):\n"
        "        return super().forward(query, cache, plan, out, **others).mul_(1.1)\n"
    )
    backends = ("--backend", PLAIN, "--backend", "wrong_backends:Wrong", "--batches", 4)
    assert run(monkeypatch, *PAIR, *backends) == 1
    assert "NOT within on cpu" in capsys.readouterr().out


def test_pairwise_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("interrupting_backends.py").write_text(
        "import signal\n"
        "from jackfield.conformance.attention.plain_backend import PlainBackend\n"
        "class Interrupting(PlainBackend):\n"
        "    name = 'interrupting'\n"
        "    def plan(self, batch, into=None):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        return super().plan(batch, into)\n"
    )
    backends = ("--backend", PLAIN, "--backend", "interrupting_backends:Interrupting")
    assert run(monkeypatch, *PAIR, *backends, "--report", "p.json") == 130
    printed = capsys.readouterr()
    assert "1 batch (" in printed.out
    assert "no file is written" in printed.err
    assert not Path("p.json").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--backend", "torch_sdpa"], "at least two different backends"),
        (["--backend", "torch_sdpa", "--backend", "triton"], "cannot run here"),
        (["--backend", "torch_sdp", "--backend", PLAIN], "did you mean 'torch_sdpa'"),
        (["--backend", "torch_sdpa", "--backend", PLAIN, "--dtype", "int8"], "int8 is not among"),
        (["--backend", "torch_sdpa", "--backend", PLAIN, "--scale", "smal"], "did you mean"),
        (["--backend", "torch_sdpa", "--backend", PLAIN, "--report", "."], "cannot be written"),
    ],
)
def test_bad_input_is_status_2(
    arguments: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *PAIR, *arguments) == 2
    assert part in capsys.readouterr().err
