"""Results for people: tables for a terminal of 100 columns, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from ...conformance.report_text import percentage
from .results import BackendResult, BenchReport, CaseRecord, DirectResult, Timing, Verdict

#: Heading, and how many characters it may take at least.
_COLUMNS = (
    ("block", 5),
    ("us", 8),
    ("graph us", 8),
    ("rate", 11),
    ("ceiling", 7),
    ("ratio", 6),
    ("host us", 7),
    ("plan us", 7),
    ("error", 5),
)
_COLOURS = {Verdict.WRONG: "bold red", Verdict.FAILED: "red", Verdict.REFUSED: "dim"}
_WORDS = {
    Verdict.WRONG: "is WRONG and not timed",
    Verdict.FAILED: "failed",
    Verdict.REFUSED: "refuses it",
}
#: A line of a terminal holds so many characters of a reason, about.
_REASON = 300


def render(report: BenchReport) -> RenderableType:
    """The whole report for a ``rich`` console."""
    parts: list[RenderableType] = [escape(line) for line in header(report)]
    everywhere = _refused_everywhere(report)
    for case in report.cases:
        parts += ["", *_case(report, case, everywhere)]
    parts.append("")
    parts += [
        _note(Verdict.REFUSED, name, reasons, "refuses all cases")
        for name, reasons in everywhere.items()
    ]
    parts += [
        _note(Verdict.REFUSED, name, [reason], "does not run here")
        for name, reason in report.unavailable.items()
    ]
    faults = len(list(report.faults))
    if faults:
        parts.append(f"[bold red]{faults} wrong or failed, see above[/]")
    parts.append(f"{report.seconds:.0f} s")
    return Group(*parts)


def header(report: BenchReport) -> Iterator[str]:
    """What was run on what, and its ceilings."""
    settings = report.settings
    shown = ("torch", "triton", "flash-attn", "flash-attn-4", "flashinfer-python", "xformers")
    versions = ", ".join(f"{one} {report.versions[one]}" for one in shown if one in report.versions)
    yield f"{report.device}; {versions}"
    other = settings.kv_cache_dtype != settings.dtype
    dtypes = f"{settings.dtype}, cache {settings.kv_cache_dtype}" if other else settings.dtype
    caches = "caches are warm" if settings.cache == "warm" else "the L2 cache has none of the data"
    yield f"{dtypes}; blocks in random order; {caches}"
    if report.ceilings is not None:
        ceilings = report.ceilings
        yield (
            f"ceilings: copy {rate(ceilings.copy, 'B/s')}, read {rate(ceilings.read, 'B/s')}, "
            f"matmul {rate(ceilings.matmul, 'FLOP/s')}"
        )


def rate(value: float, unit: str) -> str:
    """``4.16 TB/s`` or ``701 TFLOP/s``: with a prefix, and three digits."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{_three(value / factor)} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def microseconds(value: float | None) -> str:
    """A time with at least three digits; ``-`` if there is none."""
    return "-" if value is None else _three(value)


