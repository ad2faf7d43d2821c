"""``jackfield conformance`` in this process, on small runs of real suites."""

from __future__ import annotations

import json
import logging
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.reports import FAILED, PASSED, UNCLAIMED, make_report
from support.tiny_models import make_tiny_llama

from jackfield.conformance.attention.axes import parse_only
from jackfield.conformance.attention.suite import ALL_LAWS
from jackfield.conformance.report import read_report, to_json
from jackfield.conformance.results import Status
from jackfield.core.errors import ConfigError
from jackfield.entrypoints import cli
from jackfield.entrypoints.cli_conformance import parse_backend_options
from jackfield.entrypoints.cli_conformance_progress import SuiteProgress
from jackfield.entrypoints.interrupts import Interrupt

#: One law on tiny cases of one dtype: a second or so.
SMALL = ("--device", "cpu", "--scale", "tiny", "--dtype", "float32", "--only", "head_size=16")

BACKENDS = """
import signal
from jackfield import PartOptions
from jackfield.conformance.attention.plain_backend import PlainBackend

class Knobs(PartOptions):
    speed: int = 3

class Right(PlainBackend):
    name = "right"
    Options = Knobs

class Wrong(PlainBackend):
    name = "wrong"
    def forward(self, query, cache, plan, out, **others):
        super().forward(query, cache, plan, out, **others)
        return out.mul_(1.01)

class Interrupting(PlainBackend):
    name = "interrupting"
    calls = 0
    def forward(self, *arguments, **others):
        Interrupting.calls += 1
        if Interrupting.calls == 3:
            signal.raise_signal(signal.SIGINT)
        return super().forward(*arguments, **others)

class Unnamed:
    pass
"""


