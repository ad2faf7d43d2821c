"""Tells which plugins are installed and what each registers, without importing any part."""

from __future__ import annotations

from dataclasses import dataclass

from .discovery import PluginHost
from .registry import Origin


@dataclass(frozen=True)
class PluginRow:
    """One installed plugin.

    Attributes:
        origin: its entry point and distribution.
        status: ``loaded``, ``failed``, or ``left out`` by ``JACKFIELD_PLUGINS``.
        api_version: the plugin API that it was written for; None unless loaded.
        parts: what it registered, as ``(kind, name, target)``.
        observers: the observer hooks that it implements.
        reason: why it failed.
        traceback: what was raised, as text.
    """

    origin: Origin
    status: str
    api_version: str | None = None
    parts: tuple[tuple[str, str, str], ...] = ()
    observers: tuple[str, ...] = ()
    reason: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class PluginReport:
    """All installed plugins.

    Attributes:
        plugins: in the order of loading, then the failed ones, then those left out.
        conflicts: names that several plugins claim, one sentence each.
    """

    plugins: tuple[PluginRow, ...]
    conflicts: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every plugin is loaded and no name is contested."""
        return not self.conflicts and all(row.status != "failed" for row in self.plugins)


def plugin_report(host: PluginHost) -> PluginReport:
    """What is installed, without importing any part."""
    rows = [
        PluginRow(
            plugin.origin,
            "loaded",
            plugin.api_version,
            tuple((part.kind.value, part.name, part.path) for part in plugin.parts),
            plugin.observers,
        )
        for plugin in host.plugins.values()
    ]
    rows += [
        PluginRow(one.origin, "failed", reason=one.reason, traceback=one.traceback)
        for one in host.failures.values()
    ]
    rows += [PluginRow(Origin(name), "left out") for name in host.left_out]
    conflicts = tuple(host.registry.conflict(*key) for key in host.registry.conflicts())
    return PluginReport(tuple(rows), conflicts)
