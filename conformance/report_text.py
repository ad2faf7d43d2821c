"""Reports for people: Markdown pages, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .report import from_json, to_json
from .results import PropertyResult, Report, Status

_COLOURS = {Status.PASSED: "green", Status.FAILED: "bold red", Status.NOT_CLAIMED: "dim"}
#: Values of an axis that a terminal shows one by one; more are summed up.
_FEW_VALUES = 8


@dataclass(frozen=True)
class _Grid:
    """Results by law and variant, both in the order in which they were tried."""

    variants: tuple[str, ...]
    rows: Mapping[str, Mapping[str, PropertyResult]]

    @staticmethod
    def of(results: Iterable[PropertyResult]) -> _Grid:
        variants: dict[str, None] = {}
        rows: dict[str, dict[str, PropertyResult]] = {}
        for result in results:
            variants[result.variant] = None
            rows.setdefault(result.law, {})[result.variant] = result
        return _Grid(tuple(variants), rows)

    @property
    def headings(self) -> list[str]:
        return [variant or "result" for variant in self.variants]


def verdict(report: Report) -> str:
    """``passed``, or what stands against it, in words."""
    failed = {result.law for result in report.results if result.status is Status.FAILED}
    against = []
    if failed:
        against.append(f"{_counted(len(failed), 'law')} failed")
    if report.uncovered:
        against.append(f"{_counted(len(report.uncovered), 'declared value')} without an example")
    return f"FAILED: {', '.join(against)}" if against else "passed"


def narrowing(report: Report) -> str:
    """What a run was narrowed to, such as ``head_size=64,128 dtype=float16``; ``""`` if nothing."""
    return " ".join(f"{axis}={','.join(values)}" for axis, values in report.only.items())


def to_markdown(report: Report) -> str:
    """The report as a Markdown page."""
    parts = [
        f"# {report.suite.capitalize()} conformance: `{report.part}`",
        "\n".join(f"- {name}: {value}" for name, value in _header(report)),
        "\n".join(_law_table(report)),
        *_markdown_failures(report),
        *_markdown_not_claimed(report),
        *_markdown_coverage(report),
        *_markdown_capabilities(report),
    ]
    return "\n\n".join(parts) + "\n"


def write_report(report: Report, json_file: Path | None, markdown_file: Path | None) -> None:
    """Write a report as JSON and as Markdown; None writes none.

    The page has the digits that the JSON has, so that the two files say the same.
    """
    text = to_json(report)
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    if markdown_file is not None:
        markdown_file.write_text(to_markdown(from_json(text)), encoding="utf-8")


def render(report: Report) -> RenderableType:
    """The report for a ``rich`` console: laws, coverage, failures, verdict."""
    return Group(
        law_table(report.results, f"{report.suite} conformance of {report.part}"),
        *([_coverage_table(report)] if report.coverage else []),
        *_failure_lines(report),
        _closing(report),
    )


def law_table(results: Iterable[PropertyResult], title: str) -> RenderableType:
    """One row per law, one column per variant, for a ``rich`` console."""
    grid = _Grid.of(results)
    table = Table()
    table.add_column("law", no_wrap=True)
    for heading in grid.headings:
        table.add_column(escape(heading), overflow="fold")
    for law, row in grid.rows.items():
        cells = []
        for variant in grid.variants:
            result = row.get(variant)
            colour = _COLOURS[result.status] if result else "dim"
            cells.append(f"[{colour}]{escape(_cell(result))}[/]")
        table.add_row(escape(law), *cells)
    # Not the table's own title, which would be wrapped to the width of the columns.
    return Group(f"[bold]{escape(title)}[/]", table)


def _header(report: Report) -> Iterator[tuple[str, str]]:
    yield "verdict", f"**{verdict(report)}**"
    yield "part", f"`{report.part}`" + (f" of {report.origin}" if report.origin else "")
    yield "device", report.device
    yield "versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield "profile", report.profile
    if report.only:
        yield "narrowed to", f"`{narrowing(report)}`"
    yield "seed", str(report.seed)
    yield "size", f"{_examples(report)} examples in {_seconds(report)}"
    if report.command:
        yield "command", f"`{report.command}`"


def _law_table(report: Report) -> Iterator[str]:
    grid = _Grid.of(report.results)
    yield "## Laws"
    yield ""
    if any(one.max_error is not None for one in report.results):
        yield "Errors are the largest seen, as a percentage of their bound."
        yield ""
    yield _row("law", *grid.headings)
    yield _row(*["---"] * (len(grid.variants) + 1))
    for law, row in grid.rows.items():
        title = next(iter(row.values())).title
        cells = [_cell(row.get(variant), bold=True) for variant in grid.variants]
        yield _row(f"`{law}`: {title}", *cells)


def _cell(result: PropertyResult | None, *, bold: bool = False) -> str:
    """``pass, 41% of the bound in 120 examples``, shortened."""
    if result is None:
        return "-"
    if result.status is Status.NOT_CLAIMED:
        return "not claimed"
    failed = result.status is Status.FAILED
    words = ["**FAIL**" if bold else "FAIL"] if failed else ["pass"]
    if result.max_error is not None:
        words.append(percentage(result.max_error))
    words.append(f"({result.examples})")
    return " ".join(words)


def percentage(share: float) -> str:
    """A share of a bound as a percentage, with two digits."""
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def _markdown_failures(report: Report) -> Iterator[str]:
    failures = [result for result in report.results if result.status is Status.FAILED]
    if failures:
        yield "## Failures"
    for result in failures:
        lines = [f"### `{result.law}`{f', {result.variant}' if result.variant else ''}", ""]
        lines += [result.title, "", *_fenced(result.reason)]
        if result.case:
            lines += ["", "Smallest case found:", "", *_fenced(result.case)]
        if result.reproducer:
            lines += ["", f"Reproducer: `{result.reproducer}`"]
        yield "\n".join(lines)


def _markdown_not_claimed(report: Report) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        if result.status is Status.NOT_CLAIMED:
            reasons.setdefault((result.law, result.reason), []).append(result.variant)
    if reasons:
        yield "## Not claimed"
        yield "\n".join(
            f"- `{law}`{_in_brackets(variants)}: {reason or 'no reason given'}"
            for (law, reason), variants in reasons.items()
        )


def _markdown_coverage(report: Report) -> Iterator[str]:
    if not report.coverage:
        return
    yield "## Coverage"
    yield "Examples with each declared value; an example counts once for every axis."
    lines = [_row("axis", "value (examples)"), _row("---", "---")]
    for axis, counts in report.coverage.items():
        values = [
            f"{value} ({count})" if count else f"**{value} (0)**" for value, count in counts.items()
        ]
        lines.append(_row(f"`{axis}`", ", ".join(values)))
    yield "\n".join(lines)


def _markdown_capabilities(report: Report) -> Iterator[str]:
    if report.capabilities:
        yield "## Declared"
        yield "\n".join(f"- `{name}`: {value}" for name, value in report.capabilities.items())


def _coverage_table(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for axis, counts in report.coverage.items():
        table.add_row(escape(axis), _coverage_cell(counts))
    return Group("\n[bold]Examples per declared value[/]", table)


def _coverage_cell(counts: Mapping[str, int]) -> str:
    missing = [
        f"[bold red]{escape(value)}: none[/]" for value, count in counts.items() if not count
    ]
    if len(counts) <= _FEW_VALUES:
        some = [f"{escape(value)}: {count}" for value, count in counts.items() if count]
        return ", ".join([*some, *missing])
    found = {value: count for value, count in counts.items() if count}
    if not found:
        return ", ".join(missing)
    rarest = min(found, key=lambda value: found[value])
    most = max(found.values())
    text = f"{' '.join(found)}: {found[rarest]} to {most} each, fewest with {rarest}"
    return ", ".join([escape(text), *missing])


def _failure_lines(report: Report) -> Iterator[RenderableType]:
    for result in report.results:
        if result.status is not Status.FAILED:
            continue
        where = f"{result.law}, {result.variant}" if result.variant else result.law
        yield f"\n[bold red]{escape(where)}[/]: {escape(result.title)}"
        yield f"  {escape(result.reason)}"
        if result.case:
            yield "  the smallest case found:"
            yield Padding(escape(result.case), (0, 0, 0, 4))
        if result.reproducer:
            yield f"  reproducer: {escape(result.reproducer)}"


def _closing(report: Report) -> str:
    colour = "green" if report.ok else "red"
    narrowed = f", narrowed to {narrowing(report)}" if report.only else ""
    text = (
        f"{verdict(report)} on {report.device}: {_examples(report)} examples in "
        f"{_seconds(report)} (profile {report.profile}, seed {report.seed}{narrowed})"
    )
    return f"\n[bold {colour}]{escape(text)}[/]"


def _examples(report: Report) -> int:
    return sum(result.examples for result in report.results)


def _seconds(report: Report) -> str:
    return f"{sum(result.seconds for result in report.results):.1f} s"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _in_brackets(variants: Iterable[str]) -> str:
    named = ", ".join(variant for variant in variants if variant)
    return f" ({named})" if named else ""


def _row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _fenced(text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]
