"""What a policy may propose, what becomes of the impossible, and what becomes of its exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import pytest

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.errors import PluginError
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import SchedulerConfig, StepPlan
from jackfield.core.scheduling_policy import PreemptionMode, Proposal, SchedulingPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler


class Scripted(SchedulingPolicy):
    """Proposes what the test puts in; methods named in ``broken`` raise."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.next: Any = Proposal()
        self.next_victims: Any = None
        self.broken: str | None = None

    def _maybe_break(self, method: str) -> None:
        if method == self.broken:
            raise ZeroDivisionError("of the test")

    def on_arrival(self, view: Any, request: Any) -> Any:
        self._maybe_break("on_arrival")
        return super().on_arrival(view, request)

    def propose(self, view: Any) -> Any:
        self._maybe_break("propose")
        return self.next

    def victims(self, view: Any, beneficiary: str, candidates: Sequence[str]) -> Any:
        self._maybe_break("victims")
        if self.next_victims is not None:
            return self.next_victims
        return super().victims(view, beneficiary, candidates)

    def on_progress(self, view: Any, progress: Any) -> None:
        self._maybe_break("on_progress")

    def on_preempt(self, view: Any, request_id: str, mode: PreemptionMode) -> None:
        self._maybe_break("on_preempt")

    def on_finish(self, view: Any, request_id: str) -> None:
        self._maybe_break("on_finish")


def build(
    running: Sequence[int] = (),
    waiting: Sequence[int] = (),
    num_blocks: int = 64,
    chunk: int | None = None,
    chunked: bool = True,
    strict: bool = False,
) -> tuple[QueueScheduler, Scripted]:
    """Requests r0, r1 ... running with those prompts, and w0, w1 ... waiting; blocks of 4."""
    policy = Scripted()
    scheduler = QueueScheduler(
        SchedulerConfig(16, 6, 200, chunk, chunked, strict),
        PagedBlockManager(BlockManagerConfig(num_blocks, 4, 200, 0.0)),
        policy,
    )
    for index, prompt in enumerate(running):
        add(scheduler, f"r{index}", prompt)
    while scheduler.stats().waiting or any(
        item.num_tokens_to_compute > 1 for item in requests(scheduler, "r", len(running))
    ):
        carry_out(scheduler, scheduler.schedule(0.0))
    for index, prompt in enumerate(waiting):
        add(scheduler, f"w{index}", prompt)
    return scheduler, policy


def add(scheduler: QueueScheduler, name: str, prompt: int) -> None:
    total = min(prompt + 20, scheduler.block_manager.largest_request())
    scheduler.add(Request(name, [1] * prompt, SamplingParams(), 0.0, 0, total), 0.0)


def requests(scheduler: QueueScheduler, prefix: str, count: int) -> list[Request]:
    found = [scheduler.get(f"{prefix}{index}") for index in range(count)]
    return [item for item in found if item is not None]


def carry_out(scheduler: QueueScheduler, plan: StepPlan) -> None:
    scheduler.update(plan, {item.request_id: 7 for item in plan.scheduled}, 0.0)


def shares(plan: StepPlan) -> dict[str, int]:
    return {item.request_id: item.num_new_tokens for item in plan.scheduled}


def only(plan: StepPlan) -> str:
    assert len(plan.clipped) == 1, plan.clipped
    return plan.clipped[0]


POSSIBLE: list[tuple[Proposal, dict[str, int]]] = [
    (Proposal(), {"r0": 1, "r1": 1, "w0": 6, "w1": 2, "w2": 6}),
    (Proposal(admission_order=["w1", "w0"]), {"r0": 1, "r1": 1, "w1": 2, "w0": 6}),
    (Proposal(max_admissions=1), {"r0": 1, "r1": 1, "w0": 6}),
    (Proposal(running_order=["r1"]), {"r1": 1, "r0": 1, "w0": 6, "w1": 2, "w2": 6}),
    (Proposal(grants={"w0": 3, "w2": 1}), {"r0": 1, "r1": 1, "w0": 3, "w1": 2, "w2": 1}),
    (Proposal(token_budget=5), {"r0": 1, "r1": 1, "w0": 3}),
    (Proposal(token_budget=1, running_order=["r1"]), {"r1": 1}),
    (Proposal(prefill_budget=7), {"r0": 1, "r1": 1, "w0": 6, "w1": 1}),
    (Proposal(prefill_budget=0), {"r0": 1, "r1": 1}),
    (Proposal(pause=["r0"], max_admissions=0), {"r1": 1}),
    (Proposal(preempt=["r0"], max_admissions=1), {"r1": 1, "w0": 6}),
]


