"""One step in the making."""

from __future__ import annotations

from ..core.block_manager import BlockCopy
from ..core.scheduler import ScheduledRequest, StepPlan
from .clipping import StepLimits
from .entry import NO_STEP, Entry


class StepBuilder:
    """What is left of a step's budgets, who has a share of it, and who lost its blocks.

    Attributes:
        number: of the step.
        limits: what the step must keep to.
        token_budget: tokens left.
        prefill_budget: tokens left for requests with more than one to compute.
        num_scheduled: requests with a share.
        copies: block copies of each request that needs some.
        preempted: ids of requests that lost their blocks in this step.
        out_of_blocks: whether one of them lost its blocks because another had no room.
    """

    def __init__(self, number: int, limits: StepLimits) -> None:
        self.number = number
        self.num_scheduled = 0
        self.copies: dict[str, tuple[BlockCopy, ...]] = {}
        self.preempted: list[str] = []
        self.out_of_blocks = False
        self._order: list[Entry] = []
        self.restart(limits)

    def restart(self, limits: StepLimits) -> None:
        """Hold the step to other limits; nothing may have a share yet."""
        self.limits = limits
        self.token_budget = limits.token_budget
        self.prefill_budget = limits.prefill_budget

    def share(self, entry: Entry, num_tokens: int, may_split: bool) -> int:
        """How many of the ``num_tokens`` tokens to compute the budgets allow now; 0 is none."""
        if num_tokens == 1:
            return min(self.token_budget, 1)
        limits = self.limits
        share = min(num_tokens, self.token_budget, self.prefill_budget, limits.chunk_size)
        if not may_split:
            return share if share == num_tokens else 0
        return min(share, limits.grants.get(entry.request_id, share))

    def give(self, entry: Entry, num_new_tokens: int, num_tokens_to_compute: int) -> None:
        """Give a share to a request that has none."""
        if num_tokens_to_compute > 1:
            self.prefill_budget -= num_new_tokens
        self.token_budget -= num_new_tokens
        self.num_scheduled += 1
        entry.step = self.number
        entry.num_new_tokens = num_new_tokens
        self._order.append(entry)

    def take_back(self, entry: Entry) -> None:
        """Undo ``give``, as long as the request's progress has not changed."""
        if entry.num_tokens_to_compute > 1:
            self.prefill_budget += entry.num_new_tokens
        self.token_budget += entry.num_new_tokens
        self.num_scheduled -= 1
        entry.step = NO_STEP
        self.copies.pop(entry.request_id, None)

    def build(self, clipped: list[str]) -> StepPlan:
        """The finished plan."""
        number = self.number
        scheduled = [
            ScheduledRequest(
                entry.request_id,
                computed := entry.request.num_computed_tokens,
                entry.num_new_tokens,
                computed + entry.num_new_tokens == entry.num_tokens,
            )
            for entry in self._order
            if entry.step == number
        ]
        return StepPlan(
            step=number,
            scheduled=tuple(scheduled),
            preempted=tuple(self.preempted),
            copies=tuple(copy for copies in self.copies.values() for copy in copies),
            clipped=tuple(clipped),
        )
