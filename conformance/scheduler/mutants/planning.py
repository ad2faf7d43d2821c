"""Mutants of shares, budgets, seats and slots."""

from __future__ import annotations

from dataclasses import replace

from ....core.scheduler import ScheduledRequest, StepPlan
from ..plain_limits import Limits
from ..plain_scheduler import PlainScheduler
from .registry import mutant


@mutant("budget_exceeded", "Decoding requests are scheduled beyond the token budget.")
class _BudgetExceeded(PlainScheduler):
    def share(self, name: str, left: int, limits: Limits) -> int:
        return 1 if left == 1 else super().share(name, left, limits)


@mutant("budget_of_each_request", "Each request has the budget of the step to itself.")
class _BudgetOfEach(PlainScheduler):
    def share(self, name: str, left: int, limits: Limits) -> int:
        kept = self.tokens_left, self.prefill_left
        self.tokens_left, self.prefill_left = limits.token_budget, limits.prefill_budget
        share = super().share(name, left, limits)
        self.tokens_left, self.prefill_left = kept
        return share


@mutant("seat_limit_ignored", "Requests are admitted beyond max_num_seqs.")
class _SeatLimitIgnored(PlainScheduler):
    def free_seats(self) -> int:
        return 1


@mutant("chunk_off_by_one", "A chunk is one token longer than its limit.")
class _ChunkOffByOne(PlainScheduler):
    def share(self, name: str, left: int, limits: Limits) -> int:
        return super().share(name, left, replace(limits, chunk=limits.chunk + 1))


@mutant("chunk_overlaps", "A later chunk begins one token before the last one ended.")
class _ChunkOverlaps(PlainScheduler):
    def item(self, name: str, share: int) -> ScheduledRequest:
        item = super().item(name, share)
        if item.num_computed_tokens > 1 and share > 1:
            return item._replace(num_computed_tokens=item.num_computed_tokens - 1)
        return item


@mutant("prompt_split_although_off", "A prompt is split although chunked prefill is off.")
class _SplitAlthoughOff(PlainScheduler):
    def must_be_whole(self, name: str, left: int) -> bool:
        return False


@mutant("samples_in_mid_prompt", "Every chunk of a prompt samples a token.")
class _SamplesInMidPrompt(PlainScheduler):
    def item(self, name: str, share: int) -> ScheduledRequest:
        return super().item(name, share)._replace(samples=True)


@mutant("never_samples_after_a_chunk", "The last chunk of a prompt samples nothing.")
class _NeverSamples(PlainScheduler):
    def item(self, name: str, share: int) -> ScheduledRequest:
        item = super().item(name, share)
        return item._replace(samples=item.samples and (share == 1 or not item.num_computed_tokens))


@mutant("scheduled_twice", "A request stands twice in a step with tokens left in the budget.")
class _ScheduledTwice(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        plan = super().build(number)
        return replace(plan, scheduled=(*plan.scheduled, *plan.scheduled[:1]))


@mutant(
    "empty_shares",
    "A running request without tokens of the budget gets an empty share.",
    ("vllm#11562",),
)
class _EmptyShares(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        for name in self.running:
            if name not in self.paused:
                self.shares.setdefault(name, 0)
        return super().build(number)


@mutant(
    "empty_plan_while_runnable",
    "A step is empty while one request runs and two wait.",
    ("vllm#15996",),
)
class _EmptyPlan(PlainScheduler):
    def fill(self, limits: Limits) -> None:
        waits = len(self.waiting) > 1 and len(self.running) == 1
        if not waits:
            super().fill(limits)


@mutant("blocks_a_token_short", "A running request asks for one slot less than its share needs.")
class _Short(PlainScheduler):
    def make_room(self, name: str, needed: int) -> bool:
        return super().make_room(name, needed - 1)


@mutant("lookahead_forgotten", "A request asks for blocks only when its own tokens need them.")
class _LookaheadForgotten(PlainScheduler):
    def make_room(self, name: str, needed: int) -> bool:
        table = self.block_manager.block_table(name).tolist()
        enough = len(table) * self.block_manager.config.block_size >= needed
        shares = any(
            table[-1] in self.block_manager.block_table(other).tolist()
            for other in self.running
            if other != name
        )
        return (enough and not shares) or super().make_room(name, needed)


@mutant("prompts_wait_every_second_step", "A running prompt gets tokens in every second step.")
class _EverySecondStep(PlainScheduler):
    def share(self, name: str, left: int, limits: Limits) -> int:
        waits = left > 1 and name in self.running and self.number % 2 and bool(self.shares)
        return 0 if waits else super().share(name, left, limits)
