"""The built-in models compute what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import (
    ContiguousAttention,
    make_tiny_llama,
    make_tiny_qwen2,
    write_tiny_gguf,
)
from torch import Tensor
from transformers import DynamicCache

from jackfield.core.model import Model
from jackfield.models.llama import LlamaForCausalLM, Qwen2ForCausalLM
from jackfield.models.loader import load_checkpoint
from jackfield.models.locate import locate

TOKENS = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(1))
CLASSES = {"LlamaForCausalLM": LlamaForCausalLM, "Qwen2ForCausalLM": Qwen2ForCausalLM}
MAKERS: dict[str, Callable[..., Any]] = {"llama": make_tiny_llama, "qwen2": make_tiny_qwen2}


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = load_checkpoint(locate(str(path)))
    model = CLASSES[checkpoint.config.architecture](checkpoint.config, dtype, torch.device("cpu"))
    checkpoint.load_into(model)
    return model


def logits(
    model: Model, tokens: Tensor, steps: Sequence[int], windows: dict[int, int] | None = None
) -> Tensor:
    """Logits of all tokens, computed in steps of the given numbers of tokens."""
    attention, rows, done = ContiguousAttention(windows), [], 0
    with torch.inference_mode():
        for size in steps:
            chunk = slice(done, done + size)
            hidden = model(tokens[chunk], torch.arange(done, done + size), attention)
            rows.append(model.compute_logits(hidden))
            done += size
    return torch.cat(rows)


def reference(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(tokens[None]).logits[0]
    return result


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    theirs = MAKERS[family](tmp_path, tie_word_embeddings=tied)
    model = load(tmp_path)
    expected = reference(theirs, TOKENS[:64])
    assert expected.std() > 0.3
    assert_close(logits(model, TOKENS[:64], [64]), expected)
    assert_close(logits(model, TOKENS[:64], [50, 7, *[1] * 7]), expected)


def test_sharded_equals_single_file(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "one")
    make_tiny_llama(tmp_path / "many", sharded=True)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert torch.equal(logits(one, TOKENS[:8], [8]), logits(many, TOKENS[:8], [8]))


ROPE_KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", sorted(ROPE_KINDS))
def test_rope_kinds_beyond_the_original_length(tmp_path: Path, kind: str) -> None:
    longest = 256 if kind == "llama3" else 64
    theirs = make_tiny_llama(
        tmp_path,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPE_KINDS[kind]},
    )
    assert_close(logits(load(tmp_path), TOKENS, [100]), reference(theirs, TOKENS))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_dynamic_rope_equals_generation_with_a_cache(tmp_path: Path) -> None:
    theirs = make_tiny_llama(
        tmp_path,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    expected, past = [], DynamicCache()
    with torch.inference_mode():
        for chunk in [TOKENS[:60], *torch.split(TOKENS[60:], 1)]:
            out = theirs(chunk[None], past_key_values=past, use_cache=True)
            expected.append(out.logits[0])
    ours = load(tmp_path)
    assert_close(logits(ours, TOKENS, [60, *[1] * 40]), torch.cat(expected))
    assert_close(logits(ours, TOKENS, [30, 70]), torch.cat(expected))


def test_llama_biases_and_head_size(tmp_path: Path) -> None:
    theirs = make_tiny_llama(tmp_path, attention_bias=True, head_dim=32)
    assert_close(logits(load(tmp_path), TOKENS[:20], [20]), reference(theirs, TOKENS[:20]))


def test_qwen2_sliding_window_of_the_upper_layers(tmp_path: Path) -> None:
    theirs = make_tiny_qwen2(
        tmp_path,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        attn_implementation="eager",
    )
    model = load(tmp_path)
    assert [spec.sliding_window for spec in model.attention_specs()] == [None, 8]
    assert_close(logits(model, TOKENS[:40], [40], windows={1: 8}), reference(theirs, TOKENS[:40]))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_equals_its_source(tmp_path: Path, family: str, tied: bool) -> None:
    theirs = MAKERS[family](tmp_path / "source", tie_word_embeddings=tied)
    write_tiny_gguf(tmp_path / "tiny.gguf", theirs)
    model = load(tmp_path / "tiny.gguf")
    assert_close(logits(model, TOKENS[:32], [20, 12]), reference(theirs, TOKENS[:32]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_stay_close_to_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    exact, theirs16 = reference(theirs, TOKENS[:40]), reference(theirs.to(dtype), TOKENS[:40])
    ours = logits(load(tmp_path, dtype), TOKENS[:40], [30, *[1] * 10])
    assert ours.dtype == dtype
    error, their_error = ((x.float() - exact).abs().mean() for x in (ours, theirs16))
    assert error <= 1.5 * their_error


def test_meta_device_costs_no_memory(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = load_checkpoint(locate(str(tmp_path))).config
    model = LlamaForCausalLM(config, torch.bfloat16, torch.device("meta"))
    specs = model.attention_specs()
    assert {(s.num_heads, s.num_kv_heads, s.head_size, s.scale) for s in specs} == {
        (4, 2, 16, 0.25)
    }


def test_dummy_weights_are_the_same_every_time(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = load_checkpoint(locate(str(tmp_path), "dummy"))
    models = [
        LlamaForCausalLM(checkpoint.config, torch.float32, torch.device("cpu")) for _ in range(3)
    ]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        checkpoint.load_into(model, seed=seed)
    first, second, other = (logits(model, TOKENS[:9], [9]) for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.isfinite().all()


def test_the_saved_configuration_is_read_in_full(tmp_path: Path) -> None:
    make_tiny_qwen2(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    generation = {"eos_token_id": [257, 259]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = load_checkpoint(locate(str(tmp_path))).config
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {}
    assert config.attention_bias
    assert config.eos_token_ids == (257, 259)
    assert config.bos_token_id == 256
    assert (config.head_size, config.num_kv_heads, config.max_position_embeddings) == (16, 2, 64)
