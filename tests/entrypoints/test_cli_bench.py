"""``jackfield bench`` in this process, on small cases and a CPU."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from jackfield.backends.flex import FlexBackend
from jackfield.core.errors import ConfigError
from jackfield.entrypoints import cli
from jackfield.entrypoints.bench import cases as case_module
from jackfield.entrypoints.bench import direct
from jackfield.entrypoints.bench.cases import BenchCase
from jackfield.entrypoints.bench.command import BenchProgress
from jackfield.entrypoints.bench.data import BenchData
from jackfield.entrypoints.bench.plot import require_matplotlib
from jackfield.entrypoints.bench.results import (
    BackendResult,
    BenchReport,
    Ceilings,
    DirectResult,
    Settings,
    Timing,
    Verdict,
    read_report,
    to_json,
)
from jackfield.entrypoints.bench.table import rate, render, to_markdown

SMALL = (
    BenchCase(4, 2, 16, ((33, 1), (20, 1))),
    BenchCase(4, 2, 16, ((24, 24), (24, 24))),
    BenchCase(4, 2, 16, ((33, 1), (9, 9))),
)
BACKENDS = """
import signal
from dataclasses import replace
import torch
from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.core.attention import SizeSet

class Wrong(PlainBackend):
    name = "wrong"
    def forward(self, query, cache, plan, out, **others):
        super().forward(query, cache, plan, out, **others)
        return out.mul_(1.01)

class Lazy(PlainBackend):
    name = "lazy"
    def forward(self, query, cache, plan, out, **others):
        full = super().forward(query, cache, plan, torch.zeros_like(out), **others)
        out[:9], out[10:] = full[:9], full[10:]
        return out

class Forgetful(PlainBackend):
    name = "forgetful"
    def write_kv(self, key, value, cache, slot_mapping):
        pass

class Breaking(PlainBackend):
    name = "breaking"
    def plan(self, batch, into=None):
        raise RuntimeError("no kernel for this")

class Narrow(PlainBackend):
    name = "narrow"
    @classmethod
    def capabilities(cls, device):
        return replace(
            super().capabilities(device), block_sizes=SizeSet.of(64), preferred_block_size=64,
            mixed_batches=False,
        )

class Twin(Narrow):
    pass

class Interrupting(PlainBackend):
    name = "interrupting"
    def forward(self, query, *arguments, **others):
        if len(query) > 40:
            signal.raise_signal(signal.SIGINT)
        return super().forward(query, *arguments, **others)
