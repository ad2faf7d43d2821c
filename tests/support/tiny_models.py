"""Tiny random checkpoints, made on the spot: Llama and Qwen2, as safetensors or GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = 256, 257

TINY_CONFIG: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    # Large weights, so that a wrong position or a wrong row changes logits visibly.
    "initializer_range": 0.2,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then the special tokens from id 256 on."""
    vocabulary = {char: index for index, char in enumerate(_BYTES)}
    inner = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[1]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_llama(directory: Path, *, sharded: bool = False, **config: Any) -> PreTrainedModel:
    """Save a random Llama and its tokenizer; the same every time.

    Args:
        directory: where to.
        sharded: spread the weights over several files with an index.
        config: fields of ``LlamaConfig`` that differ from ``TINY_CONFIG``.

    Returns:
        The transformers model, float32, to compare with.
    """
    return _save(LlamaForCausalLM, LlamaConfig(**{**TINY_CONFIG, **config}), directory, sharded)


def make_tiny_qwen2(directory: Path, *, sharded: bool = False, **config: Any) -> PreTrainedModel:
    """Save a random Qwen2 and its tokenizer, as ``make_tiny_llama``."""
    return _save(Qwen2ForCausalLM, Qwen2Config(**{**TINY_CONFIG, **config}), directory, sharded)


def _save(model_class: type[Any], config: Any, directory: Path, sharded: bool) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, which would hide them
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(directory, max_shard_size="100KB" if sharded else "1GB")
    byte_tokenizer().save_pretrained(directory)
    return model


def write_tiny_gguf(path: Path, model: PreTrainedModel, **metadata: Any) -> None:
    """Write a tiny model as float32 GGUF, the way converters do.

    Args:
        path: of the file.
        model: what ``make_tiny_llama`` or ``make_tiny_qwen2`` returned.
        metadata: further string values, keys without the architecture; ``arch`` renames that.
    """
    config = model.config
    arch = metadata.pop("arch", config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in metadata.items():
        writer.add_string(f"{arch}.{key}", value)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if config.model_type == "llama" else gguf.MODEL_ARCH.QWEN2,
        config.num_hidden_layers,
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        projection = name.split(".")[-2]
        if config.model_type == "llama" and projection in heads:
            tensor = _pairs_from_halves(tensor, heads[projection])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    count = VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)
    # A file must have a merge: this one joins the bytes C0 and C1, which no text contains.
    padding = ["ÀÁ", *(f"<unused{index}>" for index in range(1, count))]
    normal, control, unused = 1, 3, 5
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*_BYTES, *SPECIAL_TOKENS, *padding])
    writer.add_token_types(
        [normal] * 256 + [control] * len(SPECIAL_TOKENS) + [unused] * len(padding)
    )
    writer.add_token_merges(["À Á"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)


def _pairs_from_halves(rows: Tensor, num_heads: int) -> Tensor:
    head_size = rows.shape[0] // num_heads
    order = torch.arange(head_size).view(2, head_size // 2).t().flatten()
    per_head = rows.view(num_heads, head_size, *rows.shape[1:])
    return per_head[:, order].reshape(rows.shape)


class ContiguousAttention:
    """An ``AttentionStep`` for one sequence, which keeps keys and values as they come."""

    def __init__(self, windows: Mapping[int, int] | None = None) -> None:
        self.windows = windows or {}
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to everything so far; see the contract."""
        if layer in self.cache:
            old_key, old_value = self.cache[layer]
            key, value = torch.cat((old_key, key)), torch.cat((old_value, value))
        self.cache[layer] = (key, value)
        rows, keys = query.shape[0], key.shape[0]
        position = torch.arange(keys - rows, keys)[:, None]
        visible = torch.arange(keys) <= position
        if layer in self.windows:
            visible &= torch.arange(keys) > position - self.windows[layer]
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=visible,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
