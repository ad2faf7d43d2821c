"""GGUF checkpoints of Llama and Qwen2: their configuration and weights under Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from ..core.errors import ModelError, UnsupportedError
from ..core.model import ModelConfig
from .config import check_config
from .gguf_file import GGUFFile

ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""GGUF's architecture names and the model class that serves each."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """Read the constants of a checkpoint from a file's metadata.

    ``torch_dtype`` of a quantised file is float16, the dtype of its scales.

    Raises:
        UnsupportedError: another architecture, or a feature that the models here do not have.
        ModelError: a metadata key is missing.
    """
    arch = str(file.metadata.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"GGUF file {file.path}",
            [f"architecture {arch!r} is not supported (supported: {', '.join(ARCHITECTURES)})"],
        )
    fields = _Fields(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'")
    vocab_size, hidden_size = embedding.shape
    num_heads = fields.integer("attention.head_count")
    head_size = fields.integer("attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(fields, head_size)
    context, scaling = _rope(fields, fields.integer("context_length"))
    config = ModelConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        max_position_embeddings=context,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        eos_token_ids=_end_tokens(file.metadata),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        torch_dtype=_PLAIN_DTYPES.get(embedding.kind, torch.float16),
        raw={k: v for k, v in file.metadata.items() if not k.startswith("tokenizer.")},
    )
    check_config(config)
    return config


def iterate_gguf(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, expanded to float32, on the host.

    Files of architecture ``llama`` hold the rows of query and key so that neighbouring elements
    pair up in the rotary embedding; they are put back, so that first and second half pair up.

    Raises:
        ModelError: a tensor has a name that is not known here, or cannot be read.
    """
    interleaved = config.architecture == "LlamaForCausalLM"
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name in file.tensors:
        if name == _ROPE_FACTORS:
            continue  # part of the configuration
        stem, suffix, layer = _split_name(file, name)
        tensor = file.tensor(name)
        if layer is None:
            yield f"{_NAMES[stem]}.{suffix}", tensor
            continue
        if interleaved and stem in heads:
            tensor = halves_from_pairs(tensor, heads[stem])
        yield f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{suffix}", tensor


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from (0, h, 1, h + 1, ...) to (0, 1, ..., h, h + 1, ...).

    Args:
        rows: ``[num_heads * head_size, ...]``.
        num_heads: heads that they belong to.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _split_name(file: GGUFFile, name: str) -> tuple[str, str, int | None]:
    """GGUF name to stem, ``weight`` or ``bias``, and layer."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is not None:
        layer = None if match[1] is None else int(match[1])
        if match[2] in (_NAMES if layer is None else _LAYER_NAMES):
            return match[2], match[3], layer
    raise ModelError(f"{file.path} holds the tensor {name!r}, which no model here has")


class _Fields:
    """Typed access to the metadata keys of one architecture."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            found = "lacks" if value is None else f"has {value!r} under"
            raise ModelError(f"{self.file.path} {found} the metadata key {self.arch}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise ModelError(f"{self.file.path}: {self.arch}.{key}={value!r} is not an integer")
        return int(value)


def _refuse_unsupported(fields: _Fields, head_size: int) -> None:
    wanted = (
        ("rope.dimension_count", head_size),
        ("attention.value_length", head_size),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    )
    reasons = [
        f"{fields.arch}.{key}={fields.get(key)} is not supported (supported: {possible})"
        for key, possible in wanted
        if fields.get(key) not in (None, possible)
    ]
    if reasons:
        raise UnsupportedError(f"GGUF file {fields.file.path}", reasons)


def _rope(fields: _Fields, context: int) -> tuple[int, dict[str, Any]]:
    """Longest sequence and rope parameters. ``context_length`` counts any scaling in."""
    kind = fields.get("rope.scaling.type")
    factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    original = fields.get("rope.scaling.original_context_length") or context
    if kind is None and fields.get("rope.scale_linear"):
        kind = "linear"
    if _ROPE_FACTORS in fields.file.tensors:
        if kind not in (None, "none"):
            raise UnsupportedError(
                f"GGUF file {fields.file.path}",
                [f"{_ROPE_FACTORS} together with rope.scaling.type={kind!r} is not supported"],
            )
        factors = tuple(fields.file.tensor(_ROPE_FACTORS).tolist())
        return context, {
            "rope_type": "freq_factors",
            "freq_factors": factors,
            "original_max_position_embeddings": original,
        }
    if kind in (None, "none"):
        return context, {}
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    if kind == "yarn":
        scaling |= {
            name: fields.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")
        }
        attention = fields.get("rope.scaling.attn_factor")
        if attention is not None and factor:
            scaling["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    return context, scaling


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-text token, and the tokens that end a turn or a message where there are any."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(token for token in found if token is not None))
