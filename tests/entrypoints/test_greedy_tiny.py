"""Greedy tokens of tiny random models, saved as safetensors, equal transformers' own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.greedy import Reference, assert_equal_greedy, generate_greedy, reference_greedy
from support.tiny_models import make_tiny_llama, make_tiny_qwen2

from jackfield import LLM

NUM_TOKENS = 48
MAKERS = {"llama": make_tiny_llama, "qwen2": make_tiny_qwen2}
RUNS: dict[str, dict[str, Any]] = {
    "default": {},
    "small_blocks": {"block_size": 4},
    "chunks_of_7": {"long_prefill_token_threshold": 7},
    "chunks_of_16": {"long_prefill_token_threshold": 16, "max_num_batched_tokens": 40},
    "one_seat": {"max_num_seqs": 1},
    "whole_prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 700},
}

Case = tuple[Path, list[list[int]], Reference]


@pytest.fixture(scope="module", params=sorted(MAKERS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint, 32 random prompts of 1 to 600 tokens, and what transformers makes of them."""
    directory = tmp_path_factory.mktemp(request.param)
    model = MAKERS[request.param](directory, max_position_embeddings=1024)
    rng = random.Random(0)
    lengths = [1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 600]
    lengths += [rng.randint(1, 300) for _ in range(32 - len(lengths))]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    return directory, prompts, reference_greedy(model, prompts, NUM_TOKENS)


@pytest.mark.parametrize("run", sorted(RUNS))
def test_equal(case: Case, run: str) -> None:
    directory, prompts, reference = case
    llm = LLM(str(directory), dtype="float32", **RUNS[run])
    compared = assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), reference)
    assert compared > 0.9 * len(prompts) * NUM_TOKENS
    assert llm.engine.stats().blocks.used == 0


def test_equal_after_preemption(case: Case) -> None:
    directory, prompts, reference = case
    llm = LLM(str(directory), dtype="float32", max_model_len=656, num_gpu_blocks_override=50)
    assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), reference)
    assert llm.engine.stats().scheduler.num_preemptions > 0
    assert llm.engine.stats().blocks.used == 0


def test_equal_in_another_order(case: Case) -> None:
    directory, prompts, reference = case
    llm = LLM(str(directory), dtype="float32")
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    outputs = generate_greedy(llm, [prompts[index] for index in order], NUM_TOKENS)
    shuffled = reference.pick(order)
    assert_equal_greedy(outputs, shuffled)


def test_equal_one_by_one(case: Case) -> None:
    directory, prompts, reference = case
    llm = LLM(str(directory), dtype="float32")
    outputs = [generate_greedy(llm, [prompt], NUM_TOKENS)[0] for prompt in prompts]
    assert_equal_greedy(outputs, reference)
