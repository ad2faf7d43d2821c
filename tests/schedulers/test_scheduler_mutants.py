"""Broken schedulers and block managers, each of which the scheduler machine must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.scheduler_machine import DefaultPolicyMachine, SchedulerMachine

from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.errors import JackfieldError
from jackfield.core.scheduler import MoveKind, SchedulerConfig, StepPlan
from jackfield.schedulers.entry import Entry, State
from jackfield.schedulers.queue_scheduler import QueueScheduler
from jackfield.schedulers.queues import Queues
from jackfield.schedulers.step_builder import StepBuilder


class LeaksOnFree(PagedBlockManager):
    """Keeps a block of each request that is freed."""

    def free(self, request_id: str) -> None:
        super().free(request_id)
        if len(self._free) > 1:
            self._free.pop()


class GivesTwice(PagedBlockManager):
    """Now and then hands out a block that it keeps on its list."""

    def _take(self, num_blocks: int) -> list[int]:
        taken = super()._take(num_blocks)
        if num_blocks == 2:
            self._free.insert(0, taken[0])
        return taken


class IgnoresChunkSize(QueueScheduler):
    """Plans without the chunk limit."""

    def __init__(self, config: SchedulerConfig, *arguments: Any) -> None:
        super().__init__(replace(config, long_prefill_token_threshold=None), *arguments)


class IgnoresBudget(QueueScheduler):
    """Plans for one token more than a step may have."""

    def __init__(self, config: SchedulerConfig, *arguments: Any) -> None:
        budget = config.max_num_batched_tokens + 1
        super().__init__(replace(config, max_num_batched_tokens=budget), *arguments)


class OneSeatTooMany(QueueScheduler):
    """Admits one request more than there are seats."""

    def __init__(self, config: SchedulerConfig, *arguments: Any) -> None:
        super().__init__(replace(config, max_num_seqs=config.max_num_seqs + 1), *arguments)


class KeepsProgress(QueueScheduler):
    """Takes a victim's blocks, and believes that they are still computed."""

    def _preempt(self, step: StepBuilder, entry: Entry, wished: Any = None) -> None:
        num_computed = entry.request.num_computed_tokens
        super()._preempt(step, entry, wished)
        entry.request.num_computed_tokens = num_computed


class VictimGoesLast(QueueScheduler):
    """Sends a victim to the end of the queue."""

    def _preempt(self, step: StepBuilder, entry: Entry, wished: Any = None) -> None:
        super()._preempt(step, entry, wished)
        if entry.state is State.WAITING:
            self._queues.waiting.remove(entry)
            self._queues.waiting.add(entry)


class KeepsTheVictimsShare(QueueScheduler):
    """Leaves a victim in the step that it was scheduled in."""

    def _preempt(self, step: StepBuilder, entry: Entry, wished: Any = None) -> None:
        number = entry.step
        super()._preempt(step, entry, wished)
        entry.step = number


class LastComeFirstServed(QueueScheduler):
    """Admits the latest arrival first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._admission._candidates = self._backwards  # type: ignore[method-assign]

    def _backwards(self, step: StepBuilder, state: State) -> Any:
        queue = self._queues.swapped if state is State.SWAPPED else self._queues.waiting
        return iter(sorted(queue, key=lambda entry: -entry.sequence))


class ForgetsToFree(QueueScheduler):
    """Lets an aborted request keep its blocks while it is computing."""

    def finish(self, request_id: str) -> bool:
        entry = self._live.get(request_id)
        if entry is not None and entry.running and entry.step >= 0:
            del self._live[request_id]
            del self._running[request_id]
            self.policy.on_finish(self._view, request_id)
            return True
        return super().finish(request_id)


class AdmitsAfterPreempting(QueueScheduler):
    """Admits requests in a step that ran out of blocks."""

    def _fill(self, step: StepBuilder) -> None:
        super()._fill(step)
        if step.out_of_blocks:
            self._admission.admit(step)


class ComputesOneTwice(QueueScheduler):
    """Forgets the last token of a chunk."""

    def update(self, plan: StepPlan, sampled: Any, now: float) -> Any:
        finished = super().update(plan, sampled, now)
        for item in plan.scheduled:
            entry = self._live.get(item.request_id)
            if entry is not None and item.num_new_tokens > 2:
                entry.request.num_computed_tokens -= 1
        return finished


class WritesSharedBlocks(QueueScheduler):
    """Lets forked requests store the last prompt token once more."""

    def _fork_followers(self) -> None:
        super()._fork_followers()
        for entry in self._rereading:
            entry.rereads = False


class LeaderKeepsItsTail(QueueScheduler):
    """Lets a leader write on into the block that it has just shared."""

    def _fork_followers(self) -> None:
        leaders = list(self._queues.leaders.values())
        super()._fork_followers()
        for leader in leaders:
            leader.capacity = 4 * leader.capacity


class ForgetsFollowers(QueueScheduler):
    """Forks all followers but the last."""

    def _fork_followers(self) -> None:
        for leader in self._queues.leaders.values():
            if len(leader.followers) > 2:
                leader.followers.pop()
        super()._fork_followers()


class NoSeatsKept(Queues):
    """Counts a group as one request."""

    @property
    def num_free_seats(self) -> int:
        return self._num_seats - len(self.running)


class GivesNoSeatsToFollowers(QueueScheduler):
    """Admits a group as soon as there is a seat for its leader."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._queues.__class__ = NoSeatsKept


