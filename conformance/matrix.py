"""What backends may claim, side by side: a table made of their reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ..core.errors import ConfigError
from .report_text import percentage
from .results import PropertyResult, Report, Status

#: The table stands between these lines of a page, and is replaced there.
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
#: What the built-in backends stand on; for others the distribution that they come from is named.
_LIBRARIES = {
    "flex": "torch",
    "torch_sdpa": "torch",
    "torch_varlen": "torch",
    "triton": "triton",
    "flash_attn": "flash-attn",
    "flash_attn_4": "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "xformers": "xformers",
    "xformers_cutlass": "xformers",
}
#: Said of what is declared by a report that does not count its examples: that of some laws only.
_NOT_COUNTED = "not counted"
_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Matrix:
    """A table.

    Attributes:
        columns: a heading for each report.
        rows: a name, and a cell for each report.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def matrix(reports: Sequence[Report]) -> Matrix:
    """The table of some reports on attention backends, a column each, in their order.

    A capability is a ``yes`` only if it is declared and all laws that are about it passed. What is
    declared and failed is said to fail; what is declared and has no example, not to be tried. Of
    sizes that a report was narrowed in, those that were tried stand beside what is declared.

    Raises:
        ConfigError: there is no report, one is about something else, or two are of one backend on
            one device.
    """
    if not reports:
        raise ConfigError("the matrix needs at least one report")
    for report in reports:
        if report.suite != "attention":
            raise ConfigError(
                f"the matrix is of attention backends; the report on {report.part!r} is of the "
                f"suite {report.suite!r}"
            )
    headings = tuple(report.part for report in reports)
    if len(set(headings)) < len(headings):
        headings = tuple(f"{report.part} on {report.device}" for report in reports)
    if len(set(headings)) < len(headings):
        raise ConfigError(
            f"two reports are of one backend on one device: {', '.join(headings)}; give one of them"
        )
    rows = tuple((name, tuple(cell(report) for report in reports)) for name, cell in _ROWS.items())
    return Matrix(headings, rows)


def to_markdown(table: Matrix) -> str:
    """The table as Markdown."""
    lines = [
        _line("", *(f"`{name}`" for name in table.columns)),
        _line(*["---"] * (len(table.columns) + 1)),
        *(_line(name, *cells) for name, cells in table.rows),
    ]
    return "\n".join(lines) + "\n"


