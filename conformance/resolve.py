"""From the name that a user types to the class of a part."""

from __future__ import annotations

from typing import Any

from ..plugins.discovery import PluginHost
from ..plugins.registry import Origin, PartEntry, PartKind
from ..plugins.selection import find_part


def part_class(host: PluginHost, kind: PartKind, name: str) -> type[Any]:
    """The class of a part.

    Args:
        host: the installed plugins.
        kind: what it is.
        name: its registered name; or ``package.module:Class``, for a part that no plugin registers
            yet.

    Raises:
        PluginError: the name is unknown or contested, or the class cannot be loaded.
    """
    if ":" not in name:
        return find_part(host, kind, name).load()
    origin = Origin("the command line")
    cls = PartEntry(kind, "unregistered", name, origin).import_class()
    own_name = str(getattr(cls, "name", "unregistered"))
    return PartEntry(kind, own_name, name, origin).load()
