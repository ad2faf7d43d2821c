"""Preemption by swap: modes, order of return, full swap space, aborts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pytest

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.errors import ConfigError, PluginError
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

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


class Scripted(SchedulingPolicy):
    """Proposes what the test puts in, and remembers what it is told."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.next = Proposal()
        self.modes: dict[str, PreemptionMode | None] | None = None
        self.told: list[tuple[str, PreemptionMode]] = []

    def propose(self, view: SchedulerView) -> Proposal:
        return self.next

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode | None]]:
        if self.modes is None:
            return super().victims(view, beneficiary, candidates)
        return self.modes.items()

    def on_preempt(self, view: SchedulerView, request_id: str, mode: PreemptionMode) -> None:
        self.told.append((request_id, mode))


def build(
    num_blocks: int = 5,
    host: int = 8,
    mode: Literal["recompute", "swap", "auto"] = "swap",
    prompts: Sequence[int] = (8, 8),
    strict: bool = False,
    watermark: float = 0.0,
    seats: int = 8,
    budget: int = 64,
) -> tuple[QueueScheduler, Scripted]:
    """Requests r0, r1 ... with their prompts computed; blocks of 4, of which few are left."""
    policy = Scripted()
    scheduler = QueueScheduler(
        SchedulerConfig(budget, seats, 200, strict_policy=strict, preemption_mode=mode),
        PagedBlockManager(BlockManagerConfig(num_blocks, 4, 200, watermark, host)),
        policy,
    )
    for index, prompt in enumerate(prompts):
        add(scheduler, f"r{index}", prompt)
    if prompts:
        step(scheduler)
    return scheduler, policy


def add(scheduler: QueueScheduler, name: str, prompt: int, completion: int = 8) -> Request:
    item = Request(name, [1] * prompt, SamplingParams(), 0.0, 0, prompt + completion)
    scheduler.add(item, 0.0)
    return item


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


def test_a_victim_keeps_its_progress_and_comes_back_before_newcomers() -> None:
    scheduler, policy = build()
    add(scheduler, "new", 4)
    plan = step(scheduler)
    assert (plan.preempted, plan.swapped_out) == (("r1",), ("r1",))
    assert [item.request_id for item in plan.scheduled] == ["r0"]
    assert plan.num_copies(MoveKind.SWAP_OUT) == 2
    assert policy.told == [("r1", SWAP)]
    victim = scheduler.get("r1")
    assert victim is not None
    assert (victim.num_computed_tokens, victim.num_preemptions) == (8, 1)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.swapped, stats.num_swaps) == (1, 1, 1, 1)
    scheduler.finish("r0")
    plan = step(scheduler)
    assert plan.swapped_in == ("r1",)
    assert [item[:3] for item in plan.scheduled] == [("r1", 8, 1), ("new", 0, 4)]
    assert [move.kind for move in plan.moves] == [MoveKind.SWAP_IN]
    drain(scheduler)
    assert victim.num_generated_tokens == 8


def test_nobody_overtakes_a_swapped_request_unless_skips_allow_it() -> None:
    for skips in (0, 1):
        scheduler, policy = build(num_blocks=5)
        step(scheduler)  # r1 is swapped, and r0 has 3 of 5 blocks
        add(scheduler, "new", 4)
        policy.next = Proposal(max_skips=skips)
        names = [item.request_id for item in step(scheduler).scheduled]
        assert names == ["r0", "new"][: 1 + skips]
        drain(scheduler)


def test_the_watermark_is_kept_on_return_while_others_run() -> None:
    scheduler, policy = build(num_blocks=10, watermark=0.2)
    policy.next = Proposal(preempt=["r1"])
    step(scheduler)
    policy.next = Proposal()
    add(scheduler, "big", 12)
    assert "r1" in step(scheduler).swapped_in
    policy.next = Proposal(preempt=["r1"])
    step(scheduler)
    scheduler, policy = build(num_blocks=6, watermark=0.2)
    policy.next = Proposal(preempt=["r1"])
    step(scheduler)  # r0 has 3 of 6 blocks, r1 needs 3, and 1 must be left
    policy.next = Proposal()
    assert step(scheduler).swapped_in == ()
    scheduler.finish("r0")
    assert step(scheduler).swapped_in == ("r1",)