"""


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases, a module of backends in the current directory, no handlers of an earlier run."""
    monkeypatch.setattr(case_module, "CPU_CASES", SMALL)
    monkeypatch.setattr(case_module, "CUDA_CASES", ())
    (tmp_path / "bench_backends.py").write_text(BACKENDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bench_backends", raising=False)
    logging.getLogger("jackfield").handlers.clear()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of ``jackfield bench ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["jackfield", "bench", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "100")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def attention(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of a short run on the CPU without ceilings."""
    common = ("--device", "cpu", "--milliseconds", 1, "--no-ceilings")
    return run(monkeypatch, "attention", *common, *arguments)


def test_all_backends_that_run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention(monkeypatch, "--json", "new/r.json") == 0
    printed = capsys.readouterr()
    report = read_report(Path("new/r.json"))
    assert [case.name for case in report.cases] == [case.name for case in SMALL]
    timed = {one.backend for one in report.results if one.verdict is Verdict.TIMED}
    assert {"torch_sdpa", "flex"} <= timed
    assert "triton" in report.unavailable
    assert "triton does not run here: " in " ".join(printed.out.split())
    assert max(map(len, printed.out.splitlines())) <= 100
    assert "decode 1x33+1x20 4/2/16: torch_sdpa: " in printed.err
    for one in report.results:
        assert one.timing is not None
        assert one.timing.graph_us is None
        assert one.error is not None
        assert 0 < one.error <= 1
        assert min(one.timing.device_us, one.timing.host_us, one.plan_host_us or 0) > 0
        assert min(one.write_kv_us or 0, one.write_kv_host_us or 0, one.first_call_s or 0) > 0
    for case in report.cases:
        first, *others = report.of_case(case.name)
        assert first.ratio == 1
        assert all(one.ratio is not None and one.ratio >= 1 for one in others)
        took = first.timing.device_us / 1e6 if first.timing else math.nan
        assert first.flops_per_s == pytest.approx(case.flops / took, rel=1e-2)
        assert case.rows_checked <= case.num_tokens
    assert report.settings.dtype == "float32"
    assert report.settings.cache == "warm"
    assert report.command.startswith("jackfield bench attention --device cpu")
    assert report.versions["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrong", "the output is wrong in "),
        # A row that is not among those compared.
        ("Lazy", "1 of 48 rows are NaN or not written"),
        ("Forgetful", "the output is wrong in "),
    ],
)
def test_wrong_backends_are_not_timed(
    name: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--backend", f"bench_backends:{name}", "--backend", "torch_sdpa", "--json", "r.json")
    assert attention(monkeypatch, *flags, "--case", "prefill") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"{name.lower()} is WRONG and not timed: {reason}" in out
    assert "1 wrong or failed" in out
    wrong, right = read_report(Path("r.json")).results
    assert (wrong.verdict, wrong.timing, wrong.ratio) == (Verdict.WRONG, None, None)
    assert wrong.reasons[0].startswith(reason)
    assert wrong.error is not None
    assert wrong.error > 1
    assert (right.verdict, right.ratio) == (Verdict.TIMED, 1)


def test_a_backend_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = ("--backend", "bench_backends:Breaking", "--backend", "torch_sdpa")
    assert attention(monkeypatch, *backends) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "breaking failed: RuntimeError: no kernel for this" in out
    assert "3 wrong or failed" in out


def test_refusals_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = ("--backend", "bench_backends:Narrow", "--backend", "torch_sdpa")
    assert attention(monkeypatch, *narrow, "--json", "r.json") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "narrow refuses it: mixed batches of decoding and prefill are not supported" in out
    sizes = {(one.backend, one.block_size) for one in read_report(Path("r.json")).results}
    assert sizes == {("narrow", 64), ("torch_sdpa", 16)}
    assert attention(monkeypatch, *narrow, "--block-size", 16, "--case", "4/2/16") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "narrow refuses it: block_size=16 is not supported (supported: 64)" in out


def test_what_was_named_and_serves_nothing_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention(monkeypatch, "--backend", "triton", "--backend", "torch_sdpa") == 1
    assert "triton refuses all cases: " in capsys.readouterr().out


def test_options_of_a_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = 'torch_sdpa{"max_score_elements": 100}'
    flags = ("--backend", "torch_sdpa", "--backend", variant, "--dtype", "bfloat16")
    assert attention(monkeypatch, *flags, "--json", "r.json") == 0
    report = read_report(Path("r.json"))
    assert {one.backend for one in report.results} == {
        "torch_sdpa",
        'torch_sdpa {"max_score_elements": 100}',
    }
    assert report.settings.dtype == "bfloat16"


def test_who_cannot_be_asked_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: torch.device) -> None:
        raise OSError("the driver is gone")

    monkeypatch.setattr(FlexBackend, "capabilities", broken)
    assert attention(monkeypatch, "--case", "decode") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "flex does not run here: its capabilities cannot be told: OSError: the driver" in out


def test_two_classes_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = ("--backend", "bench_backends:Narrow", "--backend", "bench_backends:Twin")
    assert attention(monkeypatch, *twins, "--case", "decode", "--json", "r.json") == 0
    names = {one.backend for one in read_report(Path("r.json")).results}
    assert names == {"narrow", "bench_backends:Twin"}


def test_ceilings_and_shares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jackfield.entrypoints.bench import ceilings

    monkeypatch.setattr(ceilings, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "_CPU_SIZE", 64)
    flags = ("--device", "cpu", "--milliseconds", 1, "--backend", "torch_sdpa")
    assert run(monkeypatch, "attention", *flags, "--json", "r.json") == 0
    assert "ceilings: copy " in capsys.readouterr().out
    report = read_report(Path("r.json"))
    found = report.ceilings
    assert found is not None
    for case, one in zip(report.cases, report.results, strict=True):
        slowest = max(case.num_bytes / found.read, case.flops / found.matmul)
        assert one.timing is not None
        assert one.share == pytest.approx(slowest / (one.timing.device_us / 1e6), rel=1e-2)


def test_direct_calls_stand_beside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plain_call(data: BenchData, options: object) -> direct.DirectCall:
        if data.case.kind == "mixed":
            raise direct.NoDirectCall("no mixed batches")
        if data.case.kind == "prefill":
            return direct.DirectCall("sloppy", lambda: data.new_out().nan_to_num(0.0))
        from jackfield.conformance.attention.plain_backend import PlainBackend

        own = PlainBackend(data.spec, data.cache_spec, data.query.device)
        plan, out = own.plan(data.batch), data.new_out()
        return direct.DirectCall("own", lambda: own.forward(data.query, data.cache, plan, out))

    monkeypatch.setitem(direct.DIRECT_CALLS, "torch_sdpa", plain_call)
    flags = ("--backend", "torch_sdpa", "--direct", "--json", "r.json")
    assert attention(monkeypatch, *flags) == 1
    out = " ".join(capsys.readouterr().out.split())
    report = read_report(Path("r.json"))
    found = [one.direct for one in report.results if one.direct is not None]
    assert [one.verdict for one in found] == [Verdict.TIMED, Verdict.WRONG, Verdict.REFUSED]
    assert "us on the host to own" in out
    assert "sloppy is WRONG and not timed: " in out
    assert "no direct call: no mixed batches" in out
    dense = [case.dense for case in report.cases]
    assert [one is not None for one in dense] == [False, True, False]
    assert "torch sdpa, dense" in out


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--backend", "bench_backends:Interrupting", "--json", "r.json")
    assert attention(monkeypatch, *flags) == 130
    printed = capsys.readouterr()
    assert SMALL[0].name in printed.out
    assert SMALL[1].name not in printed.out
    assert "no file is written" in printed.err
    assert not Path("r.json").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--backend", "torch_sdp"], "did you mean 'torch_sdpa'"),
        (["--backend", 'torch_sdpa{"x": 1}'], "field 'x' is unknown"),
        (["--backend", "torch_sdpa{x"], "must be a JSON object"),
        (["--case", "decod 1x"], "no part of a case's name"),
        (["--dtype", "bfloat"], "did you mean 'bfloat16'"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype 'int4' is unknown"),
        (["--device", "tpu"], "device='tpu' is unknown"),
        (["--warm"], "--warm is about the L2 cache"),
        (["--json", "."], "cannot be written"),
    ],
)
def test_bad_input_is_status_2(
    arguments: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert attention(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error:")
    assert part in printed.err
    assert printed.out == ""


def made_up() -> BenchReport:
    """A report with one of everything."""
    base = BackendResult("decode", "b", 16, Verdict.TIMED, (), 0.31, Timing(20.0, 16.5, 42.0))
    results = (
        replace(base, plan_host_us=190.0, bytes_per_s=3.8e12, share=0.9, ratio=1.1),
        replace(
            base,
            backend="a",
            bytes_per_s=4.1e12,
            share=0.99,
            ratio=1.0,
            direct=DirectResult("call", Verdict.TIMED, "", 0.2, Timing(19.0, 16.0, 30.0)),
        ),
        BackendResult("decode", "w", 16, Verdict.WRONG, ("wrong in 3",), math.inf),
    )
    report = read_report(Path("r.json"))
    return replace(
        report,
        cases=(replace(report.cases[0], name="decode", limit="read"),),
        results=results,
        unavailable={"x": "x is not installed"},
        ceilings=Ceilings(4.28e12, 4.16e12, 7.01e14),
    )


def test_files_are_read_back_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention(monkeypatch, "--backend", "torch_sdpa", "--json", "r.json") == 0
    report = made_up()
    Path("again.json").write_text(to_json(report))
    assert read_report(Path("again.json")) == report
    capsys.readouterr()
    assert run(monkeypatch, "show", "again.json") == 0
    lines = capsys.readouterr().out.splitlines()
    out = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 100
    assert "copy 4.28 TB/s, read 4.16 TB/s, matmul 701 TFLOP/s" in out
    assert "a adds +0.5 us in a graph on the device and +12 us on the host to call" in out
    assert out.index(" a 16") < out.index(" b 16")
    assert "x does not run here: x is not installed" in out
    assert run(monkeypatch, "show", "again.json", "--markdown") == 0
    assert "| `decode` | `a` | 16 | 16.5 | 4.10 TB/s | 99 % | 1.00 | - |" in capsys.readouterr().out
    Path("bad.json").write_text("{}")
    assert run(monkeypatch, "show", "bad.json") == 2
    Path("bad.json").write_text(to_json(report).replace('"seconds"', '"second"'))
    assert run(monkeypatch, "show", "bad.json") == 2
    assert "is damaged" in capsys.readouterr().err
    assert json.loads(to_json(report))["report"]["results"][2]["error"] == "inf"


def test_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    flags = ("--backend", "torch_sdpa", "--backend", "bench_backends:Wrong", "--json", "r.json")
    assert attention(monkeypatch, *flags, "--plot", "p.png") == 1
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert run(monkeypatch, "show", "r.json", "--plot", "p.svg") == 0
    assert "torch_sdpa" in Path("p.svg").read_text()
    assert run(monkeypatch, "show", "r.json", "--plot", "p.txt") == 2


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'jackfield\[plot\]'"):
        require_matplotlib(Path("p.png"))


def test_numbers_in_words() -> None:
    assert rate(4.161e12, "B/s") == "4.16 TB/s"
    assert rate(7.011e14, "FLOP/s") == "701 TFLOP/s"
    assert rate(38.94e9, "B/s") == "38.9 GB/s"
    assert rate(99.96e9, "B/s") == "100 GB/s"
    assert rate(12.0, "B/s") == "12 B/s"


def test_progress_on_a_terminal() -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with BenchProgress(3, console) as progress:
        progress.started("ceilings")
        progress.finished(None)
        progress.started("decode: torch_sdpa")
    assert "decode: torch_sdpa" in output.getvalue()
    assert "1/3" in output.getvalue()


def test_a_run_without_results_is_rendered() -> None:
    settings = Settings("float32", "float32", None, 1.0, "warm")
    report = BenchReport("", "cpu", {"torch": "2.13"}, settings, (), ())
    output = StringIO()
    Console(file=output, width=100).print(render(report))
    assert "cpu; torch 2.13" in output.getvalue()
    assert to_markdown(report).count("\n") == 2
