"""From a Hugging Face ``config.json`` to ``ModelConfig``.

Every spelling that transformers has used for the same thing gives the same result: rope parameters
as ``rope_theta`` + ``rope_scaling`` (kind under ``type`` or ``rope_type``) or as
``rope_parameters``, the dtype as ``torch_dtype`` or ``dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import ModelError, UnsupportedError
from ..core.model import ModelConfig
from .rope import check_rope

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_DEFAULT_THETA = 10000.0

BUILT_IN = ("LlamaForCausalLM", "Qwen2ForCausalLM")
"""Architectures whose configuration is checked here in full; other models check their own."""


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read the constants of a checkpoint.

    ``max_position_embeddings`` of the result is the longest sequence that the checkpoint serves,
    and the default of ``max_model_len``: the configuration's own number, multiplied by the factor
    of ``linear`` and ``dynamic`` rope scaling, and for ``yarn`` at least factor times
    ``original_max_position_embeddings`` (``llama3`` configurations already count it in).
    ``rope_scaling`` always holds ``original_max_position_embeddings``, the length before scaling.

    Args:
        raw: the content of ``config.json``.
        generation: the content of ``generation_config.json``; its end tokens are added.

    Raises:
        ModelError: a field is missing or malformed; it is named.
        UnsupportedError: a field asks for what the built-in models do not have.
    """
    generation = generation or {}
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"config.json: architectures={architectures!r} names no model class")
    architecture = str(architectures[0])
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    theta, scaling, max_length = _rope(raw, _integer(raw, "max_position_embeddings"))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", num_heads),
        head_size=_integer(raw, "head_dim", hidden_size // num_heads),
        max_position_embeddings=max_length,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        # Qwen2 has these biases in every checkpoint and no field for them.
        attention_bias=bool(raw.get("attention_bias", architecture == "Qwen2ForCausalLM")),
        eos_token_ids=_merged_ids(raw.get("eos_token_id"), generation.get("eos_token_id")),
        bos_token_id=next(
            iter(_merged_ids(raw.get("bos_token_id"), generation.get("bos_token_id"))), None
        ),
        torch_dtype=_dtype(raw),
        raw=dict(raw),
    )
    if architecture in BUILT_IN:
        check_config(config)
    return config


def check_config(config: ModelConfig) -> None:
    """Refuse what the built-in Llama and Qwen2 definitions do not compute.

    Raises:
        ModelError: the numbers contradict each other.
        UnsupportedError: with every reason.
    """
    raw = config.raw
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    wanted = (
        ("hidden_act", raw.get("hidden_act", "silu"), ("silu", "swish")),
        ("mlp_bias", raw.get("mlp_bias") or False, (False,)),
        ("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0, (1.0,)),
    )
    reasons = [
        f"{field}={value!r} is not supported (supported: {', '.join(map(repr, possible))})"
        for field, value, possible in wanted
        if value not in possible
    ]
    quantization = raw.get("quantization_config")
    if quantization and not _quantises_cache_only(quantization):
        method = quantization.get("quant_method", quantization)
        reasons.append(
            f"quantization_config.quant_method={method!r} is not supported (supported: "
            "unquantised safetensors, with or without scales of the KV cache, and quantised GGUF "
            "files)"
        )
    if reasons:
        raise UnsupportedError(f"model {config.architecture}", reasons)
    check_rope(config)
    layer_windows(config)


def _quantises_cache_only(quantization: Mapping[str, Any]) -> bool:
    """Whether all that is quantised is the KV cache: the weights are what they always are."""
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and bool(quantization.get("kv_cache_scheme"))
        and not quantization.get("config_groups")
    )


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, counted with the row itself; None is unlimited.

    Qwen2 configurations either list ``layer_types`` or give ``use_sliding_window`` and
    ``max_window_layers``: the layers from that index on are the windowed ones. Without
    ``use_sliding_window`` the field ``sliding_window`` means nothing.

    Raises:
        ModelError: the fields contradict each other.
    """
    raw, layers = config.raw, config.num_layers
    if config.architecture != "Qwen2ForCausalLM" or not raw.get("use_sliding_window"):
        return (None,) * layers
    window = raw.get("sliding_window")
    if window is None:
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json: sliding_window={window!r} is not an integer of 1 or more")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _integer(raw, "max_window_layers", layers, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise ModelError(
            f"config.json: layer_types={kinds!r} must be one of {', '.join(known)} for each of "
            f"num_hidden_layers={layers}"
        )
    return tuple(known[kind] for kind in kinds)


def _rope(raw: Mapping[str, Any], max_length: int) -> tuple[float, dict[str, Any], int]:
    """Theta, normalised scaling parameters, and the longest sequence with them."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: rope_scaling={given!r} is not an object")
    scaling = dict(given)
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", None) or kind or "default"
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = raw.get("rope_theta")
    theta = _number({"rope_theta": theta}, "rope_theta", _DEFAULT_THETA)
    if kind == "default":
        return theta, {}, max_length
    original = scaling.get("original_max_position_embeddings") or max_length
    scaling |= {"rope_type": kind, "original_max_position_embeddings": original}
    factor = scaling.get("factor")
    if isinstance(factor, int | float) and isinstance(original, int):
        if kind in ("linear", "dynamic"):
            max_length = int(max_length * factor)
        elif kind == "yarn":
            max_length = max(max_length, int(original * factor))
    return theta, scaling, max_length


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"config.json: {name}={value!r} is not an integer of {least} or more")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name}={value!r} is not a number above 0")
    return float(value)


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if name not in _DTYPES:
        raise ModelError(f"config.json: torch_dtype={name!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _merged_ids(*fields: object) -> tuple[int, ...]:
    """Token ids out of fields that hold nothing, one id or a list; each once, in order."""
    ids: dict[int, None] = {}
    for value in fields:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int):
                ids[item] = None
    return tuple(ids)