def share(value: float | None) -> str:
    """A share in per cent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def _error(value: float | None) -> str:
    return "-" if value is None else percentage(value)


def _note(verdict: Verdict, name: str, reasons: Iterable[str], word: str = "") -> str:
    text = f"{name} {word or _WORDS[verdict]}: {shortened('; '.join(reasons))}"
    return f"[{_COLOURS[verdict]}]{escape(text)}[/]"


def case_rate(case: CaseRecord, result: BackendResult) -> str:
    """Bytes or FLOPs a second, whichever the case is limited by."""
    if case.limit == "read":
        return "-" if result.bytes_per_s is None else rate(result.bytes_per_s, "B/s")
    return "-" if result.flops_per_s is None else rate(result.flops_per_s, "FLOP/s")


def _refused_everywhere(report: BenchReport) -> dict[str, tuple[str, ...]]:
    """Backends that refuse every case for the same reasons, with these."""
    found: dict[str, set[tuple[str, ...] | None]] = {}
    for one in report.results:
        refused = one.verdict is Verdict.REFUSED
        found.setdefault(one.backend, set()).add(one.reasons if refused else None)
    several = len(report.cases) > 1
    return {
        name: reasons
        for name, (reasons, *others) in found.items()
        if several and reasons is not None and not others
    }


def _case(
    report: BenchReport, case: CaseRecord, hidden: Mapping[str, object]
) -> Iterator[RenderableType]:
    rows = "all" if case.rows_checked == case.num_tokens else f"{case.rows_checked} of"
    yield (
        f"[bold]{escape(case.name)}[/]  ceiling: {case.limit}; error: of {rows} {case.num_tokens} "
        "rows, as a share of the bound"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("backend", overflow="fold", min_width=12)
    for name, width in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    notes: list[str] = []
    timed = False
    for result in report.of_case(case.name):
        if result.verdict is Verdict.TIMED and result.timing is not None:
            timed = True
            table.add_row(escape(result.backend), *_cells(case, result, result.timing))
            _add_direct(table, result.backend, result.timing, result.direct, notes)
        elif result.backend not in hidden:
            notes.append(_note(result.verdict, result.backend, result.reasons))
    if case.dense is not None:
        timed = True
        _add_call(table, case.dense, notes)
    if timed:
        yield Padding(table, (0, 0, 0, 2))
    for note in notes:
        yield Padding(note, (0, 0, 0, 2))


def _cells(case: CaseRecord, result: BackendResult, timing: Timing) -> Iterator[str]:
    yield str(result.block_size)
    yield microseconds(timing.device_us)
    yield microseconds(timing.graph_us)
    yield case_rate(case, result)
    yield share(result.share)
    yield "-" if result.ratio is None else f"{result.ratio:.2f}"
    yield microseconds(timing.host_us)
    yield microseconds(result.plan_host_us)
    yield _error(result.error)


def _add_direct(
    table: Table, backend: str, timing: Timing, direct: DirectResult | None, notes: list[str]
) -> None:
    if direct is None:
        return
    if direct.verdict is Verdict.REFUSED:
        notes.append(f"[dim]{escape(f'no direct call: {direct.reason}')}[/]")
        return
    _add_call(table, direct, notes)
    if direct.timing is not None:
        notes.append(escape(overhead(backend, timing, direct.name, direct.timing)))


def _add_call(table: Table, direct: DirectResult, notes: list[str]) -> None:
    timing = direct.timing
    if timing is None:
        notes.append(_note(direct.verdict, direct.name, (direct.reason,)))
        return
    table.add_row(
        escape(f"  {direct.name}"),
        "",
        microseconds(timing.device_us),
        microseconds(timing.graph_us),
        "",
        "",
        "",
        microseconds(timing.host_us),
        "",
        _error(direct.error),
        style="dim",
    )


def overhead(backend: str, timing: Timing, name: str, direct: Timing) -> str:
    """What a backend adds to the call that it makes; like with like, graph with graph."""
    device = timing.device_us - direct.device_us
    how = ""
    if timing.graph_us is not None and direct.graph_us is not None:
        device, how = timing.graph_us - direct.graph_us, " in a graph"
    return (
        f"{backend} adds {device:+.1f} us{how} on the device and "
        f"{timing.host_us - direct.host_us:+.0f} us on the host to {name}"
    )


def shortened(text: str) -> str:
    """In one line, and no longer than a few lines of a terminal."""
    line = " ".join(text.split())
    return line if len(line) <= _REASON else f"{line[: _REASON - 3]}..."


def to_markdown(report: BenchReport) -> str:
    """One table: a row for each case and each backend that was timed, the fastest first."""
    head = ("case", "backend", "block", "time, us", "rate", "of the ceiling", "ratio", "plan, us")
    lines = [_row(head), _row(("---", "---", *["---:"] * 6))]
    for case in report.cases:
        for one in report.of_case(case.name):
            if one.timing is not None:
                lines.append(_row(_markdown_cells(case, one, one.timing)))
        if case.dense is not None and case.dense.timing is not None:
            took = case.dense.timing.best_us
            cells = (f"`{case.name}`", case.dense.name, "-", microseconds(took), *["-"] * 4)
            lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _markdown_cells(case: CaseRecord, one: BackendResult, timing: Timing) -> Iterator[str]:
    yield f"`{case.name}`"
    yield f"`{one.backend}`"
    yield str(one.block_size)
    yield microseconds(timing.best_us)
    yield case_rate(case, one)
    yield share(one.share)
    yield "-" if one.ratio is None else f"{one.ratio:.2f}"
    yield microseconds(one.plan_host_us)


def _row(cells: tuple[str, ...] | Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"
