"""``jackfield conformance``: runs a suite, lists its laws, compares two reports."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.padding import Padding
from tqdm import tqdm

from ..conformance.diff import compare, diff_to_json, render_diff
from ..conformance.report import read_report
from ..conformance.report_text import law_table, render, write_report
from ..conformance.resolve import part_class
from ..conformance.results import Report, Status
from ..core.attention import AttentionBackend
from ..core.errors import ConfigError
from ..plugins.discovery import discover
from ..plugins.registry import PartKind
from ..plugins.selection import validate_options
from .console import INTERRUPTED, output_console, say, show
from .interrupts import deferred_interrupt
from .settings import NO_OBJECT, parse_json

if TYPE_CHECKING:
    from ..conformance.attention.hunt import Kill


@dataclass(frozen=True)
class AttentionRun:
    """What the command line asks for, as typed.

    Attributes:
        backend: registered name, or ``package.module:ClassName``.
        backend_options: JSON object; None is none.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        profile, seed, laws, scale, jobs, reproducers: as in ``SuiteOptions``.
        dtypes: values of the axis ``dtype``.
        only: ``AXIS=VALUE,VALUE`` each.
        report, markdown: files to write; None writes none.
    """

    backend: str
    backend_options: str | None = None
    device: str = "auto"
    profile: str = "quick"
    seed: int = 0
    dtypes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    scale: str | None = None
    jobs: int = 0
    reproducers: Path | None = None
    report: Path | None = None
    markdown: Path | None = None


def run_attention(asked: AttentionRun) -> int:
    """Try an attention backend. The exit status is 0 if all that it claims holds and was exercised,
    1 if not, 130 if Ctrl-C ended the run.

    Raises:
        ConfigError: anything asked for is unknown or malformed, or Hypothesis is not installed.
        PluginError: the backend is unknown, contested or broken.
    """
    require_hypothesis()
    from ..conformance.attention.axes import parse_only
    from ..conformance.attention.search import keep_out_of_the_working_directory
    from ..conformance.attention.subject import Subject
    from ..conformance.attention.suite import SuiteOptions, run_suite
    from .cli_conformance_progress import SuiteProgress
    from .resolve import resolve_device

    keep_out_of_the_working_directory()
    backend = find_backend(asked.backend)
    values = parse_backend_options(asked.backend_options)
    kind = PartKind.ATTENTION_BACKEND
    options = SuiteOptions(
        profile=asked.profile,
        seed=asked.seed,
        only=parse_only([*asked.only, *(f"dtype={dtype}" for dtype in asked.dtypes)]),
        laws=tuple(dict.fromkeys(asked.laws)),
        scale=asked.scale,
        jobs=asked.jobs,
        reproducers=asked.reproducers,
        command=shlex.join(["jackfield", *sys.argv[1:]]),
    )
    subject = Subject(
        backend,
        resolve_device(asked.device),
        validate_options(kind, backend.name, backend, values),
    )
    for path in (asked.report, asked.markdown):
        prepare(path)
    with deferred_interrupt() as interrupt, SuiteProgress(interrupt) as progress:
        try:
            report = run_suite(subject, options, progress)
        except (KeyboardInterrupt, Exception) as error:
            # A process of the run may have died of the same Ctrl-C, with an error of its own.
            if isinstance(error, Exception) and not interrupt.pressed:
                raise
            progress.stop()
            show(law_table(progress.results, f"attention conformance of {backend.name}, so far"))
            say("interrupted: these laws were tried, no report is written")
            return INTERRUPTED
    show(render(report))
    _write(asked, report)
    return 0 if report.ok else 1


def run_laws() -> int:
    """Print every law of the attention suite with its text."""
    require_hypothesis()
    from ..conformance.attention.suite import ALL_LAWS

    for law in ALL_LAWS:
        show_law(law.name, inspect.cleandoc(law.__doc__ or "").split("\n\n"))
    return 0


def show_law(name: str, paragraphs: Iterable[str], needs: str = "") -> None:
    """Print a law.

    Args:
        name: of the law.
        paragraphs: its text. Lines are joined, because the terminal is as wide as it is.
        needs: what it is owed under, in words; "" is always.
    """
    console = output_console()
    console.print(f"[bold]{escape(name)}[/]{escape(f' ({needs})' if needs else '')}")
    for paragraph in paragraphs:
        text = " ".join(paragraph.replace("``", "`").split())
        console.print(Padding(escape(text), (0, 0, 1, 2)))


def run_mutants(
    names: Sequence[str], all_laws: bool, jobs: int, earlier: Path | None, output: Path | None
) -> int:
    """Try the suite on deliberately broken backends; the exit status is 0 if it catches them all.

    Args:
        names: of the mutants; none is all.
        all_laws: go on after the first law that notices.
        jobs: processes.
        earlier: table of an earlier run; the law that it names for a mutant is tried first.
        output: where the table goes; None writes none.

    Raises:
        ConfigError: a name is unknown, or Hypothesis is not installed.
    """
    require_hypothesis()
    from ..conformance.attention.hunt import hints_of, hunt, mutants_named, to_markdown

    mutants = mutants_named(names)
    hints = hints_of(_text_of(earlier)) if earlier is not None else {}
    prepare(output)
    with tqdm(total=len(mutants), unit="mutant", disable=not sys.stderr.isatty()) as bar:

        def told(kill: Kill) -> None:
            bar.update()
            if not kill.killed:
                bar.write(f"{kill.mutant}: caught by nothing in {kill.examples} cases")

        kills = hunt(mutants, all_laws=all_laws, jobs=jobs, hints=hints, report=told)
    if output is not None:
        command = shlex.join(["jackfield", *sys.argv[1:]])
        output.write_text(to_markdown(kills, command), encoding="utf-8")
    laws = Counter(law.partition(" ")[0] for kill in kills for law in kill.caught_by)
    killed = sum(kill.killed for kill in kills)
    slowest = max(kills, key=lambda kill: kill.seconds)
    show(", ".join(f"{law}: {count}" for law, count in laws.most_common()))
    show(
        f"{killed} of {len(kills)} mutants caught; the slowest in {slowest.seconds:.1f} s "
        f"({slowest.mutant})"
    )
    return 0 if killed == len(kills) else 1


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--earlier {path} cannot be read: {error}") from None


def run_diff(old: Path, new: Path, json_output: bool) -> int:
    """Compare two reports; the exit status is 1 if anything became worse.

    Raises:
        ConfigError: a file is no report, or the reports are of different suites.
    """
    diff = compare(read_report(old), read_report(new))
    if json_output:
        print(diff_to_json(diff))
    else:
        show(render_diff(diff))
    return 0 if diff.ok else 1


def find_backend(name: str) -> type[AttentionBackend]:
    """The attention backend of a registered name, or of ``package.module:ClassName``.

    A class need not be registered; its module may also lie in the current directory.

    Raises:
        PluginError: the name is unknown, contested, or what it stands for is no attention backend.
    """
    if ":" in name and str(Path.cwd()) not in sys.path:
        # At the end, so that nothing there hides an installed module. It stays, because a backend
        # imports its library only when it is asked for its capabilities.
        sys.path.append(str(Path.cwd()))
    return part_class(discover(), PartKind.ATTENTION_BACKEND, name)


def parse_backend_options(text: str | None) -> Mapping[str, Any]:
    """The options of a backend, of a JSON object.

    Raises:
        ConfigError: it is none.
    """
    if text is None:
        return {}
    what = f"--backend-options {text!r}"
    values = parse_json(text, what)
    if not isinstance(values, dict):
        raise ConfigError(f"{what} is wrong: {NO_OBJECT}")
    return values


def require_hypothesis() -> None:
    """The suites draw their cases with it.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise ConfigError(
            "the conformance suites need Hypothesis, which is not installed: "
            "pip install 'jackfield[conformance]'"
        )


def prepare(path: Path | None) -> None:
    """Find out before a long run whether a file can be written after it.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{str(path)!r} cannot be written: give the path of a file")


def _write(asked: AttentionRun, report: Report) -> None:
    write_report(report, asked.report, asked.markdown)
    failed = any(result.status is Status.FAILED for result in report.results)
    if failed and asked.reproducers is None:
        say("--reproducers DIR writes a file for each failure that shows it alone")
