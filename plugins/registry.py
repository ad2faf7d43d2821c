"""Who registered which part: entries by kind and name, loaded only when they are needed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from ..core.errors import PluginError
from ..core.options import PartOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
RESERVED_NAMES = frozenset({"auto", "none"})


class PartKind(Enum):
    """The kinds of parts; a value is the setting that asks for a part of the kind."""

    ATTENTION_BACKEND = "attention_backend"
    SCHEDULER = "scheduler"
    SCHEDULING_POLICY = "scheduling_policy"
    BLOCK_MANAGER = "block_manager"
    MODEL = "model"

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.value.replace("_", " ")

    @property
    def plural(self) -> str:
        """The kind in words, several of them."""
        return self.hook.removeprefix("jackfield_").replace("_", " ")

    @property
    def hook(self) -> str:
        """The hook that registers parts of this kind."""
        if self is PartKind.SCHEDULING_POLICY:
            return "jackfield_scheduling_policies"
        return f"jackfield_{self.value}s"

    def contract(self) -> type:
        """The class that every part of this kind is a subclass of."""
        if self is PartKind.ATTENTION_BACKEND:
            from ..core.attention import AttentionBackend

            return AttentionBackend
        if self is PartKind.SCHEDULER:
            from ..core.scheduler import Scheduler

            return Scheduler
        if self is PartKind.SCHEDULING_POLICY:
            from ..core.scheduling_policy import SchedulingPolicy

            return SchedulingPolicy
        if self is PartKind.BLOCK_MANAGER:
            from ..core.block_manager import BlockManager

            return BlockManager
        from ..core.model import Model

        return Model


@dataclass(frozen=True)
class Origin:
    """Where a part comes from.

    Attributes:
        plugin: name of the entry point.
        distribution: the installed distribution that declares it; None if unknown.
        version: of the distribution; None if unknown.
    """

    plugin: str
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        if self.distribution is None:
            return self.plugin
        version = f" {self.version}" if self.version else ""
        return f"{self.plugin} ({self.distribution}{version})"


@dataclass(frozen=True)
class PartEntry:
    """One registered part.

    Attributes:
        kind: what it is.
        name: what users ask for.
        target: ``"package.module:ClassName"``, or the class itself.
        origin: who registered it.
    """

    kind: PartKind
    name: str
    target: str | type
    origin: Origin

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(
                f"{self.kind.label} name {self.name!r} is malformed: use letters, digits, '_', "
                "'-' and '.', beginning with a letter or digit"
            )
        if self.name in RESERVED_NAMES:
            raise PluginError(
                f"{self.kind.label} name {self.name!r} is reserved: it means something else as "
                f"a value of the setting {self.kind.value}"
            )
        if isinstance(self.target, str):
            well_formed = _TARGET.fullmatch(self.target) is not None
        else:
            well_formed = isinstance(self.target, type)
        if not well_formed:
            raise PluginError(
                f"target {self.target!r} of {self.kind.label} {self.name!r} is malformed: give "
                "'package.module:ClassName' or the class"
            )

    @property
    def path(self) -> str:
        """The target as ``package.module:ClassName``."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{self.target.__qualname__}"

    def load(self) -> type[Any]:
        """Import the class and check that it is what it was registered as.

        Raises:
            PluginError: it cannot be imported, is no finished subclass of the contract class, or
                calls itself by another name. The cause of a failed import is chained.
        """
        cls = self.import_class()
        contract = self.kind.contract()
        if not (isinstance(cls, type) and issubclass(cls, contract)):
            raise self._error(f"it is no subclass of {contract.__module__}.{contract.__qualname__}")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise self._error(f"it does not implement {missing}")
        if self.kind is PartKind.MODEL:
            return cls
        own_name = getattr(cls, "name", None)
        if own_name != self.name:
            raise self._error(f"its class attribute name is {own_name!r}, not {self.name!r}")
        options = getattr(cls, "Options", None)
        if not (isinstance(options, type) and issubclass(options, PartOptions)):
            raise self._error(f"its Options, {options!r}, is no subclass of PartOptions")
        return cls

    def import_class(self) -> Any:
        """The target, whatever it is.

        Raises:
            PluginError: it cannot be imported.
        """
        if not isinstance(self.target, str):
            return self.target
        module_name, _, attributes = self.target.partition(":")
        try:
            found: Any = import_module(module_name)
            for attribute in attributes.split("."):
                found = getattr(found, attribute)
        except (Exception, SystemExit) as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        return found

    def _error(self, what: str) -> PluginError:
        return PluginError(
            f"{self.kind.label} {self.name!r} of plugin {self.origin} cannot be used: "
            f"{self.path}: {what}"
        )


class Registry:
    """Parts by kind and name. A plugin's parts enter all together or not at all."""

    def __init__(self) -> None:
        self._entries: dict[tuple[PartKind, str], PartEntry] = {}
        self._claims: dict[tuple[PartKind, str], tuple[PartEntry, ...]] = {}

    def add_all(self, entries: Sequence[PartEntry]) -> None:
        """Take all parts of one plugin.

        Raises:
            PluginError: two of them have one kind and name, or another plugin has registered one
                of these names. None of them is registered then; a name that two plugins claim is
                remembered as contested, and neither claimant can be had under it.
        """
        seen: dict[tuple[PartKind, str], PartEntry] = {}
        for entry in entries:
            key = (entry.kind, entry.name)
            if key in seen:
                raise PluginError(
                    f"{entry.kind.label} {entry.name!r} is registered twice by plugin "
                    f"{entry.origin}: as {seen[key].path} and as {entry.path}"
                )
            seen[key] = entry
        contested = [key for key in seen if key in self._entries]
        for key in contested:
            earlier = self._claims.get(key, (self._entries[key],))
            self._claims[key] = (*earlier, seen[key])
        if contested:
            raise PluginError("; ".join(self.conflict(*key) for key in contested))
        self._entries.update(seen)

    def get(self, kind: PartKind, name: str) -> PartEntry | None:
        """The part of this name, or None if no plugin registered one.

        Raises:
            PluginError: several plugins claim the name; all are named.
        """
        if (kind, name) in self._claims:
            raise PluginError(self.conflict(kind, name))
        return self._entries.get((kind, name))

    def entries(self, kind: PartKind) -> tuple[PartEntry, ...]:
        """All parts of a kind whose name is not contested, by name."""
        found = (
            entry
            for key, entry in self._entries.items()
            if key[0] is kind and key not in self._claims
        )
        return tuple(sorted(found, key=lambda entry: entry.name))

    def names(self, kind: PartKind) -> tuple[str, ...]:
        """Names of all parts of a kind that can be asked for, sorted."""
        return tuple(entry.name for entry in self.entries(kind))

    def conflicts(self) -> Mapping[tuple[PartKind, str], tuple[PartEntry, ...]]:
        """The names that several plugins claim, with all claimants, the first one first."""
        return dict(self._claims)

    def conflict(self, kind: PartKind, name: str) -> str:
        """What to tell whoever asks for a contested name: all claimants, and the way out."""
        claimants = " and ".join(str(entry.origin) for entry in self._claims[(kind, name)])
        return (
            f"{kind.value}={name!r} is claimed by several plugins: {claimants}; uninstall one, or "
            "name the plugins to load in JACKFIELD_PLUGINS"
        )
