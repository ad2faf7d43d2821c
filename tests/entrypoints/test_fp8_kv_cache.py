"""The setting ``kv_cache_dtype``: a tiny model on a cache of 8 bits, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_tiny_llama
from torch import Tensor

from jackfield.core.config import EngineOptions
from jackfield.core.errors import ModelError, UnsupportedError
from jackfield.core.sampling_params import SamplingParams
from jackfield.entrypoints.llm import LLM
from jackfield.entrypoints.llm_engine import LLMEngine
from jackfield.entrypoints.settings import load_settings

FP8 = torch.float8_e4m3fn
PROMPTS = ["The cache holds", "a", "keys and values of many tokens"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory)
    return directory


def engine_of(model: Path, **options: Any) -> LLMEngine:
    given = {"model": str(model), "device": "cpu", "num_gpu_blocks_override": 32, **options}
    return LLMEngine.from_settings(load_settings(given, {}, keyword_arguments=True))


def with_tensors(model: Path, directory: Path, more: dict[str, Tensor], **config: Any) -> Path:
    """A copy of the checkpoint with more tensors and other fields of its configuration."""
    directory.mkdir(exist_ok=True)
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file(weights | more, directory / "model.safetensors", {"format": "pt"})
    fields = json.loads((model / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def scales_of(names: tuple[str, str]) -> dict[str, Tensor]:
    """Scales of both layers under these names: 0.5 and 0.25, then 1.5 and 0.75."""
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([(1 + 2 * layer) / (2 + 2 * half)])
        for layer in range(2)
        for half, name in enumerate(names)
    }


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_a_model_generates_with_a_cache_of_8_bits(model: Path, name: str) -> None:
    llm = LLM(str(model), device="cpu", num_gpu_blocks_override=32, kv_cache_dtype=name)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(PROMPTS, greedy)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12, 12]
    engine = llm.engine
    assert {layer.cache.k.dtype for layer in engine.model_runner.layers} == {FP8}
    assert engine.description.kv_cache_dtype == "float8_e4m3fn"
    # Two layers of 16 tokens x 2 heads of 16, keys and values, one byte each.
    assert engine.description.bytes_per_block == 2 * 16 * 2 * (16 + 16)
    assert "of float8_e4m3fn" in engine.description.summary()


def test_auto_is_the_dtype_of_the_activations(model: Path) -> None:
    engine = engine_of(model, dtype="bfloat16")
    assert engine.description.kv_cache_dtype == "bfloat16"
    assert {layer.cache.k.dtype for layer in engine.model_runner.layers} == {torch.bfloat16}


def test_another_dtype_of_16_bits(model: Path) -> None:
    engine = engine_of(model, kv_cache_dtype="bfloat16")
    assert {layer.cache.v.dtype for layer in engine.model_runner.layers} == {torch.bfloat16}
    assert engine.description.dtype == "float32"


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
def test_scales_come_from_the_checkpoint(
    model: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    calibrated = with_tensors(
        model,
        tmp_path / "calibrated",
        scales_of(names),
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    )
    layers = engine_of(calibrated, kv_cache_dtype="fp8").model_runner.layers
    assert [(one.cache.k_scale, one.cache.v_scale) for one in layers] == [(0.5, 0.25), (1.5, 0.75)]
    # They say nothing about another cache.
    layers = engine_of(calibrated).model_runner.layers
    assert [(one.cache.k_scale, one.cache.v_scale) for one in layers] == [(1.0, 1.0)] * 2


def test_one_scale_for_keys_and_values(model: Path, tmp_path: Path) -> None:
    more = {f"model.layers.{index}.self_attn.kv_scale": torch.tensor(0.125) for index in range(2)}
    both = with_tensors(model, tmp_path / "both", more)
    layers = engine_of(both, kv_cache_dtype="fp8").model_runner.layers
    assert [(one.cache.k_scale, one.cache.v_scale) for one in layers] == [(0.125, 0.125)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "lacks v_scale of layer 1"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, r"k_scale' is 0\.0"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, r"shape \[2\].* one number"),
        ({"model.layers.0.self_attn.attn.k_scale": torch.ones(1)}, "k_scale of layer 0 twice"),
    ],
)
def test_scales_that_cannot_be_used(
    model: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    scales = {
        name: tensor
        for name, tensor in (scales_of(("k_scale", "v_scale")) | change).items()
        if tensor is not None
    }
    odd = with_tensors(model, tmp_path / "odd", scales)
    with pytest.raises(ModelError, match=message):
        engine_of(odd, kv_cache_dtype="fp8")


def test_a_scale_of_one_is_told_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jackfield"):
        engine_of(model, kv_cache_dtype="fp8")
    told = [record.message for record in caplog.records if "scales" in record.message]
    assert told == [
        "KV cache of float8_e4m3fn; scales 1: the checkpoint has no k_scale and v_scale, so "
        "numbers above 448 are cut off"
    ]


def test_a_backend_that_cannot_is_refused_with_what_can(model: Path) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        engine_of(model, kv_cache_dtype="fp8", attention_backend="flex")
    message = str(refusal.value)
    assert "attention_backend='flex'" in message
    assert "kv_cache_dtype=float8_e4m3fn is not supported (supported: bfloat16," in message
    assert "torch_sdpa" in message


def test_every_value_of_the_setting_has_a_dtype() -> None:
    from typing import get_args

    from jackfield.core.capabilities import KV_CACHE_DTYPES

    values = set(get_args(EngineOptions.model_fields["kv_cache_dtype"].annotation))
    assert values == {"auto", *KV_CACHE_DTYPES}
