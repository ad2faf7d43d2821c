"""The hooks that a plugin can implement, and the version of the plugin API.

A plugin is a light module, named by an entry point of the group ``jackfield``. It declares the API
version that it was written for, and marks its hook functions with ``hookimpl``::

    from jackfield import hookimpl

    JACKFIELD_API_VERSION = "1.0"

    @hookimpl
    def jackfield_scheduling_policies(register):
        register("mine", "my_package.policy:MyPolicy")

A hook function may take fewer arguments than its specification has, so an argument that is added
later breaks no plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from ..core.engine import EngineStats
    from ..core.request import RequestOutput
    from ..core.scheduler import StepPlan

PROJECT = "jackfield"
API_VERSION = "1.0"

#: What each version of the plugin API changed for plugins, oldest first.
API_CHANGES: dict[str, str] = {
    "1.0": "the first published API: five registration hooks that call register(name, target), "
    "three observer hooks, and JACKFIELD_API_VERSION in every plugin module",
}

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Register(Protocol):
    """What a registration hook is given, to be called once for each part."""

    def __call__(self, name: str, target: str | type) -> None:
        """Offer a part.

        Args:
            name: what users ask for; it equals the ``name`` of the class, and for a model the
                architecture in the checkpoint's configuration.
            target: ``"package.module:ClassName"``, imported only when the part is asked for or
                asked about; or the class itself.

        Raises:
            PluginError: the name or the target is malformed; the whole plugin is rolled back.
        """


@hookspec
def jackfield_attention_backends(register: Register) -> None:
    """Register attention backends, subclasses of ``jackfield.AttentionBackend``."""


@hookspec
def jackfield_schedulers(register: Register) -> None:
    """Register schedulers, subclasses of ``jackfield.Scheduler``."""


@hookspec
def jackfield_scheduling_policies(register: Register) -> None:
    """Register scheduling policies, subclasses of ``jackfield.SchedulingPolicy``."""


@hookspec
def jackfield_block_managers(register: Register) -> None:
    """Register block managers, subclasses of ``jackfield.BlockManager``."""


@hookspec
def jackfield_models(register: Register) -> None:
    """Register models, subclasses of ``jackfield.Model``, by architecture name."""


@hookspec
def jackfield_step_planned(plan: StepPlan) -> None:
    """A step was planned and nothing of it is computed yet. For observers: change nothing."""


@hookspec
def jackfield_step_finished(plan: StepPlan, sampled: Mapping[str, int], stats: EngineStats) -> None:
    """A step was carried out.

    Args:
        plan: what was planned.
        sampled: the new token of every request that sampled, read-only.
        stats: where the engine stands after the step.
    """


@hookspec
def jackfield_request_finished(output: RequestOutput) -> None:
    """All completions of a request have ended; ``output`` is its last output."""
