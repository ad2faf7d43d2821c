"""Prints what ``explain`` found: as tables for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from enum import Enum
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .explain import Explanation, PartVerdict, Verdict
from .explain_plugins import PluginReport, PluginRow
from .validation import FieldHelp

_COLOURS = {
    Verdict.CHOSEN: "bold green",
    Verdict.USABLE: "green",
    Verdict.REFUSED: "yellow",
    Verdict.BROKEN: "red",
}


def render_text(report: Explanation | PluginReport, width: int = 100) -> str:
    """The tables as plain text.

    Args:
        report: what to show.
        width: columns.
    """
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable(report))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def renderable(report: Explanation | PluginReport) -> RenderableType:
    """The tables for a ``rich`` console, with colours."""
    if isinstance(report, PluginReport):
        return _plugins(report)
    return _explanation(report)


def to_json(report: Explanation | PluginReport) -> str:
    """JSON, indented. Keys are the attributes of the report's dataclasses and ``ok``; enums are
    their values."""
    return json.dumps({"ok": report.ok, **_plain(report)}, indent=2, default=str)


def _explanation(report: Explanation) -> RenderableType:
    summary = Table.grid(padding=(0, 2))
    rows = {
        "architecture": report.architecture,
        "device": report.device,
        "dtype": ", ".join(report.dtypes),
        "block size": "none" if report.block_size is None else str(report.block_size),
        "attention": "\n".join([*report.attention, *([report.note] if report.note else [])]),
    }
    for name, value in rows.items():
        summary.add_row(name, escape(value))
    parts = _table("Parts", "kind", "name", "verdict", "why", "origin")
    for part in report.parts:
        parts.add_row(*_part_cells(part))
    options = _table("Options", "part", "option", "default", "values and meaning")
    for column in options.columns[:2]:
        column.no_wrap = True
    for part in report.parts:
        for option in part.options:
            options.add_row(*_option_cells(part, option))
    settings = _table("Settings", "setting", "value", "from")
    for setting in report.settings:
        settings.add_row(setting.name, escape(str(setting.value)), escape(setting.origin))
    return Group(
        summary,
        parts,
        options,
        settings,
        *_lines("Plugins that failed to load", report.failures),
        *_lines("An engine with these settings would not start", report.problems),
    )


def _part_cells(part: PartVerdict) -> Iterable[str]:
    why = list(part.reasons)
    if part.elsewhere is not None:
        why += part.elsewhere.lines()
    why += [f"conformance: {line}" for line in part.conformance]
    colour = _COLOURS[part.verdict]
    return (
        part.kind.label,
        escape(part.name),
        f"[{colour}]{part.verdict.value}[/]",
        escape("\n".join(why)),
        escape(str(part.origin)),
    )


def _option_cells(part: PartVerdict, option: FieldHelp) -> Iterable[str]:
    default = "required" if option.default is None else option.default
    meaning = f"{option.allowed}: {option.description}"
    return map(escape, (part.name, option.name, default, meaning))


def _plugins(report: PluginReport) -> RenderableType:
    table = _table("Plugins", "plugin", "status", "API", "provides")
    for row in report.plugins:
        status = "[red]failed[/]" if row.status == "failed" else row.status
        table.add_row(
            escape(str(row.origin)), status, row.api_version or "", escape(_provides(row))
        )
    tracebacks = [row.traceback for row in report.plugins if row.traceback]
    return Group(
        table, *_lines("Tracebacks", tracebacks), *_lines("Contested names", report.conflicts)
    )


def _provides(row: PluginRow) -> str:
    if row.reason:
        return row.reason
    parts = [f"{kind.replace('_', ' ')} {name}" for kind, name, _ in row.parts]
    return "\n".join([*parts, *(f"observer {hook}" for hook in row.observers)])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _lines(title: str, texts: Iterable[str]) -> list[RenderableType]:
    lines = [escape(text) for text in texts]
    return [f"\n[bold]{title}[/]", *lines] if lines else []


def _plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as what JSON has."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
