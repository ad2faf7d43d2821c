"""What a ``config.json`` alone says about attention, for models that there is no definition of.

Enough to tell which attention backends could serve a model: head counts and sizes, scale, windows,
soft cap, ALiBi, sinks. The fields are those of transformers' configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..core.attention import AttentionSpec
from ..core.errors import ModelError, UnsupportedError
from ..core.model import ModelConfig


def attention_from_fields(config: ModelConfig, dtype: torch.dtype) -> list[AttentionSpec]:
    """The spec of each layer, as far as the configuration's fields tell.

    Args:
        config: of the checkpoint.
        dtype: of query and output.

    Raises:
        UnsupportedError: attention of a kind that no ``AttentionSpec`` describes.
        ModelError: a field is malformed.
    """
    raw = config.raw
    if raw.get("kv_lora_rank"):
        raise UnsupportedError(
            f"model {config.architecture}",
            [f"kv_lora_rank={raw['kv_lora_rank']}: latent attention (MLA) is not supported"],
        )
    soft_cap = raw.get("attn_logit_softcapping")
    return [
        AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            v_head_size=config.head_size,
            scale=_scale(config),
            dtype=dtype,
            sliding_window=window,
            logits_soft_cap=None if soft_cap is None else float(soft_cap),
            alibi_slopes=_alibi_slopes(config) if _has_alibi(raw) else None,
            sinks=raw.get("model_type") == "gpt_oss",
        )
        for window in _windows(config)
    ]


def _scale(config: ModelConfig) -> float:
    if "attention_multiplier" in config.raw:
        return float(config.raw["attention_multiplier"])
    size = float(config.raw.get("query_pre_attn_scalar") or config.head_size)
    scale: float = size**-0.5
    return scale


def _windows(config: ModelConfig) -> list[int | None]:
    """The window of each layer, the row itself counted."""
    raw, layers = config.raw, config.num_layers
    window = raw.get("sliding_window")
    if window is None or raw.get("use_sliding_window") is False:
        return [None] * layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json: sliding_window={window!r} is not an integer of 1 or more")
    kinds = raw.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ModelError(
                f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers={layers}"
            )
        return [window if kind == "sliding_attention" else None for kind in kinds]
    pattern = raw.get("sliding_window_pattern")
    if pattern is None and raw.get("model_type") == "gemma2":
        pattern = 2
    if isinstance(pattern, int) and pattern > 1:
        return [None if (layer + 1) % pattern == 0 else window for layer in range(layers)]
    return [window] * layers


def _has_alibi(raw: Mapping[str, Any]) -> bool:
    inner = raw.get("attn_config")
    in_attention = isinstance(inner, Mapping) and bool(inner.get("alibi"))
    return raw.get("model_type") == "bloom" or bool(raw.get("alibi")) or in_attention


def _alibi_slopes(config: ModelConfig) -> tuple[float, ...]:
    """The published slopes (https://arxiv.org/abs/2108.12409): a geometric sequence for a power of
    two of heads; else that of the next smaller one, and every other slope of the next larger."""
    heads = config.num_heads
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    more = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return tuple(slopes + more[: heads - power])
