"""Finds the installed plugins, loads each one alone, and takes what it registers."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import pluggy

from ..core.errors import PluginError
from .hookspecs import API_CHANGES, API_VERSION
from .observers import OBSERVER_HOOKS, Observers, new_manager
from .registry import Origin, PartEntry, PartKind, Registry
from .validation import did_you_mean

GROUP = "jackfield"
BUILTIN = "builtin"
CHOICE = "JACKFIELD_PLUGINS"
VERSION_ATTRIBUTE = "JACKFIELD_API_VERSION"

logger = logging.getLogger("jackfield")


class EntryPointLike(Protocol):
    """What discovery needs of an ``importlib.metadata.EntryPoint``."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> Any: ...
    def load(self) -> Any: ...


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin that was taken in.

    Attributes:
        origin: its entry point and distribution.
        api_version: the plugin API that it was written for.
        parts: what it registered, in its own order.
        observers: the observer hooks that it implements.
    """

    origin: Origin
    api_version: str
    parts: tuple[PartEntry, ...]
    observers: tuple[str, ...]


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that was refused; nothing of it is registered.

    Attributes:
        origin: its entry point and distribution.
        reason: one sentence.
        traceback: what was raised, as text; empty if nothing of the plugin's was running.
    """

    origin: Origin
    reason: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"plugin {self.origin} was not loaded: {self.reason}"


@dataclass
class PluginHost:
    """All that discovery found.

    Attributes:
        registry: the parts.
        observers: the observer hooks of all plugins.
        plugins: the plugins that were taken in, by entry-point name, in the order of loading.
        failures: the plugins that were refused, by entry-point name.
        left_out: names of the plugins that ``JACKFIELD_PLUGINS`` leaves out.
        requested: names that ``JACKFIELD_PLUGINS`` lists.
    """

    registry: Registry = field(default_factory=Registry)
    observers: Observers = field(default_factory=Observers)
    plugins: dict[str, LoadedPlugin] = field(default_factory=dict)
    failures: dict[str, PluginFailure] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    requested: tuple[str, ...] = ()

    def add(self, origin: Origin, plugin: object) -> LoadedPlugin:
        """Take in a plugin: a module, or any object that has the same attributes.

        Discovery calls this for every entry point; a program may call it for a plugin of its own
        that is not installed.

        Raises:
            PluginError: it was written for another API, a hook is misspelt, unmarked or raises, or
                a name is taken. Nothing of it is registered then.
        """
        if origin.plugin in self.plugins:
            earlier = self.plugins[origin.plugin].origin
            raise PluginError(f"two plugins have the name {origin.plugin!r}: {earlier}, {origin}")
        version = check_api_version(getattr(plugin, VERSION_ATTRIBUTE, None))
        manager = new_manager()
        try:
            manager.register(plugin, origin.plugin)
            manager.check_pending()
        except Exception as error:
            raise PluginError(f"a hook is wrong: {_one_line(error)}") from error
        _check_marks(plugin, manager)
        parts = _collect(manager, origin)
        self.registry.add_all(parts)
        observers = self.observers.add(origin.plugin, manager)
        loaded = LoadedPlugin(origin, version, tuple(parts), observers)
        self.plugins[origin.plugin] = loaded
        return loaded

    def check_requested(self) -> None:
        """Make sure that every plugin that ``JACKFIELD_PLUGINS`` lists by name is there.

        Raises:
            PluginError: with reason and traceback of each that is not.
        """
        failed = [self.failures[name] for name in self.requested if name in self.failures]
        if failed:
            raise PluginError(f"{CHOICE} asks for plugins that cannot be had:\n{tell(failed)}")


def discover(
    entry_points: Iterable[EntryPointLike] | None = None,
    environ: Mapping[str, str] | None = None,
) -> PluginHost:
    """Load the installed plugins, each one alone.

    A plugin that cannot be loaded is a warning on the logger ``jackfield`` and an entry of
    ``PluginHost.failures``. The order of loading is fixed: the built-in parts, then by name.

    Args:
        entry_points: default: those of the group ``jackfield``.
        environ: where ``JACKFIELD_PLUGINS`` is looked up; default: ``os.environ``. It lists the
            names of the entry points to load, separated by commas; the built-in parts are always
            loaded. Unset loads all, empty loads nothing else.

    Raises:
        PluginError: ``JACKFIELD_PLUGINS`` lists a name that no installed plugin has, or Jackfield
            itself is not installed, so that its built-in parts cannot be found.
    """
    found = _by_name(metadata.entry_points(group=GROUP) if entry_points is None else entry_points)
    if entry_points is None and BUILTIN not in found:
        raise PluginError(
            f"no entry point {BUILTIN!r} in the group {GROUP!r}: Jackfield is imported from a "
            "folder but not installed; install it with pip"
        )
    choice = (os.environ if environ is None else environ).get(CHOICE)
    requested = _requested(choice, found)
    wanted = [name for name in found if choice is None or name in (BUILTIN, *requested)]
    left_out = tuple(name for name in found if name not in wanted)
    host = PluginHost(left_out=left_out, requested=requested)
    for name in wanted:
        failure = _load(host, found[name])
        if failure is not None:
            host.failures[name] = failure
            logger.warning("%s", failure)
    return host


