"""``jackfield conformance matrix`` and ``pairwise``: several backends side by side."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..conformance import matrix as matrices
from ..conformance import pairwise_report
from ..conformance.choices import named
from ..conformance.report import read_report
from ..core.errors import ConfigError
from ..plugins.registry import PartKind
from ..plugins.selection import validate_options
from .cli_conformance import find_backend, prepare, require_hypothesis
from .console import INTERRUPTED, show
from .interrupts import deferred_interrupt


def run_matrix(files: Sequence[Path], markdown: Path | None) -> int:
    """Show the table of some reports; the exit status is 0 if all of them passed, else 1.

    Args:
        files: the reports, a column each.
        markdown: file for the table. If it has the two markers of a matrix, what is between them
            is replaced, and the rest kept.

    Raises:
        ConfigError: a file is no report, or as ``matrix``.
    """
    reports = [read_report(file) for file in files]
    table = matrices.matrix(reports)
    if markdown is None:
        show(matrices.render(table))
    else:
        block = matrices.to_markdown(table)
        page = _text_of(markdown) if markdown.exists() else ""
        _write(markdown, matrices.inserted(page, block) or block)
    return 0 if all(report.ok for report in reports) else 1


@dataclass(frozen=True)
class PairwiseRun:
    """What the command line asks for, as typed.

    Attributes:
        backends: registered names, or ``package.module:ClassName``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        batches, seed, scale: as in ``PairwiseOptions``.
        dtypes: values of the axis ``dtype``.
        only: ``AXIS=VALUE,VALUE`` each.
        jobs: processes that share the batches.
        report, markdown: files to write; None writes none.
    """

    backends: tuple[str, ...]
    device: str = "auto"
    batches: int = 500
    seed: int = 0
    scale: str = "small"
    dtypes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    jobs: int = 1
    report: Path | None = None
    markdown: Path | None = None


def run_pairwise(asked: PairwiseRun) -> int:
    """Compare backends with each other and with float64. The exit status is 0 if all are within
    the bounds, 1 if not, 130 if Ctrl-C ended the run.

    Raises:
        ConfigError: anything asked for is unknown, backends have nothing in common, a file cannot
            be written, or Hypothesis is not installed.
        PluginError: a backend is unknown, contested or broken.
    """
    require_hypothesis()
    from ..conformance.attention.axes import SCALES, parse_only
    from ..conformance.attention.pairwise import Comparison, PairwiseOptions
    from ..conformance.attention.search import keep_out_of_the_working_directory
    from ..conformance.attention.subject import Subject
    from .resolve import resolve_device

    keep_out_of_the_working_directory()
    named("scale", asked.scale, SCALES)
    device = resolve_device(asked.device)
    kind = PartKind.ATTENTION_BACKEND
    subjects = [
        Subject(backend, device, validate_options(kind, backend.name, backend, None))
        for backend in map(find_backend, asked.backends)
    ]
    options = PairwiseOptions(
        batches=asked.batches,
        seed=asked.seed,
        scale=asked.scale,
        only=parse_only([*asked.only, *(f"dtype={dtype}" for dtype in asked.dtypes)]),
        command=shlex.join(["jackfield", *sys.argv[1:]]),
    )
    comparison = Comparison(subjects, options)
    for path in (asked.report, asked.markdown):
        prepare(path)
    started = time.perf_counter()
    with (
        deferred_interrupt() as interrupt,
        tqdm(total=asked.batches, unit="batch", disable=not sys.stderr.isatty()) as bar,
    ):
        try:
            for done in comparison.run(asked.jobs):
                bar.update(done - bar.n)
                if interrupt.pressed:
                    break
        except BrokenProcessPool:
            # Ctrl-C ends them too.
            if not interrupt.pressed:
                raise ConfigError(
                    f"one of {asked.jobs} processes died while backends computed; with --jobs 1 "
                    "the error, or the batch at which it happens, is seen"
                ) from None
    report = comparison.report(time.perf_counter() - started)
    show(pairwise_report.render(report))
    if interrupt.pressed:
        print("interrupted: these batches were compared, no file is written", file=sys.stderr)
        return INTERRUPTED
    if asked.report is not None:
        _write(asked.report, pairwise_report.to_json(report))
    if asked.markdown is not None:
        _write(asked.markdown, pairwise_report.to_markdown(report))
    if report.batches < asked.batches:
        print(
            f"{report.batches} batches instead of {asked.batches}: no more were found that all "
            "backends take",
            file=sys.stderr,
        )
    return 0 if report.ok else 1


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}") from None
