"""Scheduling policies that take blocks away, and how an engine gets them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jackfield import PreemptionMode, SchedulerView, SchedulingPolicy, hookimpl
from jackfield.plugins.discovery import PluginHost, discover
from jackfield.plugins.registry import Origin


class LeastOftenFirst(SchedulingPolicy):
    """Where blocks are short, the request that has lost its own least often gives way."""

    name = "least-often-first"

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode | None]]:
        """All candidates, in the order of their preemptions and then of their arrival."""

        def key(name: str) -> tuple[int, int]:
            request = view.request(name)
            return request.num_preemptions, request.arrival_index

        return [(name, None) for name in sorted(candidates, key=key)]


def host_with(policy: type[SchedulingPolicy]) -> PluginHost:
    """All plugins, and one more that has a policy, under its name."""

    class Plugin:
        JACKFIELD_API_VERSION = "1.0"

        @hookimpl
        def jackfield_scheduling_policies(self, register: Any) -> None:
            register(policy.name, policy)

    host = discover()
    host.add(Origin("test"), Plugin())
    return host
