"""How far backends are from each other and from float64: plain data, JSON and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .report import plain
from .report_text import percentage

#: Rises when a file can no longer be read by what read it before.
FORMAT = 1


def worse(share: float, other: float) -> bool:
    """Whether an error is worse than another one: larger, or NaN while the other is a number."""
    return not math.isnan(other) and not share <= other


@dataclass(frozen=True)
class Member:
    """A backend of the comparison.

    Attributes:
        name: of the backend.
        origin: the distribution that provides it, or "".
        block_sizes: those that it computed with.
        error: its largest error to float64 as a share of the bound.
        worst_case: the batch with it, in words; "" if no error was measured.
        batches: how many it computed.
        failures: batches in which it raised something.
        failure: the first of these, with its batch; "" if there is none.
    """

    name: str
    origin: str
    block_sizes: tuple[int, ...] = ()
    error: float = 0.0
    worst_case: str = ""
    batches: int = 0
    failures: int = 0
    failure: str = ""

    def joined(self, other: Member) -> Member:
        """With what another process found about the same backend, on other batches."""
        worst = other if worse(other.error, self.error) else self
        return Member(
            name=self.name,
            origin=self.origin,
            block_sizes=tuple(sorted({*self.block_sizes, *other.block_sizes})),
            error=worst.error,
            worst_case=worst.worst_case,
            batches=self.batches + other.batches,
            failures=self.failures + other.failures,
            failure=self.failure or other.failure,
        )


@dataclass(frozen=True)
class Pair:
    """Two backends.

    Attributes:
        first, second: their names, in the order of the members.
        difference: their largest difference as a share of the sum of both error bounds.
        worst_case: the batch with it, in words; "" if they never differ.
        batches: how many both computed.
        equal: in how many of these all bits of the output are the same.
    """

    first: str
    second: str
    difference: float = 0.0
    worst_case: str = ""
    batches: int = 0
    equal: int = 0

    def joined(self, other: Pair) -> Pair:
        """With what another process found about the same backends, on other batches."""
        worst = other if worse(other.difference, self.difference) else self
        return Pair(
            first=self.first,
            second=self.second,
            difference=worst.difference,
            worst_case=worst.worst_case,
            batches=self.batches + other.batches,
            equal=self.equal + other.equal,
        )


@dataclass(frozen=True)
class PairwiseReport:
    """One comparison.

    Attributes:
        command: what was typed.
        device: where it ran, with the device's name.
        versions: of Python, torch, Jackfield and the libraries that matter.
        seed: of the batches.
        scale: size of the batches.
        axes: what batches varied in: what all backends declare, narrowed as asked for.
        batches, rows, elements: what was compared: batches, query rows, numbers of the output.
        skipped: batches left out, by backend that refuses the layer although it declares its parts.
        members, pairs: what was found.
        seconds: of the run.
    """

    command: str
    device: str
    versions: Mapping[str, str]
    seed: int
    scale: str
    axes: Mapping[str, tuple[str, ...]]
    batches: int
    rows: int
    elements: int
    members: tuple[Member, ...]
    pairs: tuple[Pair, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every error and every difference is within its bound, and nothing failed."""
        return (
            self.batches > 0
            and all(one.error <= 1 and not one.failures for one in self.members)
            and all(one.difference <= 1 for one in self.pairs)
        )

    def pair(self, one: str, other: str) -> Pair | None:
        """What was found about two backends, in either order; None for a backend and itself."""
        for pair in self.pairs:
            if {pair.first, pair.second} == {one, other}:
                return pair
        return None


