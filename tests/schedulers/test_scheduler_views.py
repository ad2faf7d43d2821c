"""What policies see of the queues, and how little a step asks of its parts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.queue_scheduling import build, request, run, shares, step

from jackfield.core.block_manager import BlockCopy
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.scheduling_policy import Proposal, SchedulerView, SchedulingPolicy
from jackfield.schedulers.entry import TokenSequence


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