@pytest.mark.parametrize(("proposal", "expected"), POSSIBLE)
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_possible_is_done(
    proposal: Proposal, expected: dict[str, int], strict: bool
) -> None:
    scheduler, policy = build(running=[4, 4], waiting=[6, 2, 9], strict=strict)
    policy.next = proposal
    plan = scheduler.schedule(0.0)
    assert list(shares(plan).items()) == list(expected.items())
    assert plan.clipped == ()
    assert plan.preempted == tuple(proposal.preempt)
    assert scheduler.stats().paused == len(proposal.pause)


def test_pause_keeps_blocks_and_lasts_one_step() -> None:
    scheduler, policy = build(running=[4, 4])
    policy.next = Proposal(pause=["r0"])
    table = scheduler.block_manager.block_table("r0").tolist()
    carry_out(scheduler, scheduler.schedule(0.0))
    assert scheduler.block_manager.block_table("r0").tolist() == table
    assert (scheduler.stats().running, scheduler.stats().paused) == (1, 1)
    policy.next = Proposal()
    assert shares(scheduler.schedule(0.0)) == {"r0": 1, "r1": 1}
    assert scheduler.stats().paused == 0


def test_skips_pass_over_what_does_not_fit() -> None:
    for skips, admitted in ((0, []), (1, ["w1"]), (2, ["w1", "w3"])):
        scheduler, policy = build(running=[4], waiting=[30, 4, 28, 4], num_blocks=8)
        policy.next = Proposal(max_skips=skips)
        plan = scheduler.schedule(0.0)
        assert [name for name in shares(plan) if name != "r0"] == admitted
        assert plan.clipped == ()


IMPOSSIBLE: list[tuple[Any, str]] = [
    (Proposal(token_budget=0), "token_budget=0 is below the minimum, 1"),
    (Proposal(token_budget=17), "token_budget=17 is above max_num_batched_tokens=16"),
    (Proposal(token_budget="5"), "token_budget='5' is not an integer: 16 holds"),  # type: ignore[arg-type]
    (Proposal(prefill_budget=-1), "prefill_budget=-1 is below the minimum, 0"),
    (Proposal(max_admissions=-2), "max_admissions=-2 is below the minimum, 0"),
    (Proposal(max_skips=-1), "max_skips=-1 is below the minimum, 0"),
    (Proposal(preempt=["w0"]), "preempt names 'w0', which is not running"),
    (Proposal(preempt=["r0", "r0"]), "preempt names 'r0', which it has named before"),
    (Proposal(pause=["x"]), "pause names 'x', which is not running"),
    (Proposal(pause=["r0"], preempt=["r0"]), "pause names 'r0', which it preempts"),
    (Proposal(running_order=["w0"]), "running_order names 'w0', which is not running"),
    (Proposal(running_order=[3]), "running_order names 3, which is not a request id"),  # type: ignore[list-item]
    (Proposal(grants={"x": 3}), "grants names 'x', which is not live"),
    (Proposal(grants={"w0": 0}), "grants['w0']=0 is below the minimum, 1"),
    (
        Proposal(grants={"w0": 9}),
        "grants['w0']=9 is above the limit, long_prefill_token_threshold=8",
    ),
    (Proposal(admission_order=["r0"]), "admission_order names 'r0', which is not waiting"),
    (Proposal(admission_order=["w0", "w0"]), "admission_order names 'w0', which it has named befo"),
    (
        Proposal(admission_order=["r0"], preempt=["r0"]),
        "admission_order names 'r0', which this step preempted",
    ),
]


@pytest.mark.parametrize(("proposal", "sentence"), IMPOSSIBLE)
def test_the_impossible_is_clipped_and_reported_or_raises(
    proposal: Proposal, sentence: str
) -> None:
    scheduler, policy = build(running=[4, 4], waiting=[6], chunk=8)
    policy.next = proposal
    plan = scheduler.schedule(0.0)
    assert only(plan).startswith(sentence)
    assert plan.scheduled
    scheduler, policy = build(running=[4, 4], waiting=[6], chunk=8, strict=True)
    policy.next = proposal
    with pytest.raises(PluginError, match=r"'scripted': .*strict_policy") as caught:
        scheduler.schedule(0.0)
    assert sentence in str(caught.value)
    assert_unharmed(scheduler, policy)