def to_json(report: PairwiseReport) -> str:
    """The report as JSON; numbers have four digits."""
    content = {"format": FORMAT, "ok": report.ok, **plain(report)}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def render(report: PairwiseReport) -> RenderableType:
    """The tables for a ``rich`` console."""
    table = Table()
    table.add_column("", no_wrap=True)
    for name in [*(one.name for one in report.members), "float64"]:
        table.add_column(escape(name), justify="right", overflow="fold")
    for name, cells in _rows(report):
        table.add_row(escape(name), *(_coloured(cell) for cell in cells))
    lines = ["[bold]Largest differences[/], of the sum of both bounds; in the last column of one"]
    parts: list[RenderableType] = [*lines, table]
    parts += [escape(line) for line in _words(report)]
    parts += [f"[red]{escape(line)}[/]" for line in _faults(report)]
    verdict = "[bold green]within the bounds[/]" if report.ok else "[bold red]NOT within[/]"
    parts.append(f"\n{verdict} on {escape(report.device)}")
    return Group(*parts)


def to_markdown(report: PairwiseReport) -> str:
    """The report as a page."""
    names = [one.name for one in report.members]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"# {' and '.join(names) if len(names) == 2 else 'Attention backends'} side by side",
        "",
        f"- verdict: **{'within the bounds' if report.ok else 'NOT within the bounds'}**",
        f"- device: {report.device}",
        f"- versions: {versions}",
        f"- batches: {'; '.join(_words(report))}",
        f"- command: `{report.command}`",
        "",
        "Largest difference between two backends, as a percentage of the sum of both error bounds; "
        "in the last column the largest error to float64, of one bound.",
        "",
        _line("", *(f"`{name}`" for name in names), "float64"),
        _line(*["---"] * (len(names) + 2)),
        *(_line(f"`{name}`", *cells) for name, cells in _rows(report)),
        "",
        "Batches in which all bits are the same:",
        "",
        *(
            f"- `{one.first}` and `{one.second}`: {one.equal:,} of {one.batches:,}"
            for one in report.pairs
        ),
        "",
        "What batches varied in:",
        "",
        *(f"- `{axis}`: {', '.join(values)}" for axis, values in report.axes.items()),
    ]
    faults = list(_faults(report))
    if faults:
        lines += ["", "Beyond the bound:", "", *(f"- {' '.join(one.split())}" for one in faults)]
    return "\n".join(lines) + "\n"


def _rows(report: PairwiseReport) -> Iterator[tuple[str, list[str]]]:
    for one in report.members:
        cells = []
        for other in report.members:
            pair = report.pair(one.name, other.name)
            cells.append("-" if pair is None else _cell(pair.difference, pair.batches))
        yield one.name, [*cells, _cell(one.error, one.batches)]


def _cell(share: float, batches: int) -> str:
    if not batches:
        return "none"
    return f"**{percentage(share)}**" if not share <= 1 else percentage(share)


def _coloured(cell: str) -> str:
    plain_cell = cell.strip("*")
    return f"[bold red]{plain_cell}[/]" if cell != plain_cell else plain_cell


def _words(report: PairwiseReport) -> Iterator[str]:
    yield (
        f"{_counted(report.batches, 'batch')} ({report.scale} cases, seed {report.seed}), "
        f"{report.rows:,} query rows, {report.elements:,} numbers"
    )
    sizes = {one.name: ", ".join(map(str, one.block_sizes)) for one in report.members}
    if len(set(sizes.values())) > 1:
        # Else they are the axis.
        yield "block sizes: " + "; ".join(f"{name} {listed}" for name, listed in sizes.items())
    for name, count in report.skipped.items():
        yield f"{_counted(count, 'batch')} left out, since {name} refuses them"


def _faults(report: PairwiseReport) -> Iterator[str]:
    for one in report.members:
        if one.failures:
            yield f"{one.name} failed in {_counted(one.failures, 'batch')}, first: {one.failure}"
        if not one.error <= 1:
            share = percentage(one.error)
            yield f"{one.name} is off by {share} of the bound from float64: {one.worst_case}"
    for pair in report.pairs:
        if not pair.difference <= 1:
            yield (
                f"{pair.first} and {pair.second} differ by {percentage(pair.difference)} of both "
                f"bounds: {pair.worst_case}"
            )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}es"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
