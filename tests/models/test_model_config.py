"""Reading ``config.json``: spellings, defaults, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jackfield.core.errors import JackfieldError, ModelError, UnsupportedError
from jackfield.models.config import layer_windows, parse_config
from jackfield.models.rope import RotaryEmbedding, cos_sin_table

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
POSITIONS = [0, 1, 31, 63, 64, 100, 127]


def our_table(raw: dict[str, Any], length: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return cos_sin_table(parse_config(raw), length)


def their_table(raw: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    fields = {key: value for key, value in raw.items() if key != "architectures"}
    rope = LlamaRotaryEmbedding(LlamaConfig(**fields))
    cos, sin = rope(torch.zeros(1), torch.arange(128)[None])
    return cos[0, :, :8], sin[0, :, :8]


def assert_same_rows(ours: Any, theirs: Any, positions: list[int] = POSITIONS) -> None:
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our[positions], their[positions], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 2.0, "truncate": False, "beta_slow": 2.0},
    ],
    ids=str,
)
def test_tables_equal_transformers(scaling: dict[str, Any] | None) -> None:
    raw = LLAMA | {"rope_scaling": scaling}
    assert_same_rows(our_table(raw), their_table(raw))


def test_dynamic_rows_are_those_of_a_sequence_that_ends_there() -> None:
    raw = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    ours = our_table(raw)
    fields = {key: value for key, value in raw.items() if key != "architectures"}
    for position in POSITIONS:
        rope = LlamaRotaryEmbedding(LlamaConfig(**fields))
        cos, sin = rope(torch.zeros(1), torch.arange(position + 1)[None])
        torch.testing.assert_close(ours[0][position], cos[0, -1, :8], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours[1][position], sin[0, -1, :8], atol=1e-5, rtol=1e-5)


def test_rope_scaling_spelled_two_ways() -> None:
    """B048: ``type``, ``rope_type`` and ``rope_parameters`` are one thing."""
    without_theta = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    spellings = [
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        LLAMA | {"rope_scaling": {"type": "old", "rope_type": "linear", "factor": 2.0}},
        without_theta
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ]
    first, *others = [parse_config(raw) for raw in spellings]
    for other in others:
        assert other.rope_scaling == first.rope_scaling
        assert (other.rope_theta, other.max_position_embeddings) == (10000.0, 128)
    assert_same_rows(our_table(spellings[0]), their_table(spellings[1]), [100])


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "foo"}, ["rope_type='foo'", "linear", "llama3", "yarn"]),
        ({"rope_type": "linear"}, ["factor", "missing", "'linear'"]),
        ({"type": "dynamic", "factor": "2"}, ["factor", "'2'"]),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, ["low_freq_factor"]),
        (LLAMA3 | {"high_freq_factor": 1.0}, ["high_freq_factor=1.0", "low_freq_factor=1.0"]),
        ("linear", ["rope_scaling='linear'"]),
    ],
)
def test_rope_errors_name_the_field(scaling: Any, words: list[str]) -> None:
    """B048: an unknown kind and a missing factor are named."""
    with pytest.raises(JackfieldError) as caught:
        parse_config(LLAMA | {"rope_scaling": scaling})
    assert isinstance(caught.value, ModelError | UnsupportedError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        (LLAMA3, 64),
    ],
    ids=str,
)
def test_longest_sequence_counts_the_scaling_in(scaling: dict[str, Any], longest: int) -> None:
    config = parse_config(LLAMA | {"rope_scaling": scaling})
    assert config.max_position_embeddings == longest
    rope = RotaryEmbedding(config, torch.float32, torch.device("cpu"))
    assert rope.rows(torch.tensor([longest - 1]))[0].shape == (1, 1, 16)


def test_end_tokens_of_both_files_are_merged() -> None:
    raw = LLAMA | {"eos_token_id": 2, "bos_token_id": 1, "dtype": "bfloat16"}
    config = parse_config(raw, {"eos_token_id": [7, 2], "bos_token_id": 1})
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1
    assert config.torch_dtype == torch.bfloat16
    assert parse_config(LLAMA).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["'awq'", "GGUF"]),
        ({"quantization_config": {"quant_method": "magic"}}, ["'magic'", "quant_method"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"head_dim": 15}, ["head_size=15"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": 64.5}, ["hidden_size=64.5"]),
        ({"rms_norm_eps": "tiny"}, ["rms_norm_eps='tiny'"]),
        ({"torch_dtype": "int8"}, ["torch_dtype='int8'", "bfloat16"]),
        ({"architectures": []}, ["architectures=[]"]),
    ],
)
def test_refusals_name_field_and_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(JackfieldError) as caught:
        parse_config(LLAMA | change)
    for word in words:
        assert word in str(caught.value)


def test_sliding_window_fields_of_qwen2() -> None:
    raw = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    windowed = raw | {"use_sliding_window": True, "max_window_layers": 1}
    assert layer_windows(parse_config(raw)) == (None, None)
    assert layer_windows(parse_config(windowed)) == (None, 32)
    listed = windowed | {"layer_types": ["sliding_attention", "full_attention"]}
    assert layer_windows(parse_config(listed)) == (32, None)
    with pytest.raises(ModelError, match="layer_types"):
        parse_config(windowed | {"layer_types": ["sliding_attention"]})
    with pytest.raises(ModelError, match="sliding_window=0"):
        parse_config(windowed | {"sliding_window": 0})


def test_other_architectures_keep_fields_of_their_own() -> None:
    raw = LLAMA | {"architectures": ["MyModel"], "rope_scaling": {"rope_type": "mine", "x": 1}}
    config = parse_config(raw)
    assert config.rope_scaling["rope_type"] == "mine"
    assert config.raw["rope_scaling"] == {"rope_type": "mine", "x": 1}
