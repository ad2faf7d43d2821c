"""The main path on the real model: greedy tokens equal transformers' own, however it is run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.greedy import (
    Prompts,
    Reference,
    assert_equal_greedy,
    generate_greedy,
    reference_greedy,
    transformers_model,
)

from jackfield import LLM

pytestmark = pytest.mark.demo

NUM_TOKENS = 64
PROMPT_LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 34, 48, 55]
PROMPT_LENGTHS += [63, 64, 65, 89, 100, 127, 128, 129, 144, 200, 233, 256, 300, 377, 480, 600]


@pytest.fixture(scope="module")
def together() -> LLM:
    """The engine with its default settings."""
    return LLM("demo", dtype="float32")


@pytest.fixture(scope="module")
def prompts(together: LLM, repository: Path) -> Prompts:
    """32 pieces of English text of 1 to 600 tokens, in no order."""
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    tokens = together.get_tokenizer().encode(text)
    rng = random.Random(0)
    lengths = rng.sample(PROMPT_LENGTHS, len(PROMPT_LENGTHS))
    starts = [rng.randrange(len(tokens) - length) for length in lengths]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def reference(demo_file: Path, prompts: Prompts) -> Reference:
    """The same from transformers."""
    return reference_greedy(transformers_model(demo_file), prompts, NUM_TOKENS)


def _check(llm: LLM, prompts: Prompts, reference: Reference) -> None:
    compared = assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), reference)
    # Near-ties are rare: nearly every token must have been compared.
    assert compared > 0.9 * len(prompts) * NUM_TOKENS


def test_together(together: LLM, prompts: Prompts, reference: Reference) -> None:
    _check(together, prompts, reference)
    assert together.engine.stats().scheduler.num_preemptions == 0
    assert together.engine.stats().blocks.used == 0


def test_one_by_one(together: LLM, prompts: Prompts, reference: Reference) -> None:
    outputs = [generate_greedy(together, [prompt], NUM_TOKENS)[0] for prompt in prompts]
    assert_equal_greedy(outputs, reference)


def test_shuffled(together: LLM, prompts: Prompts, reference: Reference) -> None:
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    outputs = generate_greedy(together, [prompts[index] for index in order], NUM_TOKENS)
    assert_equal_greedy(outputs, reference.pick(order))


@pytest.mark.parametrize("chunk", [16, 128])
def test_chunked_prefill(chunk: int, prompts: Prompts, reference: Reference) -> None:
    options = {"long_prefill_token_threshold": chunk, "kv_cache_memory": "512MiB"}
    llm = LLM("demo", dtype="float32", **options)
    _check(llm, prompts, reference)


def test_preemption(prompts: Prompts, reference: Reference) -> None:
    """So few blocks that running requests lose theirs and are recomputed."""
    llm = LLM("demo", dtype="float32", max_model_len=672, num_gpu_blocks_override=64)
    _check(llm, prompts, reference)
    stats = llm.engine.stats()
    assert stats.scheduler.num_preemptions > 0
    assert stats.peak_block_usage > 0.9
    assert stats.blocks.used == 0
