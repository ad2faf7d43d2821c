"""The built-in scheduler in tiny worlds under any policy."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from support.scheduler_machine import DefaultPolicyMachine, SchedulerMachine
from support.scheduler_wishes import Wish, random_wish

from jackfield.core.scheduler import MoveKind

SEEDS = 100

TestAnyPolicy = SchedulerMachine.TestCase
TestAnyPolicy.settings = settings(deadline=None, max_examples=60, stateful_step_count=15)
TestDefaultPolicy = DefaultPolicyMachine.TestCase
TestDefaultPolicy.settings = settings(deadline=None, max_examples=60, stateful_step_count=15)


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
        seen["swaps"] += machine.num_swaps
        for plan in machine.plans:
            seen["forks"] += len(plan.forked)
            seen["returns"] += len(plan.swapped_in)
            seen["prefix hits"] += len(plan.prefix_hits)
            seen["copies"] += plan.num_copies(MoveKind.COPY)
        sentences = [sentence for plan in machine.plans for sentence in plan.clipped]
        for event in ("nothing to run", "no swap space", "too few", "not passed", "would split"):
            seen[event] += sum(event in sentence for sentence in sentences)
    assert seen["preemptions"] >= SEEDS, seen
    for event in ("swaps", "forks", "returns", "prefix hits", "copies"):
        assert seen[event] >= SEEDS / 4, seen
    assert world.only_default_policy or min(seen.values()) > 0, seen