def inserted(page: str, block: str) -> str | None:
    """A page with the block between the two markers; None if the page does not have them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return None
    return f"{before}{BEGIN}\n\n{block}\n{END}{after}"


def render(table: Matrix) -> RenderableType:
    """The table for a ``rich`` console."""
    grid = Table()
    grid.add_column("")
    for name in table.columns:
        grid.add_column(escape(name), overflow="fold")
    for name, cells in table.rows:
        grid.add_row(escape(name), *(escape(cell.replace("**", "")) for cell in cells))
    return grid


def _declared(name: str) -> Callable[[Report], str]:
    """What is declared, in the words of the report."""

    def cell(report: Report) -> str:
        return report.capabilities.get(name, "?")

    return cell


def _sizes(name: str, axis: str) -> Callable[[Report], str]:
    """Sizes that are declared, and those that were tried, if that was not all that can be."""

    def cell(report: Report) -> str:
        declared = report.capabilities.get(name, "?")
        if not report.coverage:
            return f"{declared}; tried: {', '.join(report.only.get(axis, (_NOT_COUNTED,)))}"
        counted = report.coverage.get(axis, {})
        tried = [value for value, examples in counted.items() if examples]
        if axis not in report.only and tried and len(tried) == len(counted):
            return declared
        return f"{declared}; tried: {', '.join(tried) or 'none'}"

    return cell


def _dtypes(name: str, axis: str) -> Callable[[Report], str]:
    """Dtypes that are declared, wide ones first; those without an example stand apart."""

    def cell(report: Report) -> str:
        declared = sorted(report.capabilities.get(name, "?").split(", "), key=_dtype_order)
        if not report.coverage:
            return f"{', '.join(declared)}; tried: {_NOT_COUNTED}"
        counted = report.coverage.get(axis, {})
        tried = [dtype for dtype in declared if counted.get(dtype)]
        untried = [dtype for dtype in declared if not counted.get(dtype)]
        parts = [", ".join(tried)] if tried else []
        if untried:
            parts.append(f"declared, not tried: {', '.join(untried)}")
        return "; ".join(parts)

    return cell


def _dtype_order(name: str) -> tuple[int, str]:
    return (_DTYPES.index(name) if name in _DTYPES else len(_DTYPES), name)


def _proved(name: str, *laws: str) -> Callable[[Report], str]:
    """A switch that is declared, and the laws that are about it."""

    def cell(report: Report) -> str:
        said = report.capabilities.get(name, "?")
        if said != "yes":
            return said
        results = [one for one in report.results if one.law in laws]
        if any(one.status is Status.FAILED for one in results):
            return "**fails**"
        missing = [
            law
            for law in laws
            if not any(one.law == law and one.status is Status.PASSED for one in results)
        ]
        return f"declared, not tried ({', '.join(missing)})" if missing else "yes"

    return cell


def _exercised(name: str, axis: str, value: str) -> Callable[[Report], str]:
    """A feature of a layer: declared, right in the law ``meaning``, and among its examples.

    Args:
        name: of the capability.
        axis: of the coverage, which tells whether an example had the feature.
        value: that the feature has there; "" if any is evidence.
    """
    proved = _proved(name, "meaning")

    def cell(report: Report) -> str:
        text = proved(report)
        if text != "yes":
            return text
        counted = report.coverage.get(axis, {})
        if not counted:
            return f"yes, {_NOT_COUNTED}"
        values = [value] if value else [one for one in counted if one != "as head_size"]
        return text if any(counted.get(one) for one in values) else "declared, not tried"

    return cell


def _library(report: Report) -> str:
    name = _LIBRARIES.get(report.part, "")
    if report.origin.startswith("jackfield ") and name in report.versions:
        torch = "" if name == "torch" else f", torch {report.versions.get('torch', '?')}"
        return f"{name} {report.versions[name]}{torch}"
    return report.origin or "?"


def _laws(report: Report) -> str:
    by_law: dict[str, list[PropertyResult]] = {}
    for one in report.results:
        by_law.setdefault(one.law, []).append(one)
    passed = failed = not_claimed = 0
    for results in by_law.values():
        statuses = {one.status for one in results}
        if Status.FAILED in statuses:
            failed += 1
        elif Status.PASSED in statuses:
            passed += 1
        else:
            not_claimed += 1
    words = [f"{passed} passed"]
    if failed:
        words.insert(0, f"**{failed} failed**")
    if not_claimed:
        words.append(f"{not_claimed} not claimed")
    return ", ".join(words)


def _worst(report: Report) -> str:
    measured = [one for one in report.results if one.max_error is not None]
    if not measured:
        return "-"
    worst = max(measured, key=lambda one: one.max_error or 0.0)
    share = percentage(worst.max_error or 0.0).replace("%", " %")
    return f"{share} (`{worst.law}`, {worst.variant})" if worst.variant else share


def _examples(report: Report) -> str:
    return f"{sum(one.examples for one in report.results):,}"


def _size(report: Report) -> str:
    narrowed = ", narrowed" if report.only else ""
    return f"{report.device}; {report.profile}{narrowed}"


_ROWS: dict[str, Callable[[Report], str]] = {
    "library": _library,
    "tried on": _size,
    "dtypes": _dtypes("dtypes", "dtype"),
    "cache dtypes": _dtypes("kv_dtypes", "kv_dtype"),
    "cache of another dtype than the query": _exercised(
        "different_kv_dtype", "different_kv_dtype", "on"
    ),
    "head sizes": _sizes("head_sizes", "head_size"),
    "value head of another size": _exercised("different_v_head_size", "v_head_size", ""),
    "group sizes": _sizes("group_sizes", "group_size"),
    "block sizes": _sizes("block_sizes", "block_size"),
    "not causal": _exercised("non_causal", "causal", "off"),
    "sliding window": _exercised("sliding_window", "sliding_window", "on"),
    "soft cap": _exercised("logits_soft_cap", "logits_soft_cap", "on"),
    "ALiBi": _exercised("alibi", "alibi", "on"),
    "sinks": _exercised("sinks", "sinks", "on"),
    "LSE": _proved("lse", "lse"),
    "mixed batches": _exercised("mixed_batches", "batch", "mixed"),
    "CUDA graphs": _proved("cuda_graphs", "plan_into"),
    "batch invariant": _proved("batch_invariant", "alone_or_together"),
    "safe from NaN in unseen slots": _proved("nonfinite_safe", "nonfinite_slots"),
    "equal bits not claimed": _declared("not_bitwise"),
    "laws": _laws,
    "examples": _examples,
    "largest error, of its bound": _worst,
}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
