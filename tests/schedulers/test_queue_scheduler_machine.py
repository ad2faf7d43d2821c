"""The built-in scheduler in tiny worlds under any policy; broken ones must be caught."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.scheduler_machine import DefaultPolicyMachine, SchedulerMachine
from support.scheduler_wishes import Wish, random_wish

from jackfield.core.errors import JackfieldError
from jackfield.core.paged_block_manager import PagedBlockManager
from jackfield.core.scheduler import SchedulerConfig, StepPlan
from jackfield.schedulers.entry import Entry
from jackfield.schedulers.queue_scheduler import QueueScheduler
from jackfield.schedulers.step_builder import StepBuilder

SEEDS = 120

TestAnyPolicy = SchedulerMachine.TestCase
TestAnyPolicy.settings = settings(deadline=None, max_examples=80, stateful_step_count=15)
TestDefaultPolicy = DefaultPolicyMachine.TestCase
TestDefaultPolicy.settings = settings(deadline=None, max_examples=80, stateful_step_count=15)


@pytest.mark.parametrize("world", [SchedulerMachine, DefaultPolicyMachine])
def test_many_random_histories(world: type[SchedulerMachine]) -> None:
    """The same rules, drawn evenly: the rare events must have happened, or this shows little."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        draw, machine = Random(seed), world()
        machine.start(seed)
        for _ in range(draw.randint(2, 8)):
            machine.add_what_fits(draw.randrange(2**32), draw.randint(1, 4))
            machine.queues_agree()
            for _ in range(draw.randint(1, 4)):
                wish = Wish() if world.only_default_policy else random_wish(draw)
                for _ in range(draw.randint(1, 4)):
                    aborts = bool(machine.live) and draw.random() < 0.05
                    machine.run_step(wish, draw.choice([*machine.live]) if aborts else None)
                    machine.queues_agree()
        machine.teardown()
        seen["preemptions"] += machine.num_preemptions
        sentences = [sentence for plan in machine.plans for sentence in plan.clipped]
        for event in ("nothing to run", "no swap space", "too few", "not passed", "would split"):
            seen[event] += sum(event in sentence for sentence in sentences)
    assert seen["preemptions"] >= SEEDS, seen
    assert world.only_default_policy or min(seen.values()) > 0, seen


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

    def _preempt(self, step: StepBuilder, entry: Entry) -> None:
        num_computed = entry.request.num_computed_tokens
        super()._preempt(step, entry)
        entry.request.num_computed_tokens = num_computed


class VictimGoesLast(QueueScheduler):
    """Sends a victim to the end of the queue."""

    def _preempt(self, step: StepBuilder, entry: Entry) -> None:
        super()._preempt(step, entry)
        self._waiting.remove(entry)
        self._waiting.add(entry)


class KeepsTheVictimsShare(QueueScheduler):
    """Leaves a victim in the step that it was scheduled in."""

    def _preempt(self, step: StepBuilder, entry: Entry) -> None:
        number = entry.step
        super()._preempt(step, entry)
        entry.step = number


class LastComeFirstServed(QueueScheduler):
    """Admits the latest arrival first."""

    def _candidates(self, step: StepBuilder) -> Any:
        return iter(sorted(self._waiting, key=lambda entry: -entry.sequence))


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
            self._admit(step)


class ComputesOneTwice(QueueScheduler):
    """Forgets the last token of a chunk."""

    def update(self, plan: StepPlan, sampled: Any, now: float) -> Any:
        finished = super().update(plan, sampled, now)
        for item in plan.scheduled:
            entry = self._live.get(item.request_id)
            if entry is not None and item.num_new_tokens > 2:
                entry.request.num_computed_tokens -= 1
        return finished


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
