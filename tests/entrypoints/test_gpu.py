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
from support.greedy import Prompts, assert_equal_greedy, generate_greedy, reference_greedy
from support.tiny_models import byte_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from jackfield import LLM

pytestmark = pytest.mark.gpu

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


def test_float32_equals_transformers(checkpoint: Path, prompts: Prompts) -> None:
    """Together, in small chunks, and with so few blocks that requests are preempted."""
    model: Any = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda()
    reference = reference_greedy(model, prompts, NUM_TOKENS)
    runs: list[dict[str, Any]] = [
        {},
        {"long_prefill_token_threshold": 16},
        {"max_model_len": 672, "num_gpu_blocks_override": 64},
    ]
    for options in runs:
        shared = {"max_model_len": 2048, "gpu_memory_utilization": 0.3, **options}
        llm = LLM(str(checkpoint), device="cuda", dtype="float32", **shared)
        compared = assert_equal_greedy(generate_greedy(llm, prompts, NUM_TOKENS), reference)
        print(options, "compared", compared, "of", len(prompts) * NUM_TOKENS)
        assert compared > 0.9 * len(prompts) * NUM_TOKENS
        assert llm.engine.stats().blocks.used == 0
        if "num_gpu_blocks_override" in options:
            assert llm.engine.stats().scheduler.num_preemptions > 0
        del llm


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
