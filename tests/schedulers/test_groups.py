"""Completions of one prompt: who computes it, who shares it, and what becomes of the others."""

from __future__ import annotations

import pytest

from jackfield.core.block_manager import BlockManager, BlockManagerConfig
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import MoveKind, SchedulerConfig, StepPlan
from jackfield.core.scheduling_policy import (
    PreemptionMode,
    Proposal,
    SchedulerView,
    SchedulingPolicy,
)
from jackfield.schedulers.queue_scheduler import QueueScheduler


class Scripted(SchedulingPolicy):
    """Proposes what the test puts in."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.next = Proposal()

    def propose(self, view: SchedulerView) -> Proposal:
        return self.next


def build(
    num_blocks: int = 64,
    seats: int = 8,
    budget: int = 64,
    host: int = 0,
    chunked: bool = True,
    prefix_caching: bool = False,
    manager: type[BlockManager] = PagedBlockManager,
) -> tuple[QueueScheduler, Scripted]:
    policy = Scripted()
    scheduler = QueueScheduler(
        SchedulerConfig(budget, seats, 200, enable_chunked_prefill=chunked),
        manager(BlockManagerConfig(num_blocks, 4, 200, 0.0, host, prefix_caching)),
        policy,
    )
    return scheduler, policy


def add(
    scheduler: QueueScheduler, parent: str, prompt: int, n: int = 3, completion: int = 6
) -> list[Request]:
    group = [
        Request(
            f"{parent}{index}" if n > 1 else parent,
            list(range(100, 100 + prompt)),
            SamplingParams(n=n),
            0.0,
            0,
            prompt + completion,
            parent_id=parent,
            index=index,
        )
        for index in range(n)
    ]
    for item in group:
        scheduler.add(item, 0.0)
    return group


def step(scheduler: QueueScheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, {item.request_id: 7 for item in plan.scheduled}, 0.0)
    return plan


def drain(scheduler: QueueScheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_unfinished():
        plans.append(step(scheduler))
        assert len(plans) < 500
    usage = scheduler.block_manager.usage()
    assert (usage.available, usage.host_used) == (usage.total, 0)
    return plans


def shares(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [item[:3] for item in plan.scheduled]


@pytest.mark.parametrize("prompt", [1, 3, 8, 9])
def test_the_first_computes_the_prompt_and_the_others_fork_it(prompt: int) -> None:
    scheduler, _ = build()
    group = add(scheduler, "g", prompt)
    first = step(scheduler)
    assert shares(first) == [("g0", 0, prompt)]
    assert (scheduler.stats().running, scheduler.stats().waiting) == (3, 0)
    used = scheduler.block_manager.usage().used
    assert used == -(-prompt // 4)
    second = step(scheduler)
    assert second.forked == (("g0", "g1"), ("g0", "g2"))
    assert shares(second) == [("g0", prompt, 1), ("g1", prompt - 1, 1), ("g2", prompt - 1, 1)]
    assert [item.writes for item in second.scheduled] == [True, False, False]
    assert all(item.samples for item in second.scheduled)
    third = step(scheduler)
    assert (third.forked, [item.writes for item in third.scheduled]) == ((), [True] * 3)
    # Each has a tail of its own now; the last of them to write needs no copy.
    copied = second.num_copies(MoveKind.COPY) + third.num_copies(MoveKind.COPY)
    assert copied == (2 if prompt % 4 else 0)
    tables = [scheduler.block_manager.block_table(item.request_id).tolist() for item in group]
    full = prompt // 4
    assert all(table[:full] == tables[0][:full] for table in tables)
    assert len({table[full] for table in tables}) == 3
    drain(scheduler)
    assert [item.num_generated_tokens for item in group] == [6, 6, 6]


def test_a_long_prompt_takes_little_more_room_than_one_completion() -> None:
    peaks = {}
    for forks in (True, False):
        manager = PagedBlockManager if forks else Forkless
        scheduler, _ = build(num_blocks=300, budget=256, manager=manager)
        add(scheduler, "g", 160, n=4, completion=8)
        peak = 0
        while scheduler.has_unfinished():
            step(scheduler)
            peak = max(peak, scheduler.block_manager.usage().used)
        peaks[forks] = peak
    assert peaks == {True: 40 + 4 * 2, False: 4 * 42 - 1}  # the prompts take two steps


class Forkless(PagedBlockManager):
    """Cannot fork."""

    powers = frozenset({"prefix_caching", "swap"})


@pytest.mark.parametrize("manager", [Forkless, ContiguousBlockManager])
def test_without_forks_each_completion_computes_its_prompt(manager: type[BlockManager]) -> None:
    scheduler, _ = build(num_blocks=160, manager=manager)
    add(scheduler, "g", 8)
    assert shares(step(scheduler)) == [("g0", 0, 8), ("g1", 0, 8), ("g2", 0, 8)]
    drain(scheduler)


def test_without_forks_later_completions_find_the_prompt_in_the_cache() -> None:
    scheduler, _ = build(manager=Forkless, prefix_caching=True, budget=9)
    group = add(scheduler, "g", 9, n=2)
    step(scheduler)
    plan = step(scheduler)
    assert shares(plan)[-1] == ("g1", 8, 1)
    assert plan.prefix_hits == (("g1", 8),)
    assert [item.num_cached_tokens for item in group] == [0, 8]


def test_followers_tell_how_much_of_the_prompt_was_cached() -> None:
    scheduler, _ = build(prefix_caching=True)
    add(scheduler, "a", 12, n=1)
    drain(scheduler)
    group = add(scheduler, "g", 12)
    assert shares(step(scheduler)) == [("g0", 11, 1)]
    assert shares(step(scheduler)) == [("g0", 12, 1), ("g1", 11, 1), ("g2", 11, 1)]
    assert [item.num_cached_tokens for item in group] == [11, 11, 11]
    drain(scheduler)


def test_a_fork_that_was_admitted_before_keeps_what_it_found_then() -> None:
    scheduler, policy = build(prefix_caching=True, budget=4)
    group = add(scheduler, "g", 10, n=2)
    step(scheduler)
    policy.next = Proposal(preempt=["g0"])
    plan = step(scheduler)
    assert plan.prefix_hits == (("g1", 4),)
    policy.next = Proposal()
    assert ("g1", "g0") in [pair for plan in drain(scheduler) for pair in plan.forked]
    assert [item.num_cached_tokens for item in group] == [0, 4]


def test_a_group_waits_for_a_seat_for_each_and_keeps_its_place() -> None:
    scheduler, _ = build(seats=3)
    add(scheduler, "a", 4, n=1)
    step(scheduler)
    add(scheduler, "g", 4)
    add(scheduler, "b", 4, n=1)
    assert shares(step(scheduler)) == [("a", 4, 1)]
    scheduler.finish("a")
    assert shares(step(scheduler)) == [("g0", 0, 4)]
    assert shares(step(scheduler)) == [("g0", 4, 1), ("g1", 3, 1), ("g2", 3, 1)]
    drain(scheduler)


def test_seats_are_kept_while_the_prompt_is_computed() -> None:
    scheduler, _ = build(seats=3, budget=4)
    add(scheduler, "g", 10, n=2)
    add(scheduler, "a", 2, n=1)
    add(scheduler, "b", 2, n=1)
    plans = [step(scheduler) for _ in range(4)]
    assert shares(plans[2]) == [("g0", 8, 2), ("a", 0, 2)]
    assert shares(plans[3]) == [("g0", 10, 1), ("a", 2, 1), ("g1", 9, 1)]
    assert scheduler.stats().running == 3
    drain(scheduler)


def test_a_group_larger_than_the_seats_is_computed_in_parts() -> None:
    scheduler, _ = build(seats=2)
    group = add(scheduler, "g", 8, n=5)
    plans = drain(scheduler)
    prompts = [name for plan in plans for name, computed, new in shares(plan) if new > 1]
    assert prompts == ["g0", "g2", "g4"]
    assert [item.num_generated_tokens for item in group] == [6] * 5


def test_decodes_go_first_when_completions_are_forked() -> None:
    scheduler, _ = build(budget=8, seats=8)
    add(scheduler, "g", 4, n=4)
    add(scheduler, "long", 40, n=1)
    assert shares(step(scheduler)) == [("g0", 0, 4), ("long", 0, 4)]
    for _ in range(4):
        names = [name for name, _, _ in shares(step(scheduler))]
        assert names == ["g0", "g1", "g2", "g3", "long"]


@pytest.mark.parametrize("stage", ["waiting", "computing", "in flight", "forked", "generating"])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_abort_in_every_stage(stage: str, who: int) -> None:
    """B022, n=3: the others go on, and nothing is left."""
    for _ in range(20):
        scheduler, _ = build(budget=4)
        group = add(scheduler, "g", 10)
        plan = None
        if stage == "computing":
            step(scheduler)
        elif stage == "in flight":
            step(scheduler)
            step(scheduler)
            plan = scheduler.schedule(0.0)  # the last of the prompt
        elif stage != "waiting":
            for _ in range(3 if stage == "forked" else 5):
                step(scheduler)
        assert scheduler.finish(f"g{who}")
        assert not scheduler.finish(f"g{who}")
        if plan is not None:
            scheduler.update(plan, {"g0": 7}, 0.0)
        drain(scheduler)
        lengths = [item.num_generated_tokens for item in group]
        assert [length for index, length in enumerate(lengths) if index != who] == [6, 6]


def test_abort_of_the_leader_lets_the_next_lead() -> None:
    scheduler, _ = build(budget=4)
    add(scheduler, "g", 10)
    add(scheduler, "late", 2, n=1)
    step(scheduler)
    assert scheduler.finish("g0")
    assert scheduler.stats().waiting == 3
    assert shares(step(scheduler)) == [("g1", 0, 4)]
    plans = drain(scheduler)
    assert next(plan.forked for plan in plans if plan.forked) == (("g1", "g2"),)


def test_a_leader_that_ends_with_its_first_token_is_forked_all_the_same() -> None:
    scheduler, _ = build()
    group = add(scheduler, "g", 6, completion=1)
    step(scheduler)
    assert scheduler.get("g0") is None
    assert shares(step(scheduler)) == [("g1", 5, 1), ("g2", 5, 1)]
    assert [item.num_generated_tokens for item in group] == [1, 1, 1]
    drain(scheduler)


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_preemption_of_a_leader_before_the_fork(mode: PreemptionMode) -> None:
    scheduler, policy = build(budget=4, host=8)
    group = add(scheduler, "g", 10)
    add(scheduler, "other", 2, n=1)
    step(scheduler)
    policy.next = Proposal(preempt=["g0"], preemption_modes={"g0": mode}, max_admissions=0)
    step(scheduler)
    policy.next = Proposal()
    stats = scheduler.stats()
    if mode is PreemptionMode.SWAP:
        assert (stats.swapped, stats.waiting) == (1, 2)  # it keeps its followers
        assert shares(step(scheduler)) == [("other", 2, 1), ("g0", 4, 3)]
    else:
        assert (stats.swapped, stats.waiting) == (0, 3)
        assert shares(step(scheduler)) == [("g1", 4, 4)]  # the next one leads
    forked = [plan.forked for plan in drain(scheduler) if plan.forked]
    leads = "g0" if mode is PreemptionMode.SWAP else "g1"
    assert forked == [tuple((leads, name) for name in ("g0", "g1", "g2") if name != leads)]
    assert [item.num_generated_tokens for item in group] == [6, 6, 6]


def test_policies_see_a_group_as_one_until_it_runs() -> None:
    scheduler, policy = build(budget=6)
    add(scheduler, "g", 7)
    view = scheduler._view
    assert [request.request_id for request in view.waiting()] == ["g0", "g1", "g2"]
    policy.next = Proposal(admission_order=["g1", "g0", "g2"], max_admissions=1)
    plan = step(scheduler)
    assert shares(plan) == [("g1", 0, 6)]
    assert plan.clipped == ()
    assert (view.num_waiting, view.num_running) == (0, 1)
    policy.next = Proposal(admission_order=["g2"])
    plan = step(scheduler)
    assert "admission_order names 'g2', which waits for 'g1'" in plan.clipped[0]
    policy.next = Proposal()
    drain(scheduler)


def test_a_group_without_swap_space_in_a_small_pool() -> None:
    """B014."""
    scheduler, _ = build(num_blocks=8 * 4)
    group = add(scheduler, "g", 16, n=4, completion=40)
    add(scheduler, "small", 10, n=1)
    drain(scheduler)
    assert scheduler.stats().num_preemptions > 0
    assert [item.num_generated_tokens for item in group] == [40] * 4


def test_whole_prompts_are_computed_whole() -> None:
    scheduler, _ = build(chunked=False, budget=10, seats=4)
    add(scheduler, "g", 10)
    assert shares(step(scheduler)) == [("g0", 0, 10)]
    assert shares(step(scheduler)) == [("g0", 10, 1), ("g1", 9, 1), ("g2", 9, 1)]
    drain(scheduler)
