"""Greedy tokens of the real model equal transformers' own however blocks are managed, shared,
taken and split; each run proves that what it is about did happen."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from support.greedy import (
    Reference,
    assert_equal_greedy,
    generate_greedy,
    reference_greedy,
    transformers_model,
)
from support.policies import LeastOftenFirst, host_with

from jackfield import LLM, LLMEngine, RequestOutput
from jackfield.entrypoints.settings import load_settings
from jackfield.models.loader import load_checkpoint
from jackfield.models.locate import locate

pytestmark = pytest.mark.demo

NUM_TOKENS = 24
#: Tokens that many prompts begin with: whole blocks of 8, 16 or 32, and two more.
NUM_COMMON = 66
#: The only prompt that chunks of 256 split.
LONG = 300
#: Prompts that all lose their blocks in a pool of 28 blocks of 8 tokens, where the request that
#: has lost its own least often gives way.
GROWING = (20, 30, 40, 50, 60)


@dataclass(frozen=True)
class Case:
    """Prompts, what they have in common, and what transformers makes of them.

    Attributes:
        prompts: token ids.
        common: what some of them begin with.
        reference: one completion of each.
    """

    prompts: list[list[int]]
    common: list[int]
    reference: Reference

    def pick(self, lengths: Iterable[int]) -> Case:
        """The prompts of these lengths."""
        wanted = set(lengths)
        chosen = [index for index, prompt in enumerate(self.prompts) if len(prompt) in wanted]
        prompts = [self.prompts[index] for index in chosen]
        return Case(prompts, self.common, self.reference.pick(chosen))

    def num_cached(self, block_size: int) -> list[int]:
        """How much of each prompt a cache holds that has seen the common beginning: whole blocks,
        and never the last token."""
        counts = []
        for prompt in self.prompts:
            pairs = zip(prompt, self.common, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            counts.append(min(shared // block_size * block_size, len(prompt) - 1))
        return counts


@pytest.fixture(scope="module")
def case(demo_file: Path, repository: Path) -> Case:
    """14 pieces of English text of 1 to 300 tokens, six of them with a common beginning."""
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    tokens = load_checkpoint(locate("demo", "auto", None)).tokenizer.encode(text)
    rng = random.Random(0)

    def piece(length: int) -> list[int]:
        start = rng.randrange(NUM_COMMON, len(tokens) - length)
        return tokens[start : start + length]

    common = tokens[:NUM_COMMON]
    prompts = [piece(length) for length in (1, 16, *GROWING, LONG)]
    prompts += [common[:length] for length in (33, 64, NUM_COMMON)]
    prompts += [[*common, *piece(more)] for more in (1, 9, 30)]
    # The longest prompt is a batch of its own: the others need no padding to its length.
    batch = len(prompts) - 1
    reference = reference_greedy(transformers_model(demo_file), prompts, NUM_TOKENS, batch)
    return Case(prompts, common, reference)


@dataclass(frozen=True)
class Run:
    """What an engine made of a case.

    Attributes:
        llm: the engine.
        outputs: one for each prompt.
        steps: the lines of the decision log, those of the cache's warming included.
    """

    llm: LLM
    outputs: list[RequestOutput]
    steps: list[dict[str, Any]]

    def chunks(self) -> list[list[int]]:
        """For each prompt, how many of its tokens were computed at a time."""
        lengths = {output.request_id: len(output.prompt_token_ids) for output in self.outputs}
        sizes: dict[str, list[int]] = {name: [] for name in lengths}
        for step in self.steps:
            for name, num_computed, num_new in step.get("scheduled", []):
                if num_computed < lengths.get(name, 0):
                    sizes[name].append(num_new)
        return list(sizes.values())

    def total(self, field: str) -> int:
        """Sum of a number that the log has for each step."""
        return sum(step.get(field, 0) for step in self.steps)


def run(case: Case, log: Path, **options: Any) -> Run:
    """Complete the prompts with an engine of its own, and compare all tokens.

    Where prefixes are cached, the common beginning is computed first.
    """
    host = host_with(LeastOftenFirst)
    flags = {
        "model": "demo",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": LONG + NUM_TOKENS,
        "num_gpu_blocks_override": 4096 // options.get("block_size", 16),
        "decision_log": str(log),
    }
    llm = LLM.from_engine(LLMEngine.from_settings(load_settings(flags | options, {}), host))
    if options.get("enable_prefix_caching"):
        generate_greedy(llm, [case.common], 1)
    outputs = generate_greedy(llm, case.prompts, NUM_TOKENS)
    compared = assert_equal_greedy(outputs, case.reference)
    # Near-ties are rare: nearly every token must have been compared.
    assert compared > 0.9 * len(case.prompts) * NUM_TOKENS
    blocks = llm.engine.stats().blocks
    assert (blocks.used, blocks.host_used) == (0, 0)
    steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return Run(llm, outputs, steps)


RUNS: dict[str, dict[str, Any]] = {
    "prefix_caching_off_and_no_chunk_limit": {},
    "prefix_caching_on": {"enable_prefix_caching": True},
    "block_manager_radix": {"block_manager": "radix", "enable_prefix_caching": True},
    "block_manager_contiguous": {"block_manager": "contiguous"},
    "block_size_8": {"block_size": 8, "enable_prefix_caching": True},
    "block_size_32": {"block_size": 32, "enable_prefix_caching": True},
    "chunk_limit_1": {"long_prefill_token_threshold": 1},
    "chunk_limit_7": {"long_prefill_token_threshold": 7, "enable_prefix_caching": True},
    "chunk_limit_16": {"long_prefill_token_threshold": 16},
    "chunk_limit_256": {"long_prefill_token_threshold": 256},
}


@pytest.mark.parametrize("name", RUNS)
def test_blocks_and_chunks(name: str, case: Case, tmp_path: Path) -> None:
    options = RUNS[name]
    limit = options.get("long_prefill_token_threshold")
    if limit == 1:  # a step for each token: short prompts only
        case = case.pick((1, 16, 20, 33, 40))
    done = run(case, tmp_path / "decisions", **options)

    made_of, stats = done.llm.engine.description, done.llm.engine.stats()
    block_size = options.get("block_size", 16)
    assert made_of.block_manager == options.get("block_manager", "paged")
    assert made_of.block_size == block_size
    num_cached = [output.num_cached_tokens for output in done.outputs]
    if options.get("enable_prefix_caching"):
        assert num_cached == case.num_cached(block_size)
        assert stats.prefix.num_hit_tokens == sum(num_cached) > 0
    else:
        assert num_cached == [0] * len(case.prompts)
        assert stats.prefix.num_hit_tokens == 0
    left = [len(prompt) - hit for prompt, hit in zip(case.prompts, num_cached, strict=True)]
    chunks = done.chunks()
    assert [sum(sizes) for sizes in chunks] == left
    assert [len(sizes) for sizes in chunks] == [-(-count // (limit or count)) for count in left]
    assert max(map(len, chunks)) > 1 or limit is None
    assert stats.scheduler.num_preemptions == 0


PRESSURE: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": "64MiB"},
    "swap_in_a_tree": {
        "preemption_mode": "swap",
        "swap_space": "64MiB",
        "block_manager": "radix",
        "enable_prefix_caching": True,
        "long_prefill_token_threshold": 16,
    },
}


@pytest.mark.parametrize("name", PRESSURE)
def test_everybody_is_preempted(name: str, case: Case, tmp_path: Path) -> None:
    """So few blocks that each request loses its own at least once."""
    options = PRESSURE[name]
    done = run(
        case.pick(GROWING),
        tmp_path / "decisions",
        scheduling_policy=LeastOftenFirst.name,
        block_size=8,
        num_gpu_blocks_override=28,
        max_model_len=max(GROWING) + NUM_TOKENS,
        watermark=0.0,
        **options,
    )

    stats = done.llm.engine.stats()
    assert stats.peak_block_usage > 0.9
    counts = {
        output.request_id: output.metrics.num_preemptions
        for output in done.outputs
        if output.metrics
    }
    assert min(counts.values()) >= 1, counts
    lost = [(name, mode) for step in done.steps for name, mode in step.get("preempted", [])]
    assert Counter(name for name, _ in lost) == counts
    assert {mode for _, mode in lost} == {options["preemption_mode"]}
    back = {name for step in done.steps for name in step.get("swapped_in", [])}
    if options["preemption_mode"] == "swap":
        assert stats.scheduler.num_swaps == len(lost)
        assert back == set(counts)
        assert done.total("out") == done.total("in") > 0
    else:
        again = sum(sum(sizes) for sizes in done.chunks())
        assert again > sum(GROWING)  # prompts were computed anew
        assert (stats.scheduler.num_swaps, done.total("out"), back) == (0, 0, set())
