"""What first come, first served promises about order, preemption and liveness."""

from __future__ import annotations

from ...core.block_manager import AllocationStatus
from ...core.request import Request
from ...core.scheduler import StepPlan
from . import laws
from .policy import NO_WISH
from .proposals import ProposalJudge
from .sight import Before


class OrderJudge(ProposalJudge):
    """Checks what only some policies promise.

    Attributes:
        preemptions: those since the last event: an arrival, an end, a wish of the policy.
    """

    preemptions = 0

    def event(self) -> None:
        """Something that may lead to preemptions."""
        self.preemptions = 0

    def judge(self, plan: StepPlan, before: Before) -> None:
        """Check a plan, before anything of it is carried out."""
        started = set(self.started)
        super().judge(plan, before)
        if not self.fcfs or self.policy.wish != NO_WISH or self.policy.fails:
            self.event()
            return
        self.preemptions += len(plan.preempted)
        after = self.standing
        admitted = after.resident - before.resident - before.swapped
        self.checker.check(
            laws.NotBoth,
            not (plan.preempted and admitted),
            lambda: f"{plan.preempted} are preempted, and {sorted(admitted)} admitted beside",
        )
        self.checker.check(
            laws.Storm,
            self.preemptions <= len(self.live),
            lambda: (
                f"{self.preemptions} preemptions since the last event, and only "
                f"{len(self.live)} requests are live"
            ),
        )
        self._decodes(plan, before)
        self._held_up(plan, before)
        if not self.has_groups:
            self._order(plan, after, started)
            self._conservation(plan, after, started)

    def _decodes(self, plan: StepPlan, before: Before) -> None:
        if self.world.budget < self.world.seats:
            return
        running = {item.request_id for item in plan.scheduled}
        held = [
            name
            for name in before.resident
            if before.left[name] == 1 and name not in running and name not in plan.preempted
        ]
        self.checker.check(
            laws.Decodes, not held, lambda: f"{sorted(held)} decode, and are left out of the step"
        )

    def _held_up(self, plan: StepPlan, before: Before) -> None:
        if not self.world.chunked or plan.num_tokens == self.world.budget:
            return
        shares = {item.request_id for item in plan.scheduled}
        held = sorted(before.resident - shares - set(plan.preempted))
        self.checker.check(
            laws.Conservation,
            not held,
            lambda: (
                f"{held} hold blocks and compute nothing, although "
                f"{self.world.budget - plan.num_tokens} tokens of the budget are left"
            ),
        )

    def _order(self, plan: StepPlan, after: Before, started: set[str]) -> None:
        fresh = [name for name in after.resident if name not in started]
        for name in fresh:
            request = self.live[name]
            for other, earlier in self.live.items():
                if other in after.resident:
                    continue
                returned = other in started
                if not returned and earlier.arrival_index > request.arrival_index:
                    continue
                tie = not returned and earlier.arrival_time == request.arrival_time
                self.checker.check(
                    laws.Ties if tie else laws.Order,
                    False,
                    lambda name=name, other=other, returned=returned: (  # type: ignore[misc]
                        f"{name!r} starts, while {other!r} waits, which "
                        + ("was preempted" if returned else "came earlier")
                    ),
                )
        if fresh:
            self.checker.check(laws.Order, True, str)
            self.checker.check(laws.Ties, True, str)

    def _conservation(self, plan: StepPlan, after: Before, started: set[str]) -> None:
        waiting = [name for name in self.live if after.where(name) == "neither memory"]
        idle = self.world.budget - plan.num_tokens
        seats = self.world.seats - len(after.resident)
        if plan.preempted or after.swapped or not waiting or not self.world.chunked:
            return
        head = min(waiting, key=lambda name: name not in started)
        fits = self._allocation(self.live[head]) is AllocationStatus.OK
        self.checker.check(
            laws.Conservation,
            not (fits and idle and seats),
            lambda: (
                f"{head!r} waits in front and fits, {idle} tokens of the budget are left and "
                f"{seats} seats are free"
            ),
        )

    def _allocation(self, request: Request) -> AllocationStatus:
        salt = request.hints.cache_salt
        keywords = {"salt": salt} if salt and self.world.caching else {}
        return self.manager.can_allocate(request.token_ids, request.num_tokens, **keywords)

    def drain_bound(self, wished: bool) -> int:
        """Steps after which nothing may be left, ``wished`` if the policy proposes something."""
        totals = [request.max_total_tokens for request in self.live.values()]
        count, longest = len(totals), max(totals, default=0)
        if self.fcfs and not wished:
            return sum(totals) + count * count * (longest + 1) + count
        return sum(totals) * (1 + (self.world.seats + 1) * (1 + longest))
