"""Calls the observer hooks of all plugins, and keeps a broken observer away from the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import pluggy

from . import hookspecs

if TYPE_CHECKING:
    from ..core.engine import EngineStats
    from ..core.request import RequestOutput
    from ..core.scheduler import StepPlan

logger = logging.getLogger("jackfield")

OBSERVER_HOOKS = (
    "jackfield_step_planned",
    "jackfield_step_finished",
    "jackfield_request_finished",
)


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows Jackfield's hooks and no plugin yet."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


class Observers:
    """The observer hooks of all plugins.

    Each plugin has a pluggy manager of its own, so that a failure is known to be its own. An
    observer that raises is logged once, with its plugin's name and its traceback, and that plugin
    observes nothing any more: the engine and all other observers go on.
    """

    def __init__(self) -> None:
        self._managers: dict[str, pluggy.PluginManager] = {}

    def __len__(self) -> int:
        """How many plugins observe."""
        return len(self._managers)

    def add(self, name: str, manager: pluggy.PluginManager) -> tuple[str, ...]:
        """Take in the plugin that is registered with ``manager``.

        Returns:
            The observer hooks that it implements; without any it is not kept.
        """
        hooks = tuple(
            hook for hook in OBSERVER_HOOKS if getattr(manager.hook, hook).get_hookimpls()
        )
        if hooks:
            self._managers[name] = manager
        return hooks

    def step_planned(self, plan: StepPlan) -> None:
        """Call ``jackfield_step_planned`` of every plugin that still observes."""
        self._call("jackfield_step_planned", {"plan": plan})

    def step_finished(self, plan: StepPlan, sampled: Mapping[str, int], stats: EngineStats) -> None:
        """Call ``jackfield_step_finished`` of every plugin that still observes."""
        read_only = MappingProxyType(dict(sampled)) if self._managers else sampled
        self._call("jackfield_step_finished", {"plan": plan, "sampled": read_only, "stats": stats})

    def request_finished(self, output: RequestOutput) -> None:
        """Call ``jackfield_request_finished`` of every plugin that still observes."""
        self._call("jackfield_request_finished", {"output": output})

    def _call(self, hook: str, arguments: Mapping[str, object]) -> None:
        for name, manager in list(self._managers.items()):
            try:
                getattr(manager.hook, hook)(**arguments)
            except Exception:
                del self._managers[name]
                logger.exception("plugin %s failed in %s and observes nothing any more", name, hook)
