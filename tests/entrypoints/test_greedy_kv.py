"""Greedy tokens equal transformers' own however blocks are managed, shared, taken and split."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.greedy import Reference, assert_equal_greedy, generate_greedy, reference_greedy
from support.policies import LeastOftenFirst, host_with
from support.tiny_models import make_tiny_llama

from jackfield import LLM, LLMEngine, Proposal, SamplingParams, SchedulerView
from jackfield.entrypoints.settings import load_settings

NUM_TOKENS = 24
#: Enough for the longest request, and for about a third of all.
SMALL_POOL = {"max_model_len": 160, "watermark": 0.0}
Case = tuple[str, list[list[int]], Reference]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint, 12 prompts of 1 to 130 tokens, some with a common beginning, and what
    transformers makes of them."""
    directory = tmp_path_factory.mktemp("tiny")
    model = make_tiny_llama(directory, max_position_embeddings=512)
    rng = random.Random(0)
    common = [rng.randrange(256) for _ in range(70)]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 7, 16, 32, 33, 130)]
    prompts += [common[:length] for length in (16, 48, 64, 65)]
    prompts += [[*common, *(rng.randrange(256) for _ in range(more))] for more in (5, 30)]
    return str(directory), prompts, reference_greedy(model, prompts, NUM_TOKENS)


def check(llm: LLM, case: Case, times: int = 1) -> None:
    _, prompts, reference = case
    for _ in range(times):
        compared = assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), reference)
        assert compared > 0.9 * len(prompts) * NUM_TOKENS
    blocks = llm.engine.stats().blocks
    assert (blocks.used, blocks.host_used) == (0, 0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 256, None])
@pytest.mark.parametrize("caching", [False, True])
def test_chunk_limits(case: Case, chunk: int | None, caching: bool) -> None:
    llm = LLM(case[0], long_prefill_token_threshold=chunk, enable_prefix_caching=caching)
    check(llm, case, times=2)
    assert (llm.engine.stats().prefix.num_hit_tokens > 0) == caching


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("manager", "caching"),
    [("paged", False), ("paged", True), ("radix", False), ("radix", True), ("contiguous", False)],
)
def test_block_managers(case: Case, block_size: int, manager: str, caching: bool) -> None:
    llm = LLM(
        case[0],
        block_size=block_size,
        block_manager=manager,
        enable_prefix_caching=caching,
        max_num_seqs=16,
    )
    check(llm, case, times=2)
    assert (llm.engine.stats().prefix.num_hit_tokens > 0) == caching


class EverybodyGivesWay(LeastOftenFirst):
    """Takes everybody's blocks once, whether or not they are needed, and then, where blocks are
    short, those of the request that has lost its own least often."""

    name = "everybody-gives-way"

    def propose(self, view: SchedulerView) -> Proposal:
        return Proposal(
            preempt=[
                request.request_id
                for request in view.running()
                if request.num_preemptions == 0
                and request.num_generated_tokens > 3 + request.arrival_index % 4
            ]
        )


def pressed(model: str, **options: Any) -> LLM:
    """An engine in which blocks are short, and everybody loses theirs."""
    host = host_with(EverybodyGivesWay)
    flags = {"model": model, "scheduling_policy": EverybodyGivesWay.name, **options}
    return LLM.from_engine(LLMEngine.from_settings(load_settings(flags, {}), host))


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("manager", ["paged", "radix"])
@pytest.mark.parametrize("block_size", [8, 32])
def test_everybody_is_preempted(
    case: Case, mode: str, caching: bool, manager: str, block_size: int
) -> None:
    model, prompts, reference = case
    llm = pressed(
        model,
        preemption_mode=mode,
        swap_space=0 if mode == "recompute" else "4MiB",
        enable_prefix_caching=caching,
        block_manager=manager,
        block_size=block_size,
        num_gpu_blocks_override=168 // block_size + 1,
        max_num_batched_tokens=96,
        **SMALL_POOL,
    )
    outputs = generate_greedy(llm, prompts, NUM_TOKENS)
    assert_equal_greedy(outputs, reference)
    stats = llm.engine.stats().scheduler
    counts = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
    assert min(counts) >= 1, counts
    assert (stats.num_swaps > 0) == (mode != "recompute")
    assert llm.engine.stats().blocks.host_used == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("budget", [16, 2048])
def test_whole_completions_after_preemption(case: Case, mode: str, budget: int) -> None:
    """B019: four prompts of 30 tokens, 40 new ones, 12 blocks against 200."""
    prompts = [[(11 * index + 7 * offset) % 256 for offset in range(30)] for index in range(4)]
    expected, got = (
        [
            list(output.outputs[0].token_ids)
            for output in generate_greedy(
                LLM(
                    case[0],
                    num_gpu_blocks_override=num_blocks,
                    max_model_len=128,
                    max_num_batched_tokens=budget,
                    preemption_mode=mode,
                    swap_space="4MiB",
                ),
                prompts,
                40,
            )
        ]
        for num_blocks in (200, 12)
    )
    assert got == expected
    assert [len(item) for item in got] == [40] * 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_groups_under_pressure(case: Case, mode: str) -> None:
    """Four completions of each prompt, forked, preempted and brought back."""
    model, prompts, reference = case
    llm = pressed(
        model, preemption_mode=mode, swap_space="4MiB", num_gpu_blocks_override=16, **SMALL_POOL
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, n=4
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats().scheduler.num_preemptions > 10
    for index in range(4):
        one_each = [type(o)(**{**vars(o), "outputs": (o.outputs[index],)}) for o in outputs]
        assert_equal_greedy(one_each, reference)
    assert llm.engine.stats().blocks.used == 0