class MovesBackwards(QueueScheduler):
    """Plans the moves of a step in the wrong order."""

    def schedule(self, now: float) -> StepPlan:
        plan = super().schedule(now)
        return replace(plan, moves=plan.moves[::-1])


class LosesWhatComesBack(QueueScheduler):
    """Forgets to move blocks back from host memory."""

    def schedule(self, now: float) -> StepPlan:
        plan = super().schedule(now)
        moves = tuple(move for move in plan.moves if move.kind is not MoveKind.SWAP_IN)
        return replace(plan, moves=moves)


class OvertakesTheSwapped(QueueScheduler):
    """Admits newcomers although a swapped request found no room."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        resume = self._admission.resume
        self._admission.resume = lambda step: resume(step) or True  # type: ignore[method-assign]


class KeepsHostBlocks(PagedBlockManager):
    """Keeps the host blocks of a request that ends while it is swapped."""

    def free(self, request_id: str) -> None:
        host = list(self._host_free)
        super().free(request_id)
        self._host_free = host


class SharesUncomputedBlocks(PagedBlockManager):
    """Believes that a block more is computed than there is."""

    def commit(self, request_id: str, token_ids: Any, num_computed_tokens: int) -> None:
        more = min(num_computed_tokens + self.config.block_size, len(token_ids))
        slots = len(self.block_table(request_id)) * self.config.block_size
        super().commit(request_id, token_ids, min(more, slots))


ANY, DEFAULT = SchedulerMachine, DefaultPolicyMachine


@pytest.mark.parametrize(
    ("mutant", "world"),
    [
        (LeaksOnFree, ANY),
        (GivesTwice, DEFAULT),
        (IgnoresChunkSize, DEFAULT),
        (IgnoresBudget, DEFAULT),
        (OneSeatTooMany, DEFAULT),
        (KeepsProgress, DEFAULT),
        (VictimGoesLast, DEFAULT),
        (KeepsTheVictimsShare, ANY),
        (LastComeFirstServed, DEFAULT),
        (ForgetsToFree, ANY),
        (AdmitsAfterPreempting, DEFAULT),
        (ComputesOneTwice, DEFAULT),
        (WritesSharedBlocks, DEFAULT),
        (LeaderKeepsItsTail, DEFAULT),
        (ForgetsFollowers, DEFAULT),
        (GivesNoSeatsToFollowers, DEFAULT),
        (MovesBackwards, ANY),
        (LosesWhatComesBack, DEFAULT),
        (OvertakesTheSwapped, DEFAULT),
        (KeepsHostBlocks, ANY),
        (SharesUncomputedBlocks, DEFAULT),
    ],
)
def test_the_machine_catches(mutant: type, world: type[SchedulerMachine]) -> None:
    part = "manager_class" if issubclass(mutant, PagedBlockManager) else "scheduler_class"
    machine = type("Mutant", (world,), {part: mutant})
    quick = settings(
        deadline=None,
        max_examples=3000,  # it stops at the first one that is caught
        stateful_step_count=15,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    caught = (AssertionError, LookupError, JackfieldError, pytest.fail.Exception)
    with pytest.raises(caught):
        run_state_machine_as_test(machine, settings=quick)
