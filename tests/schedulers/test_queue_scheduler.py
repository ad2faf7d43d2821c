"""Published scheduler faults: budgets, preemption, aborts, and plans that come too late."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest
from support.queue_scheduling import build, request, run, shares, step

from jackfield.core.block_manager import BlockCopy, BlockManagerConfig, BlockUsage
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.errors import CapacityError, RequestError
from jackfield.core.request import FinishReason, Request, SchedulingHints
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import SchedulerConfig
from jackfield.core.scheduling_policy import PreemptionMode, SchedulerView, SchedulingPolicy
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler


class PriorityPolicy(SchedulingPolicy):
    """Smaller numbers keep their blocks."""

    name = "test-priority"

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode]]:
        worst_first = sorted(candidates, key=lambda name: -view.request(name).hints.priority)
        return [(name, PreemptionMode.RECOMPUTE) for name in worst_first]


def test_prompts_against_the_budget_without_chunking() -> None:
    """B017 (1)."""
    scheduler = build(budget=64, max_model_len=128, chunked=False)
    with pytest.raises(RequestError, match=r"65 tokens.*max_num_batched_tokens=64.*chunked_pre"):
        scheduler.add(request("long", 65), 0.0)
    scheduler.add(request("fits", 64), 0.0)
    scheduler.add(request("next", 2), 0.0)
    assert shares(step(scheduler)) == {"fits": 64}
    assert shares(step(scheduler)) == {"fits": 1, "next": 2}


def test_prompts_against_the_budget_with_chunking() -> None:
    """B017 (2) to (4)."""
    wide = build(budget=256, max_model_len=64)
    wide.add(request("a", 60), 0.0)
    wide.add(request("b", 60), 0.0)
    assert shares(step(wide)) == {"a": 60, "b": 60}
    narrow = build(budget=16)
    narrow.add(request("a", 100, 2), 0.0)
    plans = run(narrow)
    assert [plan.num_tokens for plan in plans] == [16, 16, 16, 16, 16, 16, 4, 1]
    assert [plan.scheduled[0].samples for plan in plans] == [False] * 6 + [True] * 2


def test_recomputation_past_the_budget_is_split_even_without_chunking() -> None:
    scheduler = build(num_blocks=5, block_size=2, budget=4, max_model_len=11, chunked=False)
    for name in ("a", "b"):
        scheduler.add(request(name, 2, 8), 0.0)
    plans = run(scheduler)
    assert sum(len(plan.preempted) for plan in plans) > 0
    assert max(plan.num_tokens for plan in plans) <= 4


def test_victim_that_was_scheduled_leaves_the_step() -> None:
    """B018."""
    scheduler = build(num_blocks=5, block_size=4, policy=PriorityPolicy())
    low, high = request("low", 8, 4, priority=5), request("high", 8, 4, priority=0)
    scheduler.add(low, 0.0)
    scheduler.add(high, 0.0)
    step(scheduler)
    plan = scheduler.schedule(0.0)
    assert shares(plan) == {"high": 1}
    assert plan.preempted == ("low",)
    assert plan.num_tokens == 1
    assert scheduler.block_manager.usage() == BlockUsage(total=5, used=3, cached=0, free=2)
    assert low.num_preemptions == 1
    scheduler.update(plan, {"high": 7}, 0.0)
    run(scheduler)
    assert low.output_token_ids == high.output_token_ids == [7] * 4


@pytest.mark.parametrize("budget", [200, 16])
def test_completions_are_whole_after_preemption(budget: int) -> None:
    """B019, in counts: 12 blocks of 16 and 200 of them, four prompts of 30 tokens."""
    lengths = {}
    for num_blocks in (12, 200):
        scheduler = build(num_blocks=num_blocks, block_size=16, budget=budget)
        requests = [request(f"r{index}", 30, 40) for index in range(4)]
        for item in requests:
            scheduler.add(item, 0.0)
        run(scheduler)
        lengths[num_blocks] = [item.num_generated_tokens for item in requests]
        assert (scheduler.stats().num_preemptions > 0) == (num_blocks == 12)
        assert scheduler.block_manager.usage().used == 0
    assert lengths == {12: [40] * 4, 200: [40] * 4}


def test_short_request_behind_a_long_prefill() -> None:
    """B020: with a chunk limit it starts in the next step, without one after the last chunk."""
    for chunk, bound in ((32, 1), (None, 11)):
        scheduler = build(num_blocks=300, budget=64, chunk=chunk)
        scheduler.add(request("decoding", 4, 100), 0.0)
        step(scheduler)
        scheduler.add(request("long", 640), 0.0)
        assert "long" in shares(step(scheduler))
        scheduler.add(request("short", 8), 0.0)
        waited = 0
        while True:
            waited += 1
            plan = step(scheduler)
            assert shares(plan)["decoding"] == 1
            assert plan.num_tokens <= 64
            if "short" in shares(plan):
                break
        assert waited <= bound


@pytest.mark.parametrize(
    "stage", ["queued", "between chunks", "decoding", "preempted", "in flight", "finished"]
)
def test_abort_leaves_nothing_in_any_stage(stage: str) -> None:
    """B022."""
    scheduler = build(num_blocks=6, block_size=4, budget=8)
    for _ in range(200):
        other = request("other", 8, 12)
        victim = request("victim", 4 if stage == "preempted" else 10, 8)
        if stage == "preempted":
            scheduler.add(other, 0.0)
        scheduler.add(victim, 0.0)
        plan = None
        if stage == "between chunks":
            step(scheduler)
            assert 0 < victim.num_computed_tokens < 10
        elif stage == "decoding":
            for _ in range(3):
                step(scheduler)
            assert victim.num_generated_tokens == 2
        elif stage == "preempted":
            while victim.num_preemptions == 0:
                step(scheduler)
        elif stage == "in flight":
            plan = scheduler.schedule(0.0)
        elif stage == "finished":
            run(scheduler)
        assert scheduler.finish("victim") == (stage != "finished")
        assert not scheduler.finish("victim")
        assert scheduler.get("victim") is None
        if plan is not None:
            assert scheduler.update(plan, {}, 0.0) == {}
        scheduler.finish("other")
        assert "victim" not in shares(step(scheduler))
        assert scheduler.block_manager.usage().free == 6
        assert not scheduler.has_unfinished()


def test_plan_of_an_aborted_request_does_not_touch_its_successor() -> None:
    scheduler = build()
    scheduler.add(request("x", 4), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.finish("x")
    successor = request("x", 4)
    scheduler.add(successor, 0.0)
    assert scheduler.update(plan, {"x": 7}, 0.0) == {}
    assert (successor.num_computed_tokens, successor.output_token_ids) == (0, [])
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, {"x": 7}, 0.0)
    scheduler.update(plan, {"x": 7}, 0.0)
    assert (successor.num_computed_tokens, successor.output_token_ids) == (4, [7])


def test_a_missing_token_is_an_error_and_a_stop_token_ends() -> None:
    scheduler = build()
    scheduler.add(request("x", 4), 0.0)
    plan = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="no sampled token for request 'x'"):
        scheduler.update(plan, {}, 0.0)
    assert scheduler.update(plan, {"x": 2}, 0.0) == {"x": FinishReason.STOP}
    assert scheduler.block_manager.usage().used == 0


class Miser(PagedBlockManager):
    """Declares room that it never gives."""

    def _admits(self, num_blocks: int) -> bool:
        return False

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        return None


class Tight(PagedBlockManager):
    """Admits, and lets nobody grow."""

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        return None


@pytest.mark.parametrize("manager", [Miser, Tight])
def test_a_manager_without_room_for_one_request_is_an_error(
    manager: type[PagedBlockManager],
) -> None:
    scheduler = build(manager=manager)
    scheduler.add(request("x", 4), 0.0)
    with pytest.raises(CapacityError, match=r"'x' is alone.*'paged' declares room for 256"):
        run(scheduler, most=20)


HISTORY = """
from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import SchedulerConfig
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler
manager = PagedBlockManager(BlockManagerConfig(8, 2, 16, 0.0))
scheduler = QueueScheduler(SchedulerConfig(6, 4, 16), manager, FcfsPolicy())
for index in range(9):
    prompt = [1] * (1 + index % 5)
    item = Request(f"r{index}", prompt, SamplingParams(), 0.0, index, len(prompt) + 6)
    scheduler.add(item, 0.0)
