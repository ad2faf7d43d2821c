"""The plain scheduler's step in the making: shares, budgets, moves, the plan."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.block_manager import BlockCopy, BlockManager
from ...core.options import PartOptions
from ...core.scheduler import KVMove, MoveKind, ScheduledRequest, SchedulerConfig, StepPlan
from ...core.scheduling_policy import SchedulingPolicy
from .plain_limits import Limits
from .plain_requests import PlainRequests


class PlainShares(PlainRequests):
    """Gives tokens to requests.

    Attributes:
        shares: tokens of each request in this step.
        tokens_left, prefill_left: of the budgets of this step.
        skips: how many requests that do not fit may still be passed over.
        preempted, swapped_out, swapped_in, hits: as in ``StepPlan``.
        out_of_blocks: whether a running request found no block in this step.
        moves: what the next plan has to move, each with the request that it is for.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        self.shares: dict[str, int] = {}
        self.tokens_left = self.prefill_left = self.skips = 0
        self.preempted: list[str] = []
        self.swapped_out: list[str] = []
        self.swapped_in: list[str] = []
        self.hits: list[tuple[str, int]] = []
        self.out_of_blocks = False
        self.moves: list[tuple[str, KVMove]] = []

    def start_step(self, now: float) -> int:
        """Nothing is planned yet; the number of the step."""
        self.now = now
        number, self.number = self.number, self.number + 1
        self.shares, self.planned, self.out_of_blocks = {}, {}, False
        self.preempted, self.swapped_out, self.swapped_in, self.hits = [], [], [], []
        self.guard.clipped = []
        return number

    def share(self, name: str, left: int, limits: Limits) -> int:
        """How many of its ``left`` tokens a request may compute now."""
        if left == 1:
            return min(1, self.tokens_left)
        most = min(left, self.tokens_left, self.prefill_left, limits.chunk)
        if self.must_be_whole(name, left):
            return left if most == left else 0
        return max(0, min(most, limits.grants.get(name, most)))

    def must_be_whole(self, name: str, left: int) -> bool:
        """Whether these tokens must be computed in one step."""
        if name in self.running:
            return name in self.whole
        fits = left <= self.config.max_num_batched_tokens
        return not self.config.enable_chunked_prefill and fits

    def give(self, name: str, share: int, left: int) -> None:
        """Take a share from the budgets."""
        self.tokens_left -= share
        if left > 1:
            self.prefill_left -= share
        self.shares[name] = share

    def take_back(self, name: str) -> None:
        """Undo ``give``."""
        share = self.shares.pop(name)
        self.tokens_left += share
        if self.live[name].num_tokens_to_compute > 1:
            self.prefill_left += share

    def move(self, name: str, kind: MoveKind, copies: Sequence[BlockCopy]) -> None:
        """Have contents moved before the step."""
        if copies:
            self.moves.append((name, KVMove(kind, tuple(copies))))

    def build(self, number: int) -> StepPlan:
        """The finished plan."""
        self.planned = dict(self.shares)
        scheduled = [self.item(name, share) for name, share in self.shares.items()]
        moves, self.moves = self.moves, []
        forked, self.forked = self.forked, []
        return StepPlan(
            step=number,
            scheduled=tuple(scheduled),
            preempted=tuple(self.preempted),
            swapped_out=tuple(self.swapped_out),
            swapped_in=tuple(self.swapped_in),
            forked=tuple(forked),
            prefix_hits=tuple(self.hits),
            moves=tuple(move for _, move in moves),
            clipped=tuple(self.guard.clipped),
        )

    def item(self, name: str, share: int) -> ScheduledRequest:
        """A request's line of the plan."""
        request = self.live[name]
        computed, reads = request.num_computed_tokens, name in self.rereads
        samples = computed + share == request.num_tokens
        return ScheduledRequest(name, computed, share, samples, not reads)
