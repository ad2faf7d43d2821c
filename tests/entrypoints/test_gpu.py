"""The main path on a CUDA device: a model of the shape of Qwen2.5-0.5B with random weights."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.greedy import (
    Prompts,
    Reference,
    assert_equal_greedy,
    generate_greedy,
    logits_noise,
    reference_greedy,
)
from support.tiny_models import byte_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from jackfield import LLM
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind

pytestmark = [
    pytest.mark.gpu,
    # What torch's own compiler raises, for the backend that uses it.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    # What flash-attn 4's compiler says of an argument that it does not use.
    pytest.mark.filterwarnings("ignore:.*JitArgument:UserWarning"),
]

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        eos_token_id=257,
        bos_token_id=256,
        # Wide enough that the two largest logits are rarely a rounding error apart.
        initializer_range=0.06,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rng = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 33, 600, *(rng.randint(1, 500) for _ in range(25))]
    return [[rng.randrange(150000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def float32_reference(checkpoint: Path, prompts: Prompts) -> Reference:
    return reference_greedy(load_reference(checkpoint, torch.float32), prompts, NUM_TOKENS)


def load_reference(checkpoint: Path, dtype: torch.dtype) -> Any:
    model: Any = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return model.cuda()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"cuda_graph_sizes": (3, 20)},
        {"long_prefill_token_threshold": 16},
        {"max_model_len": 672, "num_gpu_blocks_override": 64},
        {
            "max_model_len": 672,
            "num_gpu_blocks_override": 64,
            "swap_space": "1GiB",
            "preemption_mode": "swap",
        },
        {"enable_prefix_caching": True, "block_manager": "radix"},
    ],
    ids=[
        "graphs",
        "eager",
        "graphs_of_two_sizes",
        "chunks_of_16",
        "preemption",
        "swap",
        "prefix_caching",
    ],
)
def test_float32_equals_transformers(
    checkpoint: Path, prompts: Prompts, float32_reference: Reference, options: dict[str, Any]
) -> None:
    """Together, with and without CUDA graphs, in small chunks, with so few blocks that requests
    are preempted or swapped, and with prefix caching."""
    shared = {"max_model_len": 2048, "gpu_memory_utilization": 0.3, **options}
    llm = LLM(str(checkpoint), device="cuda", dtype="float32", **shared)
    replays = count_replays(llm)
    compared = assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), float32_reference)
    print(options, "compared", compared, "of", len(prompts) * NUM_TOKENS, "replays", len(replays))
    assert compared > 0.9 * len(prompts) * NUM_TOKENS
    assert llm.engine.stats().blocks.used == 0
    assert bool(replays) == (not options.get("enforce_eager", False))
    if "num_gpu_blocks_override" in options:
        assert llm.engine.stats().scheduler.num_preemptions > 0
    if "swap_space" in options:
        assert llm.engine.stats().scheduler.num_swaps > 0
    if options.get("enable_prefix_caching"):
        assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), float32_reference)
        assert llm.engine.stats().prefix.num_hit_tokens > 0


def count_replays(llm: LLM) -> list[int]:
    """Numbers of sequences of the decoding steps that are replayed from now on."""
    replays: list[int] = []
    graphs = llm.engine.model_runner.graphs
    if graphs is not None:
        run = graphs.run

        def counting(inputs: Any) -> torch.Tensor:
            replays.append(inputs.attention.num_seqs)
            return run(inputs)

        graphs.run = counting  # type: ignore[method-assign]
    return replays


FLOAT32_BACKENDS = ["torch_sdpa", "triton", "flex", "xformers_cutlass"]
HALF_BACKENDS = [*FLOAT32_BACKENDS, "xformers", "flash_attn", "flash_attn_4"]
HALF_BACKENDS += ["flashinfer", "torch_varlen"]


def with_backend(checkpoint: Path, name: str, dtype: str) -> LLM:
    """An engine on a backend; skipped where its library is not installed."""
    entry = discover().registry.get(PartKind.ATTENTION_BACKEND, name)
    assert entry is not None
    missing = entry.load().capabilities(torch.device("cuda")).missing
    if missing is not None:
        pytest.skip(missing)
    return LLM(
        str(checkpoint),
        device="cuda",
        dtype=dtype,
        attention_backend=name,
        max_model_len=1024,
        max_num_seqs=32,
        gpu_memory_utilization=0.3,
    )


@pytest.mark.parametrize("name", FLOAT32_BACKENDS)
def test_every_backend_equals_transformers_in_float32(
    checkpoint: Path, prompts: Prompts, float32_reference: Reference, name: str
) -> None:
    llm = with_backend(checkpoint, name, "float32")
    compared = assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), float32_reference)
    print(name, "compared", compared, "of", len(prompts) * NUM_TOKENS)
    assert compared > 0.9 * len(prompts) * NUM_TOKENS


#: Completions in bfloat16 part after some tokens, so there are many of them, and short ones.
NUM_HALF_PROMPTS = 256
NUM_HALF_TOKENS = 12


@pytest.fixture(scope="module")
def half_prompts(prompts: Prompts) -> Prompts:
    rng = random.Random(2)
    more = range(NUM_HALF_PROMPTS - len(prompts))
    return [*prompts, *([rng.randrange(150000) for _ in range(rng.randint(1, 300))] for _ in more)]


@pytest.fixture(scope="module")
def half_reference(
    checkpoint: Path, prompts: Prompts, half_prompts: Prompts, float32_reference: Reference
) -> tuple[Reference, float]:
    """Completions in bfloat16, and the distance of logits that its rounding can bridge."""
    exact = load_reference(checkpoint, torch.float32)
    rounded = load_reference(checkpoint, torch.bfloat16)
    noise = logits_noise(exact, rounded, prompts, float32_reference)
    # The random model's logits are close to each other: enough of them that all near-ties are kept.
    reference = reference_greedy(rounded, half_prompts, NUM_HALF_TOKENS, batch=32, kept=4096)
    places = [place for row in reference.closest for place in row]
    assert min(max(place.values()) for place in places) > 2 * noise
    near = sum(sum(distance <= 2 * noise for distance in place.values()) for place in places)
    print(
        f"bfloat16 moves logits by up to {noise:.3f}; {near / len(places):.0f} tokens are so near"
    )
    return reference, 2 * noise


@pytest.mark.parametrize("name", HALF_BACKENDS)
def test_every_backend_equals_transformers_in_bfloat16_but_for_near_ties(
    checkpoint: Path, half_prompts: Prompts, half_reference: tuple[Reference, float], name: str
) -> None:
    """Two implementations round differently: each logit may move by the noise, either way."""
    reference, near_tie = half_reference
    llm = with_backend(checkpoint, name, "bfloat16")
    replays = count_replays(llm)
    outputs = generate_greedy(llm, half_prompts, NUM_HALF_TOKENS)
    compared = assert_equal_greedy(outputs, reference, near_tie)
    of = len(half_prompts) * NUM_HALF_TOKENS
    print(f"{name}: {compared} of {of} equal before a near-tie, {len(replays)} replays")
    assert compared > 0.25 * of


def test_steps_without_a_token_do_not_overtake_each_other(
    checkpoint: Path, prompts: Prompts
) -> None:
    """Chunks of a long prompt sample nothing, so that nothing makes the host wait for them."""
    rng = random.Random(1)
    long = [[rng.randrange(150000) for _ in range(30000)]]
    results = []
    for chunk in (256, 8192):
        llm = LLM(
            str(checkpoint),
            device="cuda",
            dtype="float32",
            max_num_batched_tokens=chunk,
            gpu_memory_utilization=0.3,
        )
        results.append(generate_greedy(llm, long, 8)[0].outputs[0].token_ids)
        del llm
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_command(checkpoint: Path, dtype: str) -> None:
    arguments = ["generate", "--model", str(checkpoint), "--dtype", dtype, "--device", "cuda"]
    arguments += ["--json", "--ignore-eos", "--max-tokens", "32", "one", "two", "three", "four"]
    result = subprocess.run(
        [sys.executable, "-m", "jackfield.entrypoints.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stderr[-400:])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(row["outputs"][0]["token_ids"]) for row in rows] == [32] * 4


def test_memory_stays_within_the_allowance(checkpoint: Path) -> None:
    """A small share of the device, filled until requests are preempted."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = total - free
    share = 0.05
    llm = LLM(
        str(checkpoint),
        device="cuda",
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=160,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=share,
    )
    prompts = [[index % 1000] * 4000 for index in range(160)]
    peak = 0
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, _params())
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        free, total = torch.cuda.mem_get_info()
        peak = max(peak, total - free - before)
    assert llm.engine.stats().peak_block_usage > 0.95
    # What the profiled steps needed and these do not, a fixed amount, may be left.
    assert share * total - 2**30 < peak <= 1.03 * share * total


def _params() -> Any:
    from jackfield import SamplingParams

    return SamplingParams(max_tokens=90, ignore_eos=True, detokenize=False, top_p=0.9)