@pytest.fixture(autouse=True)
def _own_logger() -> None:
    """The command sets up the logger: begin without handlers of an earlier one."""
    logging.getLogger("jackfield").handlers.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of backends that are not registered."""
    (tmp_path / "unregistered_backends.py").write_text(BACKENDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "unregistered_backends", raising=False)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of ``jackfield ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["jackfield", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def attention(monkeypatch: pytest.MonkeyPatch, backend: str, *arguments: object) -> int:
    """The exit status of a small run."""
    return run(monkeypatch, "conformance", "attention", "--backend", backend, *SMALL, *arguments)


def test_a_registered_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--report", tmp_path / "new" / "r.json", "--markdown", tmp_path / "r.md"]
    assert attention(monkeypatch, "torch_sdpa", "--law", "meaning", "--seed", 5, *files) == 0
    printed = capsys.readouterr()
    assert "meaning" in printed.out
    assert printed.out.splitlines()[-1].startswith("passed on cpu")
    assert "meaning, float32: pass, " in printed.err
    report = read_report(tmp_path / "new" / "r.json")
    assert (report.suite, report.part, report.seed, report.ok) == (
        "attention",
        "torch_sdpa",
        5,
        True,
    )
    assert report.only["dtype"] == ("float32",)
    assert report.command.startswith("jackfield conformance attention --backend torch_sdpa")
    assert (tmp_path / "r.md").read_text().startswith("# Attention conformance: `torch_sdpa`")


def test_a_class_that_is_not_registered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--law", "table_tail", "--backend-options", '{"speed": 4}', "--report", "r.json"]
    assert attention(monkeypatch, "unregistered_backends:Right", *flags) == 0
    assert read_report(folder / "r.json").part == "right"


def test_a_broken_backend(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = "unregistered_backends:Wrong"
    flags = ["--law", "meaning", "--report", "r.json", "--only", "batch=decode"]
    assert attention(monkeypatch, backend, *flags) == 1
    printed = capsys.readouterr()
    assert "meaning, float32: FAIL, " in printed.err
    assert "--reproducers DIR" in printed.err
    assert "FAILED: 1 law failed" in printed.out.splitlines()[-1]
    assert "the smallest case found:" in printed.out
    (result,) = read_report(folder / "r.json").results
    assert result.status is Status.FAILED
    assert attention(monkeypatch, backend, *flags, "--reproducers", "found") == 1
    printed = capsys.readouterr()
    (reproducer,) = (folder / "found").iterdir()
    assert f"reproducer: found/{reproducer.name}" in printed.out
    assert "--reproducers DIR" not in printed.err


def test_interrupt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--law", "declared", "--law", "meaning", "--report", "r.json"]
    assert attention(monkeypatch, "unregistered_backends:Interrupting", *flags) == 130
    printed = capsys.readouterr()
    assert "declared" in printed.out
    assert "meaning" not in printed.out
    assert "no report is written" in printed.err
    assert not (folder / "r.json").exists()


@pytest.mark.parametrize(
    ("backend", "arguments", "part"),
    [
        ("torch_sdp", [], "did you mean 'torch_sdpa'"),
        ("torch_sdpa", ["--law", "meanin"], "did you mean 'meaning'"),
        ("torch_sdpa", ["--profile", "quik"], "did you mean 'quick'"),
        ("torch_sdpa", ["--scale", "smal"], "did you mean 'small'"),
        ("torch_sdpa", ["--only", "head_sizes=64"], "did you mean 'head_size'"),
        ("torch_sdpa", ["--only", "head_size"], "write AXIS=VALUE,VALUE"),
        ("torch_sdpa", ["--dtype", "int8"], "int8 is not among"),
        ("torch_sdpa", ["--device", "tpu"], "device='tpu' is unknown"),
        ("torch_sdpa", ["--backend-options", "[1]"], "it must be a JSON object"),
        ("torch_sdpa", ["--backend-options", '{"x": 1}'], "field 'x' is unknown"),
        ("torch_sdpa", ["--report", "."], "cannot be written"),
        ("no_such_module:Backend", [], "ModuleNotFoundError"),
        ("unregistered_backends:Absent", [], "AttributeError"),
        (
            "unregistered_backends:Unnamed",
            [],
            "it is no subclass of jackfield.core.attention.AttentionBackend",
        ),
    ],
)
def test_bad_input_is_status_2(
    backend: str,
    arguments: list[str],
    part: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert attention(monkeypatch, backend, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error:")
    assert part in printed.err
    assert printed.out == ""


def test_without_hypothesis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert run(monkeypatch, "conformance", "laws") == 2
    assert "pip install 'jackfield[conformance]'" in capsys.readouterr().err
    assert attention(monkeypatch, "torch_sdpa") == 2
    assert "pip install 'jackfield[conformance]'" in capsys.readouterr().err


def test_laws(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "conformance", "laws") == 0
    lines = capsys.readouterr().out.splitlines()
    for law in ALL_LAWS:
        assert law.name in lines
        assert " ".join(law.title().replace("``", "`").split())[:40] in " ".join(lines)


def test_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(to_json(make_report(PASSED, UNCLAIMED)))
    new.write_text(to_json(make_report(PASSED, UNCLAIMED, FAILED)))
    assert run(monkeypatch, "conformance", "diff", old, new) == 1
    assert "meaning, float16: not run -> fail" in capsys.readouterr().out
    assert run(monkeypatch, "conformance", "diff", new, old) == 0
    assert "nothing became worse" in capsys.readouterr().out
    assert run(monkeypatch, "conformance", "diff", old, new, "--json") == 1
    assert json.loads(capsys.readouterr().out)["worse"][0]["law"] == "meaning"
    new.write_text("{}")
    assert run(monkeypatch, "conformance", "diff", old, new) == 2
    assert "new.json" in capsys.readouterr().err


def test_explain_shows_published_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_llama(tmp_path)
    assert run(monkeypatch, "explain", tmp_path) == 0
    assert "conformance: " in capsys.readouterr().out
    assert run(monkeypatch, "explain", tmp_path, "--json") == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    with_a_suite = {"attention_backend", "scheduler", "block_manager"}
    for part in parts:
        assert bool(part["conformance"]) is (part["kind"] in with_a_suite)


def test_progress_on_a_terminal() -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    interrupt = Interrupt()
    with SuiteProgress(interrupt, console) as progress:
        progress.started("meaning", "float32", 100)
        progress.progressed("meaning", "float32", 42)
        progress.started("meaning", "float16", 100)
        progress.finished(PASSED)
        progress.finished(FAILED)
        progress.started("lse", "float32", 100)
        interrupt.pressed = True
        with pytest.raises(KeyboardInterrupt):
            progress.progressed("lse", "float32", 1)
    assert "meaning, float32" in output.getvalue()
    assert "42 examples" in output.getvalue()
    assert "2 finished, 1 failed" in output.getvalue()
    assert progress.results == [PASSED, FAILED]


def test_parse_only() -> None:
    items = ["head_size=64, 128", "dtype=float16", "head_size=32,64"]
    assert parse_only(items) == {"head_size": ("64", "128", "32"), "dtype": ("float16",)}
    for item in ("", "=1", "head_size=", "head_size=1,,2"):
        with pytest.raises(ConfigError, match="malformed"):
            parse_only([item])


def test_parse_backend_options() -> None:
    assert parse_backend_options(None) == {}
    assert parse_backend_options('{"a": 1}') == {"a": 1}
    with pytest.raises(ConfigError, match="must be a JSON object"):
        parse_backend_options("{a}")