def assert_unharmed(scheduler: QueueScheduler, policy: Scripted) -> None:
    """Whatever went wrong, everybody is served when the policy behaves again."""
    policy.next, policy.next_victims, policy.broken = Proposal(), None, None
    for _ in range(300):
        if not scheduler.has_unfinished():
            break
        carry_out(scheduler, scheduler.schedule(0.0))
    assert not scheduler.has_unfinished()
    usage = scheduler.block_manager.usage()
    assert usage.free == usage.total


def test_reports_come_in_a_fixed_order() -> None:
    scheduler, policy = build(running=[4, 4], waiting=[6])
    policy.next = Proposal(
        admission_order=["a"],
        max_skips=-1,
        max_admissions=-1,
        running_order=["o"],
        grants={"g": 1},
        token_budget=99,
        prefill_budget=99,
        pause=["p"],
        preempt=["e"],
    )
    fields = [sentence.split()[0].split("=")[0] for sentence in scheduler.schedule(0.0).clipped]
    assert fields == [
        "token_budget",
        "prefill_budget",
        "max_admissions",
        "max_skips",
        "preempt",
        "pause",
        "running_order",
        "grants",
    ]  # with no admissions the admission order is not even read


EMPTYING = [
    Proposal(pause=["r0", "r1"], max_admissions=0),
    Proposal(pause=["r0", "r1"], admission_order=[]),
    Proposal(preempt=["r0", "r1"], max_admissions=0),
]


@pytest.mark.parametrize("proposal", EMPTYING)
def test_a_proposal_that_leaves_nothing_to_run_gives_way(proposal: Proposal) -> None:
    scheduler, policy = build(running=[4, 4], waiting=[6])
    policy.next = proposal
    plan = scheduler.schedule(0.0)
    assert "leaves nothing to run although 3 requests are live" in only(plan)
    assert set(shares(plan)) == {"r0", "r1", "w0"} - set(proposal.preempt)
    strict, policy = build(running=[4, 4], waiting=[6], strict=True)
    policy.next = proposal
    with pytest.raises(PluginError, match="leaves nothing to run"):
        strict.schedule(0.0)
    assert_unharmed(strict, policy)


def test_preempting_everybody_empties_one_step_only() -> None:
    scheduler, policy = build(running=[4, 4])
    policy.next = Proposal(preempt=["r0", "r1"])
    plan = scheduler.schedule(0.0)
    assert (plan.scheduled, plan.preempted) == ((), ("r0", "r1"))
    carry_out(scheduler, plan)
    assert shares(scheduler.schedule(0.0)) == {"r0": 5, "r1": 5}


def test_a_policy_that_preempts_for_ever_cannot_stop_progress() -> None:
    """A victim is left alone until it has passed the point that it had reached before."""
    scheduler, policy = build(running=[40], chunk=4)
    policy.next = Proposal(preempt=["r0"])
    request = scheduler.get("r0")
    assert request is not None
    for _ in range(2000):
        if not scheduler.has_unfinished():
            break
        carry_out(scheduler, scheduler.schedule(0.0))
    assert request.num_generated_tokens == 20
    assert request.num_preemptions > 5


def test_whole_prompts_ignore_grants_and_wait_for_budget() -> None:
    scheduler, policy = build(running=[4], waiting=[6], chunked=False)
    policy.next = Proposal(grants={"w0": 2})
    plan = scheduler.schedule(0.0)
    assert only(plan).startswith("grants['w0']=2 would split a prompt of 6 tokens")
    assert shares(plan) == {"r0": 1, "w0": 6}
    for limits in (Proposal(token_budget=6), Proposal(prefill_budget=5)):
        scheduler, policy = build(running=[4], waiting=[6], chunked=False)
        policy.next = limits
        assert shares(scheduler.schedule(0.0)) == {"r0": 1}


def full_house(strict: bool = False) -> tuple[QueueScheduler, Scripted]:
    """Two requests of 8 tokens that need a third block each in the next step, and one is free."""
    return build(running=[8, 8], num_blocks=5, strict=strict)


VICTIMS: list[tuple[Callable[[], Iterable[Any]], tuple[str, ...], list[str]]] = [
    (lambda: [("r0", PreemptionMode.RECOMPUTE)], ("r0",), []),
    (lambda: [("r1", PreemptionMode.RECOMPUTE)], ("r1",), []),
    (list, ("r1",), ["victims names too few for 'r1'"]),
    (lambda: [("r0", PreemptionMode.SWAP)], ("r0",), ["there is no swap space"]),
    (
        lambda: [("x", PreemptionMode.RECOMPUTE), ("r0", PreemptionMode.RECOMPUTE)],
        ("r0",),
        ["victims names 'x', which is not running"],
    ),
]


