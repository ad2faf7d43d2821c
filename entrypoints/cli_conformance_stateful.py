"""``jackfield conformance block-manager`` and ``scheduler``: suites, their laws, their mutants."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from ..plugins.registry import PartKind
from .cli_errors import bad_input
from .console import INTERRUPTED, say, show

if TYPE_CHECKING:
    from ..conformance.results import Report
    from ..conformance.stateful.hunt import Kill, Quarry
    from ..conformance.stateful.laws import StatefulLaw
    from ..conformance.stateful.suite import StatefulOptions
    from ..core.options import PartOptions

# Options that both suites have.
Name = Annotated[
    str, typer.Option(help="Registered name, or package.module:ClassName.", metavar="NAME")
]
Profile = Annotated[str, typer.Option(help="Size of the run: quick, full or soak.")]
Seed = Annotated[int, typer.Option(help="Of the stories.")]
Jobs = Annotated[
    int, typer.Option(min=0, help="Processes that share the stories; 0: one a core, at most 4.")
]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write the report as JSON.")
]
MarkdownFile = Annotated[
    Path | None, typer.Option(metavar="FILE.md", help="Write the report as Markdown.")
]
Reproducers = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write a file for each failure that shows it alone."),
]
MutantNames = Annotated[
    list[str] | None, typer.Argument(metavar="[MUTANT]...", help="Default: all.")
]
MutantJobs = Annotated[int, typer.Option(min=1, help="Processes that share the mutants.")]
TableFile = Annotated[
    Path | None, typer.Option(metavar="FILE.md", help="Write the table as Markdown.")
]


def add_stateful_suites(conformance: typer.Typer) -> None:
    """Register the commands of the suites of stateful parts."""
    conformance.command("block-manager")(conformance_block_manager)
    conformance.command("block-manager-laws")(conformance_block_manager_laws)
    conformance.command("block-manager-mutants")(conformance_block_manager_mutants)
    conformance.command("scheduler")(conformance_scheduler)
    conformance.command("scheduler-laws")(conformance_scheduler_laws)
    conformance.command("scheduler-mutants")(conformance_scheduler_mutants)


def conformance_block_manager(
    name: Name,
    options: Annotated[
        str | None, typer.Option(help="The block manager's options.", metavar="JSON")
    ] = None,
    profile: Profile = "quick",
    seed: Seed = 0,
    jobs: Jobs = 0,
    report: ReportFile = None,
    markdown: MarkdownFile = None,
    reproducers: Reproducers = None,
) -> None:
    """Try a block manager. Status 0: all it claims holds; 1: not; 2: bad input."""
    with bad_input():
        files = Files(report, markdown, reproducers)
        raise typer.Exit(run_block_manager(name, options, profile, seed, jobs, files))


def conformance_block_manager_laws() -> None:
    """List the laws of the block manager suite, each with its text."""
    with bad_input():
        _require()
        from ..conformance.block_manager.laws import ALL_LAWS

        raise typer.Exit(_list_laws(ALL_LAWS))


def conformance_block_manager_mutants(
    names: MutantNames = None,
    jobs: MutantJobs = 1,
    output: TableFile = None,
) -> None:
    """Try the suite on broken block managers. Status 0: all are caught; 1: not; 2: bad input."""
    with bad_input():
        _require()
        from ..conformance.block_manager.suite import QUARRY

        raise typer.Exit(_hunt(QUARRY, names or (), jobs, output))


def conformance_scheduler(
    name: Name,
    policy: Annotated[
        str, typer.Option(help="The scheduling policy that it is given.", metavar="NAME")
    ] = "fcfs",
    block_manager: Annotated[
        str, typer.Option(help="The block manager that it is given.", metavar="NAME")
    ] = "paged",
    options: Annotated[
        str | None, typer.Option(help="The scheduler's options.", metavar="JSON")
    ] = None,
    policy_options: Annotated[
        str | None, typer.Option(help="The policy's options.", metavar="JSON")
    ] = None,
    block_manager_options: Annotated[
        str | None, typer.Option(help="The block manager's options.", metavar="JSON")
    ] = None,
    profile: Profile = "quick",
    seed: Seed = 0,
    jobs: Jobs = 0,
    report: ReportFile = None,
    markdown: MarkdownFile = None,
    reproducers: Reproducers = None,
) -> None:
    """Try a scheduler. Status 0: all it owes holds; 1: not; 2: bad input."""
    with bad_input():
        parts = {
            PartKind.SCHEDULER: Chosen(name, options),
            PartKind.SCHEDULING_POLICY: Chosen(policy, policy_options, "--policy-options"),
            PartKind.BLOCK_MANAGER: Chosen(
                block_manager, block_manager_options, "--block-manager-options"
            ),
        }
        files = Files(report, markdown, reproducers)
        raise typer.Exit(run_scheduler(parts, profile, seed, jobs, files))


def conformance_scheduler_laws() -> None:
    """List the laws of the scheduler suite, each with its text."""
    with bad_input():
        _require()
        from ..conformance.scheduler.laws import ALL_LAWS, FCFS

        def owed(power: str) -> str:
            if power == FCFS:
                return "owed under the policy 'fcfs'"
            return f"owed with block managers of the power {power!r}"

        raise typer.Exit(_list_laws(ALL_LAWS, owed))


def conformance_scheduler_mutants(
    names: MutantNames = None,
    jobs: MutantJobs = 1,
    output: TableFile = None,
) -> None:
    """Try the suite on broken schedulers. Status 0: all are caught; 1: not; 2: bad input."""
    with bad_input():
        _require()
        from ..conformance.scheduler.suite import QUARRY

        raise typer.Exit(_hunt(QUARRY, names or (), jobs, output))


@dataclass(frozen=True)
class Chosen:
    """A part that a user names, with its options as JSON and the flag that sets them."""

    name: str
    options: str | None = None
    flag: str = "--options"


@dataclass(frozen=True)
class Files:
    """Where results go; None writes none."""

    report: Path | None = None
    markdown: Path | None = None
    reproducers: Path | None = None


def run_block_manager(
    name: str, options: str | None, profile: str, seed: int, jobs: int, files: Files
) -> int:
    """Try a block manager.

    Raises:
        ConfigError: anything asked for is unknown or malformed, or Hypothesis is not installed.
        PluginError: the block manager is unknown, contested or broken.
    """
    _require()
    from ..conformance.block_manager.calls import Subject
    from ..conformance.block_manager.suite import run_suite

    manager, values = _part(PartKind.BLOCK_MANAGER, Chosen(name, options))
    subject = Subject(manager, values)
    return _run(
        lambda chosen, observer: run_suite(subject, chosen, observer),
        profile,
        seed,
        jobs,
        files,
    )


def run_scheduler(
    parts: Mapping[PartKind, Chosen], profile: str, seed: int, jobs: int, files: Files
) -> int:
    """Try a scheduler with a policy and a block manager.

    Raises:
        ConfigError: anything asked for is unknown or malformed, a part cannot be built, or
            Hypothesis is not installed.
        PluginError: a part is unknown, contested or broken.
    """
    _require()
    from ..conformance.scheduler.suite import run_suite
    from ..conformance.scheduler.world import Subject

    order = PartKind.SCHEDULER, PartKind.BLOCK_MANAGER, PartKind.SCHEDULING_POLICY
    classes, options = zip(*(_part(kind, parts[kind]) for kind in order), strict=True)
    subject = Subject(*classes, *options)
    return _run(
        lambda chosen, observer: run_suite(subject, chosen, observer),
        profile,
        seed,
        jobs,
        files,
    )


def _run(
    suite: Callable[[StatefulOptions, Any], Report],
    profile: str,
    seed: int,
    jobs: int,
    files: Files,
) -> int:
    """Run a suite with its progress shown; the exit status."""
    from ..conformance.report_text import render, write_report
    from ..conformance.stateful.suite import StatefulOptions
    from ..conformance.stateful.workers import keep_out_of_the_working_directory
    from .cli_conformance_stories import StoryProgress
    from .interrupts import deferred_interrupt

    keep_out_of_the_working_directory()
    command = shlex.join(["jackfield", *sys.argv[1:]])
    chosen = StatefulOptions(profile, seed, jobs, files.reproducers, command)
    for path in (files.report, files.markdown):
        _ready(path)
    with deferred_interrupt() as interrupt, StoryProgress(interrupt) as progress:
        try:
            report = suite(chosen, progress)
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, Exception) and not interrupt.pressed:
                raise
            progress.stop()
            say("interrupted: no report is written")
            return INTERRUPTED
    if report.capabilities:
        show("; ".join(f"{name}: {value}" for name, value in report.capabilities.items()))
    show(render(report))
    write_report(report, files.report, files.markdown)
    if not report.ok and files.reproducers is None:
        say("--reproducers DIR writes a file for each failure that shows it alone")
    return 0 if report.ok else 1


def _list_laws(
    laws: Sequence[type[StatefulLaw]], owed: Callable[[str], str] = "power {!r}".format
) -> int:
    from .cli_conformance import show_law

    for law in laws:
        show_law(law.name, law.paragraphs(), owed(law.power) if law.power else "")
    return 0


def _hunt(quarry: Quarry, names: Sequence[str], jobs: int, output: Path | None) -> int:
    from ..conformance.stateful.hunt import hunt, to_markdown
    from ..conformance.stateful.workers import keep_out_of_the_working_directory

    keep_out_of_the_working_directory()
    total = len(quarry.named(names))
    _ready(output)
    with tqdm(total=total, unit="mutant", disable=not sys.stderr.isatty()) as bar:

        def told(kill: Kill) -> None:
            bar.update()
            if not kill.killed:
                bar.write(f"{kill.mutant}: caught by nothing in {kill.examples} stories")

        kills = hunt(quarry, names, jobs=jobs, report=told)
    if output is not None:
        command = shlex.join(["jackfield", *sys.argv[1:]])
        output.write_text(to_markdown(quarry, kills, command), encoding="utf-8")
    laws = Counter(kill.caught_by for kill in kills if kill.killed)
    killed = sum(kill.killed for kill in kills)
    slowest = max(kills, key=lambda kill: kill.seconds)
    show(", ".join(f"{law}: {count}" for law, count in laws.most_common()))
    show(
        f"{killed} of {len(kills)} mutants caught; the slowest in {slowest.seconds:.1f} s "
        f"({slowest.mutant})"
    )
    return 0 if killed == len(kills) else 1


def _require() -> None:
    from .cli_conformance import require_hypothesis

    require_hypothesis()


def _ready(path: Path | None) -> None:
    from .cli_conformance import prepare

    prepare(path)


def _part(kind: PartKind, chosen: Chosen) -> tuple[type[Any], PartOptions]:
    """The class of a part, which may lie in the current directory, and its options."""
    from ..conformance.resolve import part_class
    from ..plugins.discovery import discover
    from ..plugins.selection import validate_options

    if ":" in chosen.name and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    part = part_class(discover(), kind, chosen.name)
    return part, validate_options(kind, part.name, part, _parsed(chosen))


def _parsed(chosen: Chosen) -> Mapping[str, Any]:
    from ..core.errors import ConfigError
    from .settings import NO_OBJECT, parse_json

    if chosen.options is None:
        return {}
    what = f"{chosen.flag} {chosen.options!r}"
    values = parse_json(chosen.options, what)
    if not isinstance(values, dict):
        raise ConfigError(f"{what} is wrong: {NO_OBJECT}")
    return values
