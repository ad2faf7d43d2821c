"""Compares two reports: what became better, worse, new or gone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape

from ..core.errors import ConfigError
from .report import plain
from .report_text import narrowing, percentage
from .results import PropertyResult, Report, Status

_Key = tuple[str, str]


@dataclass(frozen=True)
class Change:
    """One law on one variant whose status is not what it was.

    Attributes:
        law, variant: which one.
        old, new: the status before and now; None where the report does not have the law.
        reason: why it fails or is not claimed now; "" if it passes or is gone.
    """

    law: str
    variant: str
    old: Status | None
    new: Status | None
    reason: str = ""

    def __str__(self) -> str:
        words = [status.value if status else "not run" for status in (self.old, self.new)]
        where = f"{self.law}, {self.variant}" if self.variant else self.law
        reason = f" ({self.reason})" if self.reason else ""
        return f"{where}: {words[0]} -> {words[1]}{reason}"


@dataclass(frozen=True)
class ErrorChange:
    """The law and variant whose largest error changed most; errors are shares of their bound."""

    law: str
    variant: str
    old: float
    new: float

    def __str__(self) -> str:
        where = f"{self.law}, {self.variant}" if self.variant else self.law
        return f"{where}: {percentage(self.old)} -> {percentage(self.new)} of the bound"


@dataclass(frozen=True)
class ReportDiff:
    """What two reports of one suite differ in.

    Attributes:
        notes: what the reports differ in besides results, such as part, device, versions.
        better: laws that hold now and did not, or were not claimed.
        worse: laws that held and do not, are no longer claimed or no longer tried; and laws that
            fail now and were not claimed or not tried.
        changed: laws that failed and are now not claimed or not tried.
        new: laws and variants that only the new report has and that do not fail.
        gone: laws and variants that were not claimed and that only the old report has.
        covered: declared values that have examples now and had none.
        uncovered: declared values that have no example now and were not without one; and values
            that had examples and are no longer declared or tried.
        error_change: the largest change of a largest error; None if none changed.
        old_seconds, new_seconds: time that the laws took.
    """

    notes: tuple[str, ...]
    better: tuple[Change, ...]
    worse: tuple[Change, ...]
    changed: tuple[Change, ...]
    new: tuple[Change, ...]
    gone: tuple[Change, ...]
    covered: tuple[str, ...]
    uncovered: tuple[str, ...]
    error_change: ErrorChange | None
    old_seconds: float
    new_seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing became worse."""
        return not self.worse and not self.uncovered


def compare(old: Report, new: Report) -> ReportDiff:
    """What differs between two reports.

    Raises:
        ConfigError: they are of different suites.
    """
    if old.suite != new.suite:
        raise ConfigError(
            f"a report of the suite {old.suite!r} cannot be compared with one of the suite "
            f"{new.suite!r}: give two reports of one suite"
        )
    before, after = _by_key(old), _by_key(new)
    lists: dict[str, list[Change]] = {
        name: [] for name in ("better", "worse", "changed", "new", "gone")
    }
    for law, variant in dict.fromkeys([*before, *after]):
        was, now = before.get((law, variant)), after.get((law, variant))
        kind = _kind(was.status if was else None, now.status if now else None)
        if kind is not None:
            lists[kind].append(
                Change(
                    law,
                    variant,
                    was.status if was else None,
                    now.status if now else None,
                    now.reason if now else "",
                )
            )
    return ReportDiff(
        notes=tuple(_notes(old, new)),
        **{name: tuple(changes) for name, changes in lists.items()},
        covered=tuple(value for value in old.uncovered if _count(new, value)),
        uncovered=tuple(_uncovered(old, new)),
        error_change=_error_change(before, after),
        old_seconds=sum(result.seconds for result in old.results),
        new_seconds=sum(result.seconds for result in new.results),
    )


