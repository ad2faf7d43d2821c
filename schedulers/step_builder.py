"""One step in the making."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.block_manager import BlockCopy
from ..core.scheduler import KVMove, MoveKind, ScheduledRequest, StepPlan
from .clipping import StepLimits
from .entry import NO_STEP, Entry

#: Moves of block contents, in the order of the calls, each with the request that it is for.
Moves = list[tuple[str, KVMove]]


class StepBuilder:
    """What is left of a step's budgets, who has a share of it, and who lost its blocks.

    Attributes:
        number: of the step.
        limits: what the step must keep to.
        token_budget: tokens left.
        prefill_budget: tokens left for requests with more than one to compute.
        skips: how many requests that do not fit may still be passed over.
        num_scheduled: requests with a share.
        preempted: ids of requests that lost their blocks in this step.
        swapped_out: those of them that are swapped.
        swapped_in: ids of requests that came back.
        prefix_hits: ids of admitted requests, with the tokens that they found in the cache.
        out_of_blocks: whether one of them lost its blocks because another had no room.
    """

    def __init__(self, number: int, limits: StepLimits, moves: Moves) -> None:
        self.number = number
        self.num_scheduled = 0
        self.preempted: list[str] = []
        self.swapped_out: list[str] = []
        self.swapped_in: list[str] = []
        self.prefix_hits: list[tuple[str, int]] = []
        self.out_of_blocks = False
        self._moves = moves
        self._order: list[Entry] = []
        self.restart(limits)

    def restart(self, limits: StepLimits) -> None:
        """Hold the step to other limits; nothing may have a share yet."""
        self.limits = limits
        self.token_budget = limits.token_budget
        self.prefill_budget = limits.prefill_budget
        self.skips = limits.max_skips

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

    def give_one(self, entry: Entry) -> None:
        """Give its only token to a request that has no share: ``give``, in fewer steps."""
        self.token_budget -= 1
        self.num_scheduled += 1
        entry.step = self.number
        entry.num_new_tokens = 1
        self._order.append(entry)

    def take_back(self, entry: Entry) -> None:
        """Undo ``give``, as long as the request's progress has not changed."""
        if entry.num_tokens_to_compute > 1:
            self.prefill_budget += entry.num_new_tokens
        self.token_budget += entry.num_new_tokens
        self.num_scheduled -= 1
        entry.step = NO_STEP

    def move(self, entry: Entry, kind: MoveKind, copies: Sequence[BlockCopy]) -> None:
        """Have contents of a request's blocks moved before the step, after all moves so far."""
        if copies:
            self._moves.append((entry.request_id, KVMove(kind, tuple(copies))))

    def drop_moves(self, entry: Entry) -> None:
        """Forget what was to be moved for a request that has given up its blocks."""
        self._moves[:] = [item for item in self._moves if item[0] != entry.request_id]

    def build(self, clipped: list[str], forked: list[tuple[str, str]]) -> StepPlan:
        """The finished plan."""
        number = self.number
        scheduled = [
            ScheduledRequest(
                entry.request_id,
                (computed := entry.request.num_computed_tokens),
                (new := entry.num_new_tokens),
                computed + new == entry.num_tokens,
                not entry.rereads,
            )
            for entry in self._order
            if entry.step == number
        ]
        return StepPlan(
            step=number,
            scheduled=tuple(scheduled),
            preempted=tuple(self.preempted),
            swapped_out=tuple(self.swapped_out),
            swapped_in=tuple(self.swapped_in),
            forked=tuple(forked),
            prefix_hits=tuple(self.prefix_hits),
            moves=tuple(move for _, move in self._moves),
            clipped=tuple(clipped),
        )