def check_api_version(
    declared: object, current: str = API_VERSION, changes: Mapping[str, str] = API_CHANGES
) -> str:
    """The declared version, if a plugin that was written for it works with ``current``.

    Within a major version the API only grows: a plugin for an older minor version works, one for a
    newer minor version may need what is not there.

    Raises:
        PluginError: with what changed in between.
    """
    if declared is None:
        raise PluginError(
            f"it declares no plugin API version; add {VERSION_ATTRIBUTE} = {current!r} to its "
            f"module if it is written for that ({_since('0', changes)})"
        )
    if not isinstance(declared, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", declared):
        raise PluginError(
            f"{VERSION_ATTRIBUTE} = {declared!r} is malformed: give a text such as {current!r}"
        )
    theirs, ours = _numbers(declared), _numbers(current)
    if theirs > ours:
        raise PluginError(
            f"it was written for plugin API {declared}, this Jackfield has {current}; upgrade "
            "Jackfield, or install an older version of the plugin"
        )
    if theirs[0] != ours[0]:
        raise PluginError(
            f"it was written for plugin API {declared}, this Jackfield has {current}; changed "
            f"since: {_since(declared, changes)}"
        )
    return declared


def tell(failures: Sequence[PluginFailure]) -> str:
    """Reasons and tracebacks of several failures, for the end of a message."""
    return "\n".join(f"{failure}\n{failure.traceback}".rstrip() for failure in failures)


def _by_name(entry_points: Iterable[EntryPointLike]) -> dict[str, list[EntryPointLike]]:
    found: dict[str, list[EntryPointLike]] = {}
    for entry_point in entry_points:
        found.setdefault(entry_point.name, []).append(entry_point)
    return dict(sorted(found.items(), key=lambda item: (item[0] != BUILTIN, item[0])))


def _requested(choice: str | None, found: Mapping[str, object]) -> tuple[str, ...]:
    names = [name.strip() for name in (choice or "").split(",")]
    requested = tuple(dict.fromkeys(name for name in names if name))
    unknown = [name for name in requested if name not in found]
    if unknown:
        raise PluginError(
            f"{CHOICE} lists {', '.join(map(repr, unknown))}, but no installed plugin has that "
            f"name (installed: {', '.join(found) or 'none'}){did_you_mean(unknown[0], found)}"
        )
    return requested


def _load(host: PluginHost, entry_points: Sequence[EntryPointLike]) -> PluginFailure | None:
    origins = [_origin(entry_point) for entry_point in entry_points]
    if len(entry_points) > 1:
        claimants = " and ".join(map(str, origins))
        return PluginFailure(
            origins[0], f"several distributions have a plugin of this name: {claimants}"
        )
    try:
        plugin = entry_points[0].load()
    except (Exception, SystemExit) as error:
        reason = f"it cannot be imported: {type(error).__name__}: {_one_line(error)}"
        return PluginFailure(origins[0], reason, _traceback(error))
    try:
        host.add(origins[0], plugin)
    except PluginError as error:
        cause = error.__cause__
        return PluginFailure(origins[0], str(error), "" if cause is None else _traceback(cause))
    except Exception as error:
        reason = f"it cannot be read: {type(error).__name__}: {_one_line(error)}"
        return PluginFailure(origins[0], reason, _traceback(error))
    return None


def _check_marks(plugin: object, manager: pluggy.PluginManager) -> None:
    """Refuse a function that is named like a hook but would never be called."""
    implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    hooks = (*(kind.hook for kind in PartKind), *OBSERVER_HOOKS)
    unmarked = [name for name in hooks if hasattr(plugin, name) and name not in implemented]
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)} is not marked with @jackfield.hookimpl")
    if not implemented:
        raise PluginError(
            "it implements no hook; mark its hook functions with @jackfield.hookimpl (hooks: "
            f"{', '.join(hooks)})"
        )


def _collect(manager: pluggy.PluginManager, origin: Origin) -> list[PartEntry]:
    """Everything that the plugin's registration hooks offer; registers nothing yet."""
    parts: list[PartEntry] = []
    for kind in PartKind:

        def register(name: str, target: str | type, kind: PartKind = kind) -> None:
            parts.append(PartEntry(kind, name, target, origin))

        try:
            returned = getattr(manager.hook, kind.hook)(register=register)
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{kind.hook} raised {type(error).__name__}: {_one_line(error)}"
            ) from error
        if returned:
            raise PluginError(
                f"{kind.hook} returned {returned[0]!r}, which nobody reads; call "
                "register(name, target) instead"
            )
    return parts


def _origin(entry_point: EntryPointLike) -> Origin:
    dist = entry_point.dist
    if dist is None:
        return Origin(entry_point.name)
    return Origin(entry_point.name, dist.name, dist.version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _since(version: str, changes: Mapping[str, str]) -> str:
    later = (item for item in changes.items() if _numbers(item[0]) > _numbers(version))
    return "; ".join(f"{number}: {change}" for number, change in later)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
