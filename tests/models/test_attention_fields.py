"""Attention as the fields of a configuration alone describe it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.published_configs import CONFIGS

from jackfield.core.attention import AttentionSpec
from jackfield.core.errors import ModelError, UnsupportedError
from jackfield.models.attention_fields import attention_from_fields
from jackfield.models.config import parse_config
from jackfield.models.llama import LlamaForCausalLM, Qwen2ForCausalLM


def specs(name: str, **fields: Any) -> list[AttentionSpec]:
    config = parse_config({**CONFIGS[name], **fields})
    return attention_from_fields(config, torch.bfloat16)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Llama-3-8B", "head size 72"])
def test_fields_agree_with_the_definitions_that_there_are(name: str) -> None:
    config = parse_config(CONFIGS[name])
    cls = Qwen2ForCausalLM if "Qwen" in name else LlamaForCausalLM
    with torch.device("meta"):
        model = cls(config, torch.bfloat16, torch.device("meta"))
    assert specs(name) == list(model.attention_specs())


def test_gemma_alternates_and_caps() -> None:
    found = specs("Gemma-2-9B")
    assert [spec.sliding_window for spec in found[:4]] == [4096, None, 4096, None]
    assert {(spec.scale, spec.logits_soft_cap, spec.head_size) for spec in found} == {
        (1 / 16, 50.0, 256)
    }
    assert specs("Gemma-2-9B", query_pre_attn_scalar=144)[0].scale == 1 / 12


def test_a_window_counts_the_row_itself_in_every_layer() -> None:
    found = specs("Phi-3-mini")
    assert {(spec.sliding_window, spec.head_size) for spec in found} == {(2047, 96)}


def test_layer_types_and_patterns_say_which_layers_have_the_window() -> None:
    kinds = ["full_attention", "sliding_attention"] * 16
    listed = specs("Phi-3-mini", layer_types=kinds)
    assert [spec.sliding_window for spec in listed[:2]] == [None, 2047]
    every_third = specs("Phi-3-mini", sliding_window_pattern=3)
    assert [spec.sliding_window for spec in every_third[:4]] == [2047, 2047, None, 2047]
    with pytest.raises(ModelError, match="layer_types has 1 entries"):
        specs("Phi-3-mini", layer_types=["full_attention"])
    with pytest.raises(ModelError, match="sliding_window=0 is not an integer of 1 or more"):
        specs("Phi-3-mini", sliding_window=0)


def test_alibi_slopes_fall_geometrically() -> None:
    slopes = specs("Llama-3-8B", num_attention_heads=8, num_key_value_heads=8, alibi=True)
    assert slopes[0].alibi_slopes == tuple(2.0**-exponent for exponent in range(1, 9))
    odd = specs(
        "Llama-3-8B", num_attention_heads=3, num_key_value_heads=3, hidden_size=192, alibi=True
    )
    assert odd[0].alibi_slopes == (2.0**-4, 2.0**-8, 2.0**-2)


def test_sinks_and_latent_attention() -> None:
    assert specs("Llama-3-8B", model_type="gpt_oss")[0].sinks
    assert not specs("Llama-3-8B")[0].sinks
    with pytest.raises(UnsupportedError, match=r"kv_lora_rank=512.*MLA"):
        specs("Llama-3-8B", kv_lora_rank=512)
