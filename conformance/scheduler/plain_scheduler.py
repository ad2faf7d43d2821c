"""A scheduler that is written to be read: small, slow, and right; mutants break it.

First come, first served, unless the policy proposes something else. Each decision is a method of
its own, in the file of its topic: ``plain_requests`` (arrivals, forks, ends), ``plain_shares``
(budgets, the plan), ``plain_preemption``, ``plain_admission``; what a policy proposes is clipped in
``plain_limits``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.request import FinishReason
from ...core.scheduler import StepPlan
from ...core.scheduling_policy import Progress
from .plain_admission import PlainAdmission
from .plain_limits import Limits, limits_of


class PlainScheduler(PlainAdmission):
    """Running requests first, then swapped ones, then waiting ones."""

    name = "plain"

    def schedule(self, now: float) -> StepPlan:
        number = self.start_step(now)
        default = Limits.default(self.config)
        limits = limits_of(self, self.guard.propose(), default)
        for name in limits.preempt:
            self.preempt(name, limits.modes.get(name))
        self.fill(limits)
        if not self.shares and self.live and limits is not default:
            self.guard.report("the proposal leaves nothing to run: the default holds")
            self.fill(default)
        return self.build(number)

    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], now: float
    ) -> Mapping[str, FinishReason]:
        self.now = now
        finished: dict[str, FinishReason] = {}
        progress: list[Progress] = []
        for item in plan.scheduled:
            name = item.request_id
            if name not in self.live or name not in self.planned:
                continue
            if item.samples and name not in sampled:
                raise ValueError(f"no sampled token for {name!r}")
            del self.planned[name]
            reason = self.note(item, sampled)
            if reason is not None:
                finished[name] = reason
            progress.append(Progress(name, item.num_new_tokens, int(item.samples)))
        self.view.passing = {name: self.live[name] for name in finished}
        for name in finished:
            self.remove(name)
        if progress:
            self.tell_of_progress(progress)
        for name in finished:
            self.tell_of_end(name)
        return finished

    def tell_of_progress(self, progress: list[Progress]) -> None:
        """Tell the policy what a step did."""
        self.guard.call("on_progress", self.policy.on_progress, self.view, progress)

    def fill(self, limits: Limits) -> None:
        """Running requests first, then swapped ones, then waiting ones."""
        self.tokens_left, self.prefill_left = limits.token_budget, limits.prefill_budget
        self.skips = limits.max_skips
        self.paused = set(limits.pause)
        for name in self.in_turn(limits):
            if name in self.running and name not in self.paused:
                self.advance(name, limits)
        if self.may_admit() and self.resume(limits):
            self.admit(limits)

    def in_turn(self, limits: Limits) -> list[str]:
        """Running requests: those that the policy names, the decoding ones, the others."""
        rest = [name for name in self.running if name not in limits.running_order]
        decodes = [name for name in rest if self.live[name].num_tokens_to_compute == 1]
        prompts = [name for name in rest if name not in decodes]
        return [*limits.running_order, *decodes, *prompts]

    def may_admit(self) -> bool:
        """Whether the step may seat anybody."""
        return not self.out_of_blocks

    def advance(self, name: str, limits: Limits) -> None:
        """Give a running request its share, at the cost of others if need be."""
        request = self.live[name]
        left = request.num_tokens_to_compute
        share = self.share(name, left, limits)
        # A forked request that computes its last prompt token writes nothing.
        reads = name in self.rereads
        if share and (reads or self.make_room(name, request.num_computed_tokens + share)):
            self.give(name, share, left)