def diff_to_json(diff: ReportDiff) -> str:
    """JSON, indented. Keys are the attributes of the dataclasses and ``ok``."""
    return json.dumps({"ok": diff.ok, **plain(diff)}, indent=2, ensure_ascii=False)


def render_diff(diff: ReportDiff) -> RenderableType:
    """The differences for a ``rich`` console: first what the reports are of, last the verdict."""
    lines = [f"[yellow]{escape(note)}[/]" for note in diff.notes]
    headings = {
        "worse": ("Worse", "red", [*diff.worse, *(f"{one}: no example" for one in diff.uncovered)]),
        "better": (
            "Better",
            "green",
            [*diff.better, *(f"{one}: has examples now" for one in diff.covered)],
        ),
        "changed": ("No longer failing, but not passing", "yellow", diff.changed),
        "new": ("New", "green", diff.new),
        "gone": ("Gone", "yellow", diff.gone),
    }
    for title, colour, items in headings.values():
        if items:
            lines.append(f"\n[bold {colour}]{title}[/]")
            lines += [f"  {escape(str(item))}" for item in items]
    lines.append("")
    if diff.error_change is not None:
        lines.append(f"largest change of an error: {escape(str(diff.error_change))}")
    lines.append(f"time: {diff.old_seconds:.1f} s -> {diff.new_seconds:.1f} s")
    lines.append(
        "[bold green]nothing became worse[/]"
        if diff.ok
        else f"[bold red]{len(diff.worse) + len(diff.uncovered)} worse[/]"
    )
    return Group(*lines)


def _kind(old: Status | None, new: Status | None) -> str | None:
    """The list of a ``ReportDiff`` that a change belongs to; None if there is no change."""
    if old is new:
        return None
    if new is Status.FAILED or (old is Status.PASSED):
        return "worse"
    if old is None:
        return "new"
    if new is Status.PASSED:
        return "better"
    return "changed" if old is Status.FAILED else "gone"


def _by_key(report: Report) -> dict[_Key, PropertyResult]:
    return {(result.law, result.variant): result for result in report.results}


def _notes(old: Report, new: Report) -> Iterator[str]:
    """What a reader must know before comparing numbers, the weightiest first."""
    pairs = {
        "part": (old.part, new.part),
        "device": (old.device, new.device),
        "origin": (old.origin, new.origin),
        "profile": (old.profile, new.profile),
        "seed": (str(old.seed), str(new.seed)),
        "narrowed to": (narrowing(old) or "nothing", narrowing(new) or "nothing"),
    }
    for name in dict.fromkeys([*old.versions, *new.versions]):
        pairs[name] = (old.versions.get(name, "absent"), new.versions.get(name, "absent"))
    for name, (was, now) in pairs.items():
        if was != now:
            different = name in ("part", "device")
            yield f"{f'different {name}s' if different else name}: {was or '-'} -> {now or '-'}"


def _count(report: Report, name: str) -> int | None:
    """Examples of ``axis=value``; None if the report does not know the value."""
    axis, _, value = name.partition("=")
    return report.coverage.get(axis, {}).get(value)


def _uncovered(old: Report, new: Report) -> Iterator[str]:
    yield from (value for value in new.uncovered if _count(old, value) != 0)
    for axis, counts in old.coverage.items():
        for value, count in counts.items():
            if count and _count(new, f"{axis}={value}") is None:
                yield f"{axis}={value}"


def _error_change(
    before: dict[_Key, PropertyResult], after: dict[_Key, PropertyResult]
) -> ErrorChange | None:
    changes = []
    for key, was in before.items():
        now = after.get(key)
        if now is None or was.max_error is None or now.max_error is None:
            continue
        if was.max_error != now.max_error:
            changes.append(ErrorChange(*key, was.max_error, now.max_error))
    return max(changes, key=_size, default=None)


def _size(change: ErrorChange) -> float:
    size = abs(change.new - change.old)
    return math.inf if math.isnan(size) else size
