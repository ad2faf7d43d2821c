"""Prefix caching, groups, swap and the decision log in a whole engine, on a tiny model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import make_tiny_llama

from jackfield import LLM, LLMEngine, RequestOutput, SamplingParams, SchedulingHints
from jackfield.core.errors import CapacityError, ConfigError, UnsupportedError

PROMPT = [(7 * index) % 251 for index in range(48)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory, max_position_embeddings=512)
    return str(directory)


def greedy(num_tokens: int = 8, n: int = 1) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, n=n
    )


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def generate(llm: LLM, *prompts: list[int], **hints: Any) -> list[RequestOutput]:
    return llm.generate(
        list(prompts), greedy(), use_tqdm=False, hints=SchedulingHints(**hints) if hints else None
    )


@pytest.mark.parametrize("length", [16, 32, 33])
@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_hits_are_reported_and_change_no_token(model: str, length: int, manager: str) -> None:
    """B012: twice in sequence, then twice in one batch."""
    expected = tokens(generate(LLM(model), PROMPT[:length])[0])
    llm = LLM(model, enable_prefix_caching=True, block_manager=manager)
    runs = [generate(llm, PROMPT[:length]) for _ in range(2)]
    runs.append(generate(llm, PROMPT[:length], PROMPT[:length]))
    assert all(tokens(output) == expected for run in runs for output in run)
    cached = [[output.num_cached_tokens for output in run] for run in runs]
    hit = min(length - 1, length // 16 * 16)
    assert cached == [[0], [hit], [hit, hit]]
    prefix = llm.engine.stats().prefix
    assert (prefix.num_queried_tokens, prefix.num_hit_tokens) == (4 * length, 3 * hit)


def test_other_salts_and_a_reset_find_nothing(model: str) -> None:
    llm = LLM(model, enable_prefix_caching=True)
    found = [
        generate(llm, PROMPT, cache_salt=salt)[0].num_cached_tokens for salt in ("", "a", "b", "a")
    ]
    assert found == [0, 0, 0, 47]
    assert llm.reset_prefix_cache()
    assert generate(llm, PROMPT)[0].num_cached_tokens == 0
    llm.engine.add_request("live", PROMPT, greedy())
    llm.engine.step()
    assert not llm.reset_prefix_cache()
    llm.engine.abort_request("live")
    assert llm.reset_prefix_cache()


def test_a_manager_without_prefix_caching_refuses_it(model: str) -> None:
    with pytest.raises(UnsupportedError, match="enable_prefix_caching=True needs the power"):
        LLM(model, block_manager="contiguous", enable_prefix_caching=True, max_num_seqs=4)
    llm = LLM(model, block_manager="contiguous", max_num_seqs=4)
    with pytest.raises(UnsupportedError, match="prefix_caching is not supported"):
        llm.reset_prefix_cache()


def test_the_debug_line_shows_hits_forks_and_moves(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(model, enable_prefix_caching=True)
    with caplog.at_level(logging.DEBUG, "jackfield.engine"):
        generate(llm, PROMPT)
        llm.generate([PROMPT[:40]], greedy(n=2), use_tqdm=False)
    text = caplog.text
    assert "prefix hits 2.0#0:32" in text
    assert "forked 2.0#0>2.0#1" in text
    assert "blocks moved copy:1" in text


def test_completions_share_the_prompt_and_are_what_one_alone_is(model: str) -> None:
    llm = LLM(model, max_num_batched_tokens=32)
    (one,) = llm.generate([PROMPT], greedy(20), use_tqdm=False)
    steps, computed = llm.engine.stats().num_steps, llm.engine.stats().num_computed_tokens
    (four,) = llm.generate([PROMPT], greedy(20, n=4), use_tqdm=False)
    assert tokens(four) == tokens(one) * 4
    stats = llm.engine.stats()
    assert stats.num_steps - steps == steps + 1
    assert stats.num_computed_tokens - computed == 48 + 3 + 4 * 19
    # Three shared blocks, and two private ones for each.
    assert round(stats.peak_block_usage * stats.blocks.total) == 3 + 4 * 2


def test_completions_diverge_and_the_same_seeds_give_the_same(model: str) -> None:
    params = SamplingParams(n=4, max_tokens=24, seed=3, ignore_eos=True, detokenize=False)
    seen = []
    for manager in ("paged", "radix", "contiguous"):
        llm = LLM(model, block_manager=manager, max_num_seqs=8)
        (output,) = llm.generate([PROMPT[:41]], params, use_tqdm=False)
        seen.append(tokens(output))
        assert len({tuple(item) for item in tokens(output)}) == 4
    assert seen[0] == seen[1] == seen[2]


def test_abort_of_a_group_in_every_stage_leaves_nothing(model: str) -> None:
    engine = LLMEngine.from_options(model=model, max_num_batched_tokens=32)
    for steps in range(6):
        engine.add_request("g", PROMPT, greedy(20, n=3))
        for _ in range(steps):
            engine.step()
        output = engine.abort_request("g")
        assert output is not None
        assert output.finished
        assert engine.stats().blocks.used == 0
        assert not engine.has_unfinished_requests()


def test_a_step_that_only_swaps_moves_blocks_all_the_same(model: str) -> None:
    """Everybody is preempted, nothing is scheduled, and the contents are there afterwards."""
    expected = tokens(generate(LLM(model), PROMPT)[0])
    llm = LLM(model, preemption_mode="swap", swap_space="1MiB")
    engine = llm.engine
    engine.add_request("a", PROMPT, greedy())
    outputs = engine.step()
    policy: Any = engine.scheduler.policy
    proposal = policy.propose
    policy.propose = lambda view: type(proposal(view))(preempt=["a"])
    engine.step()
    policy.propose = proposal
    assert engine.stats().scheduler.swapped == 1
    for layer in engine.model_runner.layers:
        layer.cache.k.zero_()
        layer.cache.v.zero_()
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert tokens(outputs[-1]) == expected
    assert engine.stats().scheduler.num_swaps == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"preemption_mode": "swap"}, ConfigError, "preemption_mode='swap' needs swap space.*4GiB"),
        ({"swap_space": 4}, CapacityError, r"swap_space=4 .*holds no KV block.*such as 4GiB"),
        ({"swap_space": "9999TiB"}, CapacityError, r"swap_space=.* is more than the .* are free"),
        (
            {"swap_space": "1MiB", "block_manager": "contiguous"},
            UnsupportedError,
            "'contiguous': swap_space=1048576 needs the power 'swap'",
        ),
        (
            {"preemption_mode": "swap", "block_manager": "contiguous"},
            UnsupportedError,
            "'contiguous': preemption_mode='swap' needs the power 'swap'",
        ),
    ],
)
def test_swap_settings_that_cannot_work(
    model: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(model, **options)


def test_swap_space_is_described(model: str) -> None:
    llm = LLM(model, swap_space="1MiB", enable_prefix_caching=True)
    description = llm.engine.description
    assert description.num_host_blocks == llm.engine.stats().blocks.host_total > 0
    assert f"prefix caching, swap space for {description.num_host_blocks} blocks" in (
        description.summary()
    )
    assert LLM(model, preemption_mode="auto").engine.description.num_host_blocks == 0


HISTORY = """
import sys
from jackfield import LLM, SamplingParams
llm = LLM(
    sys.argv[1], decision_log=sys.argv[2], num_gpu_blocks_override=12, max_model_len=128,
    preemption_mode="swap", swap_space="1MiB", enable_prefix_caching=True, seed=5,
)
params = [SamplingParams(max_tokens=30, n=1 + index % 3, detokenize=False) for index in range(8)]
prompts = [list(range(10, 30 + 7 * index)) for index in range(8)]
llm.generate(prompts, params, use_tqdm=False)
"""


def test_equal_runs_give_equal_decision_logs(model: str, tmp_path: Path) -> None:
    """In two processes with other hash seeds; the runs swap, fork and hit."""
    logs = []
    for seed in ("0", "1"):
        path = tmp_path / f"log{seed}.jsonl"
        subprocess.run(
            [sys.executable, "-c", HISTORY, model, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        logs.append(path.read_bytes())
    assert logs[0] == logs[1]
    records = [json.loads(line) for line in logs[0].splitlines()]
    assert [record["step"] for record in records] == list(range(len(records)))
    seen = {name for record in records for name in record}
    assert {"preempted", "swapped_in", "forked", "prefix_hits", "copies", "finished"} <= seen