while scheduler.has_unfinished():
    plan = scheduler.schedule(0.0)
    print(plan, [manager.block_table(item.request_id) for item in plan.scheduled])
    scheduler.update(plan, {item.request_id: 1 for item in plan.scheduled}, 0.0)
print(scheduler.stats())
"""


def test_other_hash_seeds_change_no_decision() -> None:
    """S34, across processes."""
    logs = [
        subprocess.run(
            [sys.executable, "-c", HISTORY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert logs[0] == logs[1]
    assert "num_preemptions=0" not in logs[0]


def test_salts_reach_the_block_manager_and_keep_prefixes_apart() -> None:
    manager = PagedBlockManager(BlockManagerConfig(64, 4, 1000, 0.0, enable_prefix_caching=True))
    scheduler = QueueScheduler(SchedulerConfig(64, 8, 1000), manager, FcfsPolicy())
    hits = []
    for index, salt in enumerate(["", "s", "", "s", "t"]):
        item = Request(
            f"r{index}",
            range(9),
            SamplingParams(),
            0.0,
            0,
            12,
            hints=SchedulingHints(cache_salt=salt),
        )
        scheduler.add(item, 0.0)
        assert scheduler._view.match_prefix(f"r{index}") == (0 if index in (0, 1, 4) else 8)
        hits.append(dict(step(scheduler).prefix_hits).get(f"r{index}", 0))
        run(scheduler)
    assert hits == [0, 0, 8, 8, 0]
    assert manager.prefix_stats().num_hit_tokens == 16
