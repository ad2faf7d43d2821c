"""Mutants of order, of clocks, and of what must not matter."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from ....core.scheduler import StepPlan
from ..plain_limits import Limits
from ..plain_scheduler import PlainScheduler
from .registry import mutant


@mutant("newest_first", "The newest request is admitted first; old ones starve.")
class _NewestFirst(PlainScheduler):
    def enqueue(self, name: str) -> None:
        self.waiting.insert(0, name)


@mutant("order_by_hash", "Requests wait in the order of the hashes of their ids.")
class _OrderByHash(PlainScheduler):
    def enqueue(self, name: str) -> None:
        self.waiting = sorted([*self.waiting, name], key=hash)


@mutant(
    "wall_clock_read", "The clock of the machine decides who waits in front.", ("SGLang#39042",)
)
class _WallClock(PlainScheduler):
    def enqueue(self, name: str) -> None:
        late = time.perf_counter_ns() // 1000 % 2 == 0
        self.waiting.insert(len(self.waiting) if late else 0, name)


@mutant("absolute_time_matters", "Every 4096 seconds the order of the queue turns round.")
class _AbsoluteTime(PlainScheduler):
    def admit(self, limits: Limits) -> None:
        if self.now >= 4096.0:
            self.waiting.reverse()
        super().admit(limits)


@mutant(
    "head_is_overtaken", "Requests that fit overtake the first one that does not.", ("vllm#41951",)
)
class _HeadOvertaken(PlainScheduler):
    def admit(self, limits: Limits) -> None:
        self.skips += 2
        super().admit(limits)


@mutant("one_admission_in_two_steps", "A request is admitted in every second step only.")
class _OneInTwo(PlainScheduler):
    def may_admit(self) -> bool:
        return super().may_admit() and (self.number % 2 == 0 or not self.running)


@mutant("prompts_before_decodes", "Prompts take the budget before decoding requests get theirs.")
class _PromptsFirst(PlainScheduler):
    def in_turn(self, limits: Limits) -> list[str]:
        names = super().in_turn(limits)
        num_named = len(limits.running_order)
        rest = sorted(names[num_named:], key=lambda one: self.live[one].num_tokens_to_compute == 1)
        return [*names[:num_named], *rest]


@mutant("shortest_of_a_moment_first", "Of requests that arrive at one time the shortest is first.")
class _ShortestFirst(PlainScheduler):
    def enqueue(self, name: str) -> None:
        super().enqueue(name)
        now = self.live[name].arrival_time
        same = [one for one in self.waiting if self.live[one].arrival_time == now]
        same = [one for one in same if one not in self.returned]
        rest = [one for one in self.waiting if one not in same]
        self.waiting = [*rest, *sorted(same, key=lambda one: self.live[one].num_prompt_tokens)]


@mutant(
    "slow_steps_admit_nobody",
    "Nobody is admitted if the machine took long since the last step.",
    ("SGLang#39042",),
)
class _SlowSteps(PlainScheduler):
    last = 0.0

    def admit(self, limits: Limits) -> None:
        last, self.last = self.last, time.monotonic()
        if not last or self.last - last < 100.0 or not self.shares:
            super().admit(limits)


class _Sorted(PlainScheduler):
    def key(self, name: str) -> int | str:
        """What the batch is sorted by."""
        return name

    def build(self, number: int) -> StepPlan:
        key: Callable[[str], int | str] = self.key
        self.shares = {name: self.shares[name] for name in sorted(self.shares, key=key)}
        return super().build(number)


@mutant("batch_in_order_of_ids", "The batch is sorted by request id.")
class _ByName(_Sorted):
    pass


@mutant("batch_in_random_order", "The batch is shuffled.")
class _Shuffled(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        names = Random().sample(list(self.shares), len(self.shares))
        self.shares = {name: self.shares[name] for name in names}
        return super().build(number)


@mutant("batch_in_order_of_tokens", "Requests whose last token is even come first in the batch.")
class _ByToken(_Sorted):
    def key(self, name: str) -> int | str:
        return self.live[name].token_ids[-1] % 2


@mutant("batch_in_order_of_a_set", "The batch is grouped by shares, in the order of a set.")
class _BySet(_Sorted):
    def key(self, name: str) -> int | str:
        return list({str(share) for share in self.shares.values()}).index(str(self.shares[name]))