@pytest.mark.parametrize(("victims", "preempted", "sentences"), VICTIMS)
def test_victims(
    victims: Callable[[], Iterable[Any]], preempted: tuple[str, ...], sentences: list[str]
) -> None:
    scheduler, policy = full_house()
    policy.next_victims = victims()
    plan = scheduler.schedule(0.0)
    assert plan.preempted == preempted
    assert set(shares(plan)) == {"r0", "r1"} - set(preempted)
    assert len(plan.clipped) == len(sentences)
    assert all(part in whole for part, whole in zip(sentences, plan.clipped, strict=True))
    if sentences:
        scheduler, policy = full_house(strict=True)
        policy.next_victims = victims()
        with pytest.raises(PluginError, match="strict_policy"):
            scheduler.schedule(0.0)
        assert_unharmed(scheduler, policy)


def test_endless_names_come_to_an_end() -> None:
    scheduler, policy = build(running=[4], waiting=[4])
    policy.next = Proposal(admission_order=repeat("nobody"))
    plan = scheduler.schedule(0.0)
    assert plan.clipped[-1] == "admission_order is cut off after 100 useless names"
    assert shares(plan) == {"r0": 1}
    scheduler, policy = full_house()
    policy.next_victims = repeat(("nobody", PreemptionMode.RECOMPUTE))
    assert scheduler.schedule(0.0).preempted == ("r1",)


@pytest.mark.parametrize("broken", ["propose", "victims", "on_preempt"])
def test_an_exception_in_planning_names_policy_and_method(broken: str) -> None:
    scheduler, policy = full_house()
    before = scheduler.stats()
    policy.broken = broken
    with pytest.raises(PluginError, match=f"'scripted' failed in {broken}: ZeroDivisionError: of"):
        scheduler.schedule(0.0)
    if broken == "propose":
        assert scheduler.stats() == before
    assert_unharmed(scheduler, policy)


def test_an_exception_in_a_lazy_order_undoes_the_admissions() -> None:
    def order() -> Iterable[str]:
        yield "w1"
        raise ZeroDivisionError("of the test")

    scheduler, policy = build(running=[4], waiting=[4, 4])
    before, used = scheduler.stats(), scheduler.block_manager.usage().used
    policy.next = Proposal(admission_order=order())
    with pytest.raises(PluginError, match="'scripted' failed in propose: ZeroDivisionError"):
        scheduler.schedule(0.0)
    assert scheduler.stats() == before
    assert scheduler.block_manager.usage().used == used + 1  # r0 has room for its next token
    assert_unharmed(scheduler, policy)


@pytest.mark.parametrize("broken", ["on_arrival", "on_progress", "on_finish"])
def test_an_exception_in_a_notice_leaves_the_state_right(broken: str) -> None:
    scheduler, policy = build(running=[4, 4])
    policy.broken = broken
    calls: dict[str, Callable[[], object]] = {
        "on_arrival": lambda: add(scheduler, "w0", 4),
        "on_progress": lambda: carry_out(scheduler, scheduler.schedule(0.0)),
        "on_finish": lambda: scheduler.finish("r1"),
    }
    with pytest.raises(PluginError, match=f"'scripted' failed in {broken}"):
        calls[broken]()
    assert scheduler.get("w0") is None
    generated = [item.num_generated_tokens for item in requests(scheduler, "r", 2)]
    assert generated == {"on_arrival": [1, 1], "on_progress": [2, 2], "on_finish": [1]}[broken]
    assert_unharmed(scheduler, policy)


def test_a_wrong_kind_of_answer_is_attributed() -> None:
    scheduler, policy = full_house()
    policy.next = None
    with pytest.raises(PluginError, match="propose must return a Proposal, got None"):
        scheduler.schedule(0.0)
    policy.next = Proposal(grants=[1])  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"grants are a mapping, got \[1\]"):
        scheduler.schedule(0.0)
    policy.next = Proposal(pause=5)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="failed in propose: TypeError"):
        scheduler.schedule(0.0)
    policy.next, policy.next_victims = Proposal(), ["r0"]
    with pytest.raises(PluginError, match=r"victims must return pairs .*, got 'r0'"):
        scheduler.schedule(0.0)
    assert_unharmed(scheduler, policy)
