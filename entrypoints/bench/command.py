"""What stands behind ``jackfield bench``: from what was typed to tables and files."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...core.errors import ConfigError
from ...plugins.validation import did_you_mean
from ..cli_conformance import prepare
from ..console import INTERRUPTED, error_console, output_console, say
from ..resolve import resolve_device
from .cases import chosen_cases
from .contestants import everybody, named
from .data import Layer
from .plot import draw, require_matplotlib
from .results import BackendResult, BenchReport, Verdict, read_report, to_json
from .run import Bench, BenchObserver, BenchOptions
from .table import microseconds, render, shortened, to_markdown

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_KV_DTYPES = (*_DTYPES, "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class AttentionBench:
    """What the command line asks for, as typed.

    Attributes:
        backends: as ``contestants.named`` takes them; none is all that run here.
        cases: names or parts of names; none is all that suit the device.
        dtype, kv_cache_dtype, device: ``auto`` or a name.
        block_size, milliseconds, warm, direct, ceilings: as in ``BenchOptions``.
        json, plot: files to write; None writes none.
    """

    backends: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    block_size: int | None = None
    milliseconds: float = 60.0
    warm: bool = False
    direct: bool = False
    ceilings: bool = True
    json: Path | None = None
    plot: Path | None = None


def run_attention_bench(asked: AttentionBench) -> int:
    """Time attention backends; the exit status is 0 if all were right, 1 if one was wrong or
    failed, was named and could not serve any case, or if nothing was timed; 130 after Ctrl-C.

    Raises:
        ConfigError: anything asked for is unknown, or a file cannot be written.
        PluginError: a named backend is unknown, contested or broken.
    """
    options = bench_options(asked)
    for path in (asked.json, asked.plot):
        prepare(path)
    if asked.plot is not None:
        require_matplotlib(asked.plot)
    with BenchProgress(options.steps) as progress:
        bench = Bench(options, progress)
        try:
            report = bench.run()
        except KeyboardInterrupt:
            progress.stop()
            if bench.report.cases:
                _show(render(bench.report))
            say("interrupted: these cases were finished, no file is written")
            return INTERRUPTED
    _show(render(report))
    if asked.json is not None:
        asked.json.write_text(to_json(report), encoding="utf-8")
    if asked.plot is not None:
        draw(report, asked.plot)
    return exit_status(report, bool(asked.backends))


def bench_options(asked: AttentionBench) -> BenchOptions:
    """What to run. Raises as ``run_attention_bench``."""
    device = resolve_device(asked.device)
    if device.type == "cpu" and asked.warm:
        raise ConfigError(
            "--warm is about the L2 cache of a CUDA device; on a CPU data stays in the caches "
            "as far as it fits"
        )
    default = "float32" if device.type == "cpu" else "bfloat16"
    dtype = _dtype("dtype", asked.dtype, _DTYPES, default)
    kv_dtype = _dtype(
        "kv-cache-dtype", asked.kv_cache_dtype, _KV_DTYPES, str(dtype).removeprefix("torch.")
    )
    unavailable: dict[str, str] = {}
    if asked.backends:
        contestants = named(asked.backends)
    else:
        contestants, unavailable = everybody(device)
    return BenchOptions(
        layer=Layer(dtype, kv_dtype, device),
        cases=chosen_cases(asked.cases, device.type),
        contestants=contestants,
        unavailable=unavailable,
        block_size=asked.block_size,
        milliseconds=asked.milliseconds,
        warm=asked.warm,
        ceilings=asked.ceilings,
        direct=asked.direct,
        command=shlex.join(["jackfield", *sys.argv[1:]]),
    )


def exit_status(report: BenchReport, were_named: bool) -> int:
    """1 if anything is wrong or failed, nothing was timed, or a backend that was named serves
    none of the cases; else 0."""
    timed = {one.backend for one in report.results if one.verdict is Verdict.TIMED}
    everyone = {one.backend for one in report.results}
    idle = were_named and everyone - timed
    return 1 if any(report.faults) or idle or not timed else 0


def show_results(file: Path, markdown: bool, plot: Path | None) -> int:
    """Print a file's results as tables, or as Markdown, and draw them if asked to.

    Raises:
        ConfigError: the file holds no results, or the picture cannot be drawn.
    """
    report = read_report(file)
    if plot is not None:
        prepare(plot)
        require_matplotlib(plot)
    if markdown:
        print(to_markdown(report), end="")
    else:
        _show(render(report))
    if plot is not None:
        draw(report, plot)
    return 0


class BenchProgress(BenchObserver):
    """Follows a run on standard error: a bar on a terminal, else a line for each result."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or error_console()
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            # A refresh in the middle of a measurement takes a core for a moment.
            auto_refresh=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps)
        self._what = ""

    def __enter__(self) -> BenchProgress:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the live line away."""
        self._live.stop()

    def started(self, what: str) -> None:
        """Say what is measured now."""
        self._what = what
        self._live.update(self._task, description=escape(what), refresh=True)

    def finished(self, result: BackendResult | None) -> None:
        """Move the bar; without a terminal, print what came out."""
        self._live.update(self._task, advance=1, refresh=True)
        if self._console.is_terminal:
            return
        text = "measured"
        if result is not None and result.timing is not None:
            text = f"{microseconds(result.timing.best_us)} us"
        elif result is not None:
            text = f"{result.verdict.value}: {shortened('; '.join(result.reasons))}"
        self._console.print(escape(f"{self._what}: {text}"))


def _dtype(setting: str, name: str, known: tuple[str, ...], default: str) -> torch.dtype:
    chosen = default if name == "auto" else name
    if chosen not in known:
        raise ConfigError(
            f"--{setting} {name!r} is unknown{did_you_mean(name, known)} "
            f"(known: auto, {', '.join(known)})"
        )
    dtype = getattr(torch, chosen)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _show(what: RenderableType) -> None:
    console = output_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A file has no width of its own; the tables need so much.
        console.width = 100
    console.print(what)
