"""A scheduling policy: the shortest prompt first, with a bound on the waiting."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from jackfield import PartOptions, Proposal, RequestView, SchedulerView, SchedulingPolicy


class ShortestPromptOptions(PartOptions):
    """Options of the policy."""

    max_wait_steps: int = Field(
        default=256,
        ge=0,
        description="A request that has waited for this many steps goes before all shorter ones.",
    )


class ShortestPromptPolicy(SchedulingPolicy):
    """Admits the waiting request with the shortest prompt first.

    Short prompts keep the mean waiting time low, and could starve a long one: so whoever has waited
    for ``max_wait_steps`` steps goes first, in order of arrival. A preempted request waits anew.
    """

    name: ClassVar[str] = "example_shortest_prompt"
    Options: ClassVar[type[PartOptions]] = ShortestPromptOptions

    def __init__(self, options: PartOptions | None = None) -> None:
        super().__init__(options)
        if not isinstance(self.options, ShortestPromptOptions):
            raise TypeError(f"options of {self.name!r} must be ShortestPromptOptions")
        self._max_wait_steps = self.options.max_wait_steps
        self._waiting_since: dict[str, int] = {}

    def propose(self, view: SchedulerView) -> Proposal:
        """The order of admission; everything else is left to the scheduler."""
        waiting = list(view.waiting())
        self._waiting_since = {
            request.request_id: self._waiting_since.get(request.request_id, view.step)
            for request in waiting
        }

        def urgency(request: RequestView) -> tuple[bool, int, int]:
            waited = view.step - self._waiting_since[request.request_id]
            overdue = waited >= self._max_wait_steps
            length = 0 if overdue else request.num_prompt_tokens
            return (not overdue, length, request.arrival_index)

        return Proposal(
            admission_order=[request.request_id for request in sorted(waiting, key=urgency)]
        )
