"""What is refused or warned of: settings at startup, requests on arrival."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from support.queue_scheduling import build, request, run, step

from jackfield.core.errors import ConfigError, RequestError
from jackfield.core.scheduling_policy import (
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
    reject,
)


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


def test_chunk_limit_without_chunking_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold=8.*enable_chunked_prefi"):
        build(chunk=8, chunked=False)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_limits_below_one_are_refused(which: int) -> None:
    limits = [64, 8, 1000, 16]
    limits[which] = 0
    with pytest.raises(ConfigError, match=r"=0 must be at least 1"):
        build(budget=limits[0], seats=limits[1], max_model_len=limits[2], chunk=limits[3])


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