def test_a_full_swap_space_falls_back_to_recomputation_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S21."""
    scheduler, policy = build(num_blocks=8, host=1, prompts=(8, 8, 8))
    with caplog.at_level(logging.WARNING, "jackfield"):
        plans = drain(scheduler)
    assert policy.told
    assert {mode for _, mode in policy.told} == {RECOMPUTE}
    assert not any(plan.swapped_out for plan in plans)
    messages = [r.getMessage() for r in caplog.records if "swap space" in r.getMessage()]
    assert len(messages) == 1
    assert "no room for the 2 blocks" in messages[0]
    assert "0 of 1 are in use" in messages[0]


MODES: list[tuple[Any, PreemptionMode | None, PreemptionMode]] = [
    ("recompute", None, RECOMPUTE),
    ("recompute", SWAP, SWAP),
    ("swap", None, SWAP),
    ("swap", RECOMPUTE, RECOMPUTE),
    ("auto", None, SWAP),
    ("auto", RECOMPUTE, RECOMPUTE),
]


@pytest.mark.parametrize(("configured", "wished", "expected"), MODES)
@pytest.mark.parametrize("proactive", [False, True])
def test_the_policy_decides_the_mode_and_else_the_setting(
    configured: Any, wished: PreemptionMode | None, expected: PreemptionMode, proactive: bool
) -> None:
    scheduler, policy = build(num_blocks=9 if proactive else 5, mode=configured)
    if proactive:
        modes = {} if wished is None else {"r0": wished}
        policy.next = Proposal(preempt=["r0"], preemption_modes=modes)
    else:
        policy.modes = {"r0": wished}
    plan = step(scheduler)
    assert policy.told == [("r0", expected)]
    assert plan.preempted == ("r0",)
    assert plan.swapped_out == (("r0",) if expected is SWAP else ())
    assert plan.clipped == ()
    policy.next, policy.modes = Proposal(), None
    drain(scheduler)


def test_auto_computes_anew_what_others_hold_or_what_fills_no_block() -> None:
    scheduler, policy = build(num_blocks=12, mode="auto", prompts=(3,))
    policy.next = Proposal(preempt=["r0"])
    step(scheduler)
    assert policy.told == [("r0", RECOMPUTE)]
    scheduler, policy = build(num_blocks=12, mode="auto", prompts=())
    for index in range(2):
        item = Request(f"g{index}", [1] * 9, SamplingParams(n=2), 0.0, 0, 20, parent_id="g")
        scheduler.add(item, 0.0)
    step(scheduler)
    step(scheduler)
    policy.next = Proposal(preempt=["g1"])
    step(scheduler)
    assert policy.told == [("g1", RECOMPUTE)]


def test_a_swap_without_swap_space_is_reported_or_raises() -> None:
    for proposal in (Proposal(preempt=["r0"], preemption_modes={"r0": SWAP}),):
        scheduler, policy = build(num_blocks=9, host=0, mode="recompute")
        policy.next = proposal
        plan = step(scheduler)
        assert "there is no swap space" in plan.clipped[0]
        assert policy.told == [("r0", RECOMPUTE)]
        scheduler, policy = build(num_blocks=9, host=0, mode="recompute", strict=True)
        policy.next = proposal
        with pytest.raises(PluginError, match=r"no swap space.*strict_policy"):
            scheduler.schedule(0.0)


@pytest.mark.parametrize(
    ("proposal", "sentence"),
    [
        (Proposal(resume_order=["r0"]), "resume_order names 'r0', which is not swapped"),
        (Proposal(admission_order=["r1"]), "admission_order names 'r1', which is not waiting"),
        (Proposal(preemption_modes={"r0": SWAP}), "preemption_modes names 'r0', which is not pree"),
        (
            Proposal(preempt=["r0"], preemption_modes={"r0": "swap"}),  # type: ignore[dict-item]
            "preemption_modes['r0']='swap' is no PreemptionMode",
        ),
    ],
)
def test_the_impossible_is_reported(proposal: Proposal, sentence: str) -> None:
    scheduler, policy = build(num_blocks=12, mode="recompute")
    policy.next = Proposal(preempt=["r1"], preemption_modes={"r1": SWAP})
    step(scheduler)
    policy.next = proposal
    assert step(scheduler).clipped[0].startswith(sentence)


def test_the_policy_may_order_the_return_and_hold_it_back() -> None:
    scheduler, policy = build(num_blocks=12, prompts=(8, 8, 8))
    policy.next = Proposal(preempt=["r0", "r1"])
    step(scheduler)
    view = scheduler._view
    assert [request.request_id for request in view.swapped()] == ["r0", "r1"]
    assert (view.num_swapped, view.num_running, view.num_blocks_of("r0")) == (2, 1, 0)
    policy.next = Proposal(resume_order=[])
    assert step(scheduler).swapped_in == ()
    policy.next = Proposal(resume_order=["r1", "r0"])
    assert step(scheduler).swapped_in == ("r1", "r0")


def test_holding_everybody_back_gives_way() -> None:
    scheduler, policy = build(num_blocks=12, prompts=(8,))
    policy.next = Proposal(preempt=["r0"])
    plan = step(scheduler)
    assert (plan.scheduled, plan.swapped_out) == ((), ("r0",))
    assert plan.num_copies(MoveKind.SWAP_OUT) == 2
    policy.next = Proposal(resume_order=[])
    plan = step(scheduler)
    assert "leaves nothing to run" in plan.clipped[0]
    assert plan.swapped_in == ("r0",)


def test_moves_of_a_step_that_failed_are_in_the_next_plan() -> None:
    class Failing(Scripted):
        def on_preempt(self, view: SchedulerView, request_id: str, mode: PreemptionMode) -> None:
            raise ZeroDivisionError("of the test")

    scheduler, _ = build(num_blocks=12)
    policy = Failing()
    scheduler._guard._policy = policy
    policy.next = Proposal(preempt=["r1"])
    with pytest.raises(PluginError, match="on_preempt"):
        scheduler.schedule(0.0)
    policy.next = Proposal(resume_order=[])
    plan = step(scheduler)
    assert plan.num_copies(MoveKind.SWAP_OUT) == 2
    assert step(scheduler).moves == ()


def test_abort_of_a_swapped_request_leaves_nothing() -> None:
    """B022, swapped out."""
    for _ in range(50):
        scheduler, _ = build()
        step(scheduler)
        assert scheduler.block_manager.usage().host_used == 2
        assert scheduler.finish("r1")
        assert not scheduler.finish("r1")
        assert scheduler.block_manager.usage().host_used == 0
        assert scheduler.stats().swapped == 0
        drain(scheduler)


def test_swapping_without_swap_space_is_refused_at_startup() -> None:
    config = SchedulerConfig(8, 8, 100, preemption_mode="swap")
    for manager in (PagedBlockManager, ContiguousBlockManager):
        with pytest.raises(ConfigError, match=r"preemption_mode='swap'.*set swap_space"):
            QueueScheduler(config, manager(BlockManagerConfig(30, 4, 100)), Scripted())
    nonsense: Any = "sometimes"
    config = SchedulerConfig(8, 8, 100, preemption_mode=nonsense)
    with pytest.raises(ConfigError, match="preemption_mode='sometimes' is none of"):
        QueueScheduler(config, PagedBlockManager(BlockManagerConfig(30, 4, 100)), Scripted())
