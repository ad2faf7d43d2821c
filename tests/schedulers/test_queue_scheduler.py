"""Published scheduler faults, limits on arrival, and the work that a step may cost."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from jackfield.core.block_manager import BlockCopy, BlockManagerConfig, BlockUsage
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.errors import CapacityError, ConfigError, RequestError
from jackfield.core.request import FinishReason, Request, SchedulingHints
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import SchedulerConfig, StepPlan
from jackfield.core.scheduling_policy import (
    PreemptionMode,
    Proposal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
    reject,
)
from jackfield.schedulers.entry import TokenSequence
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler


def request(name: str, prompt: int, completion: int = 4, priority: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(100, 100 + prompt)),
        params=SamplingParams(),
        arrival_time=0.0,
        arrival_index=0,
        max_total_tokens=prompt + completion,
        stop_token_ids=frozenset({2}),
        hints=SchedulingHints(priority=priority),
    )


def build(
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    seats: int = 8,
    max_model_len: int = 1000,
    policy: SchedulingPolicy | None = None,
    chunk: int | None = None,
    chunked: bool = True,
    manager: type[PagedBlockManager] = PagedBlockManager,
) -> QueueScheduler:
    return QueueScheduler(
        SchedulerConfig(budget, seats, max_model_len, chunk, chunked),
        manager(BlockManagerConfig(num_blocks, block_size, max_model_len, 0.0)),
        policy or FcfsPolicy(),
    )


def shares(plan: StepPlan) -> dict[str, int]:
    return {item.request_id: item.num_new_tokens for item in plan.scheduled}


def step(scheduler: QueueScheduler, token: int = 7) -> StepPlan:
    plan = scheduler.schedule(0.0)
    sampled = {item.request_id: token for item in plan.scheduled if item.samples}
    scheduler.update(plan, sampled, 0.0)
    return plan


def run(scheduler: QueueScheduler, most: int = 1000) -> list[StepPlan]:
    plans = []
    while scheduler.has_unfinished():
        plans.append(step(scheduler))
        assert len(plans) < most, "does not come to an end"
    return plans


class PriorityPolicy(SchedulingPolicy):
    """Smaller numbers keep their blocks."""

    name = "test-priority"

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode]]:
        worst_first = sorted(candidates, key=lambda name: -view.request(name).hints.priority)
        return [(name, PreemptionMode.RECOMPUTE) for name in worst_first]


def test_a_request_that_never_fits_is_refused_and_blocks_nobody() -> None:
    """B016."""
    scheduler = build(num_blocks=8, block_size=16)
    scheduler.add(request("a", 10, 8), 0.0)
    with pytest.raises(RequestError, match=r"207 tokens of KV cache, which has room for 128.*num_"):
        scheduler.add(request("long", 200, 8), 0.0)
    scheduler.add(request("b", 10, 8), 0.0)
    assert scheduler.get("long") is None
    assert len(run(scheduler)) == 8


def test_a_request_that_just_fits_alone_runs_to_its_end() -> None:
    scheduler = build(num_blocks=8, block_size=16)
    scheduler.add(request("whole", 120, 9), 0.0)
    plans = run(scheduler)
    assert sum(len(plan.preempted) for plan in plans) == 0
    with pytest.raises(RequestError, match="129 tokens of KV cache, which has room for 128"):
        scheduler.add(request("more", 120, 10), 0.0)


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


def test_chunk_limit_without_chunking_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold=8.*enable_chunked_prefi"):
        build(chunk=8, chunked=False)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_limits_below_one_are_refused(which: int) -> None:
    limits = [64, 8, 1000, 16]
    limits[which] = 0
    with pytest.raises(ConfigError, match=r"=0 must be at least 1"):
        build(budget=limits[0], seats=limits[1], max_model_len=limits[2], chunk=limits[3])


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


def test_live_id_is_refused_and_free_again_afterwards() -> None:
    """B021."""
    scheduler = build()
    first = request("x", 10, 20)
    scheduler.add(first, 0.0)
    step(scheduler)
    before = scheduler.stats()
    with pytest.raises(RequestError, match="'x' is live already"):
        scheduler.add(request("x", 2), 0.0)
    assert scheduler.stats() == before
    run(scheduler)
    assert first.num_generated_tokens == 20
    scheduler.add(request("x", 2, 3), 0.0)
    assert len(run(scheduler)) == 3


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


@pytest.mark.parametrize(
    ("prompt", "total", "named"),
    [
        (0, 4, "empty prompt"),
        (20, 21, r"20 tokens.*max_model_len=20"),
        (5, 21, r"max_total_tokens=21.*max_model_len=20"),
        (5, 5, "max_total_tokens=5"),
    ],
)
def test_impossible_lengths_are_refused(prompt: int, total: int, named: str) -> None:
    scheduler = build(max_model_len=20)
    with pytest.raises(RequestError, match=named):
        scheduler.add(request("x", prompt, total - prompt), 0.0)
    assert not scheduler.has_unfinished()


def test_a_request_object_serves_once() -> None:
    scheduler = build()
    used = request("x", 4, 2)
    scheduler.add(used, 0.0)
    run(scheduler)
    with pytest.raises(RequestError, match="serves once"):
        scheduler.add(used, 0.0)


class Doorkeeper(SchedulingPolicy):
    """Refuses long prompts."""

    name = "doorkeeper"

    def on_arrival(self, view: SchedulerView, request: RequestView) -> Verdict:
        assert view.request(request.request_id) is request
        assert view.num_waiting == 0
        if request.num_prompt_tokens > 5:
            return reject("the house is full")
        return Verdict(accepted=True)


def test_policy_may_refuse_an_arrival_with_its_reason() -> None:
    scheduler = build(policy=Doorkeeper())
    with pytest.raises(RequestError, match=r"'doorkeeper': the house is full"):
        scheduler.add(request("x", 6), 0.0)
    assert not scheduler.has_unfinished()
    scheduler.add(request("x", 5), 0.0)


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


class Counting(PagedBlockManager):
    """Counts the calls that a step makes."""

    appends = 0

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        self.appends += 1
        return super().append(request_id, num_tokens)


def test_decoding_asks_for_blocks_only_at_block_edges() -> None:
    scheduler = build(manager=Counting, block_size=8)
    scheduler.add(request("x", 8, 32), 0.0)
    run(scheduler)
    manager = scheduler.block_manager
    assert isinstance(manager, Counting)
    assert manager.appends == 4  # tokens 9, 17, 25 and 33; the 40th is never computed


class Lazy(SchedulingPolicy):
    """Orders by walking over the queue, and counts its steps."""

    name = "lazy"
    pulled = 0

    def propose(self, view: SchedulerView) -> Proposal:
        def walk() -> Iterable[str]:
            for waiting in view.waiting():
                self.pulled += 1
                yield waiting.request_id

        return Proposal(admission_order=walk())


def test_admission_order_is_pulled_no_further_than_needed() -> None:
    policy = Lazy()
    scheduler = build(policy=policy, seats=3)
    for index in range(1000):
        scheduler.add(request(f"r{index}", 4), 0.0)
    assert list(shares(step(scheduler))) == ["r0", "r1", "r2"]
    assert policy.pulled == 3
    step(scheduler)
    assert policy.pulled == 3  # no seat, no question


def test_views_are_read_only_and_live() -> None:
    seen: list[SchedulerView] = []

    class Peeking(SchedulingPolicy):
        name = "peeking"

        def propose(self, view: SchedulerView) -> Proposal:
            seen.append(view)
            return Proposal()

    scheduler = build(policy=Peeking(), budget=6, seats=1)
    scheduler.add(request("a", 8, priority=3), 0.0)
    scheduler.add(request("b", 4), 0.0)
    step(scheduler)
    view = seen[0]
    limits = (view.max_num_batched_tokens, view.max_num_seqs, view.block_size, view.step)
    assert limits == (6, 1, 4, 1)
    assert (view.num_running, view.num_waiting) == (1, 1)
    a = next(iter(view.running()))
    facts = (a.request_id, a.num_prompt_tokens, a.num_computed_tokens, a.num_tokens_to_compute)
    assert facts == ("a", 8, 6, 2)
    assert (a.max_total_tokens, a.num_generated_tokens, a.num_preemptions) == (12, 0, 0)
    assert (a.arrival_time, a.arrival_index, a.hints.priority) == (0.0, 0, 3)
    assert (view.num_blocks_of("a"), view.num_blocks_of("b")) == (2, 0)
    assert view.match_prefix("b") == 0
    for name in ("num_computed_tokens", "request_id", "colour"):
        with pytest.raises(AttributeError):
            setattr(a, name, 1)
    with pytest.raises(KeyError):
        view.request("nobody")


def test_token_sequence_is_prompt_and_completion() -> None:
    item = request("x", 5)
    tokens = TokenSequence(item)
    item.output_token_ids.extend([1, 2, 3])
    whole = item.token_ids
    assert (len(tokens), list(tokens)) == (8, whole)
    assert [tokens[index] for index in range(-8, 8)] == whole * 2
    bounds = (None, -9, -3, 0, 2, 5, 6, 9)
    for start in bounds:
        for stop in bounds:
            for stride in (None, 1, 2, -1):
                assert tokens[start:stop:stride] == whole[start:stop:stride]
    for index in (8, -9):
        with pytest.raises(IndexError):
            tokens[index]


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


RELATIONS = [
    (
        {"chunk": 65, "budget": 64},
        r"long_prefill_token_threshold=65 limits nothing.*max_num_batched_tokens=64",
    ),
    ({"chunk": 1}, r"long_prefill_token_threshold=1 computes prompts one token per step"),
    (
        {"budget": 4, "seats": 8},
        r"max_num_batched_tokens=4 is below max_num_seqs=8.*raise max_num_batched_tokens",
    ),
    (
        {"budget": 64, "chunked": False},
        r"max_num_batched_tokens=64 is below max_model_len=1000: prompts of more than 64 tokens",
    ),
]


@pytest.mark.parametrize(("limits", "sentence"), RELATIONS)
def test_what_works_badly_is_said_once_and_works(
    limits: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jackfield"):
        scheduler = build(**limits)
        for index in range(6):
            scheduler.add(request(f"r{index}", 9, 3), 0.0)
        run(scheduler)
    (record,) = caplog.records
    assert re.search(sentence, record.getMessage())


def test_good_relations_are_met_with_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jackfield"):
        build(chunk=32, budget=64, seats=64)
        build(budget=1000, chunked=False)
    assert not caplog.records


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
