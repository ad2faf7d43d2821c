"""Llama, and Qwen2 which differs from it in a bias: one definition for both.

Shapes: T tokens of the step, packed; N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.attention import AttentionSpec
from ..core.model import AttentionStep, Model, ModelConfig
from .config import check_config, layer_windows
from .layers import Embedding, Linear, RMSNorm, Shard
from .rope import RotaryEmbedding
from .weights import copy_weights

RopeRows = tuple[Tensor, Tensor]


class LlamaAttention(nn.Module):
    """Projections around the attention of one layer."""

    def __init__(
        self, config: ModelConfig, o_proj_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, self.head_size = config.hidden_size, config.head_size
        self.num_rotated = config.num_heads + config.num_kv_heads  # query and key heads
        self.heads = [config.num_heads, config.num_kv_heads]
        query, kv = (heads * self.head_size for heads in self.heads)
        self.qkv_proj = Linear(size, (query, kv, kv), config.attention_bias, dtype, device)
        self.o_proj = Linear(query, (size,), o_proj_bias, dtype, device)

    def forward(
        self, x: Tensor, rope: RotaryEmbedding, rows: RopeRows, layer: int, attention: AttentionStep
    ) -> Tensor:
        """``[T, hidden_size]`` to the same shape."""
        # Query, key and value are views of one buffer.
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_size)
        rotated = rope.rotate(qkv[:, : self.num_rotated], rows)
        query, key = torch.split(rotated, self.heads, 1)
        out = attention(layer, query, key, qkv[:, self.num_rotated :])
        projected: Tensor = self.o_proj(out.reshape(x.shape[0], -1))
        return projected

    def shards(self, name: str) -> Iterator[Shard]:
        """Parts of the parameters under their checkpoint names."""
        yield from self.qkv_proj.shards(*(f"{name}.{part}_proj" for part in "qkv"))
        yield from self.o_proj.shards(f"{name}.o_proj")


class LlamaMLP(nn.Module):
    """The gated feed-forward network (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, self.inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(size, (self.inner, self.inner), False, dtype, device)
        self.down_proj = Linear(self.inner, (size,), False, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden_size]`` to the same shape."""
        gate_up = self.gate_up_proj(x)
        gated = F.silu(gate_up[:, : self.inner]).mul_(gate_up[:, self.inner :])
        out: Tensor = self.down_proj(gated)
        return out

    def shards(self, name: str) -> Iterator[Shard]:
        """Parts of the parameters under their checkpoint names."""
        yield from self.gate_up_proj.shards(f"{name}.gate_proj", f"{name}.up_proj")
        yield from self.down_proj.shards(f"{name}.down_proj")


class LlamaLayer(nn.Module):
    """One decoder layer: both halves read the normalised residual stream and add to it."""

    def __init__(
        self, config: ModelConfig, o_proj_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype, device)
        self.self_attn = LlamaAttention(config, o_proj_bias, dtype, device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype, device)
        self.mlp = LlamaMLP(config, dtype, device)

    def forward(
        self,
        residual: Tensor,
        rope: RotaryEmbedding,
        rows: RopeRows,
        layer: int,
        attention: AttentionStep,
    ) -> None:
        """Add the layer's output to ``residual``, ``[T, hidden_size]``, in place."""
        x = self.input_layernorm(residual)
        residual.add_(self.self_attn(x, rope, rows, layer, attention))
        residual.add_(self.mlp(self.post_attention_layernorm(residual)))

    def shards(self, name: str) -> Iterator[Shard]:
        """Parts of the parameters under their checkpoint names."""
        yield from self.input_layernorm.shards(f"{name}.input_layernorm")
        yield from self.self_attn.shards(f"{name}.self_attn")
        yield from self.post_attention_layernorm.shards(f"{name}.post_attention_layernorm")
        yield from self.mlp.shards(f"{name}.mlp")


class LlamaForCausalLM(Model):
    """Llama 1 to 3, and every checkpoint with its layout (SmolLM2, TinyLlama, ...).

    Runs under ``torch.inference_mode``: the residual stream is updated in place.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """See the contract."""
        super().__init__(config, dtype, device)
        check_config(config)
        size, bias = config.hidden_size, self.o_proj_bias(config)
        self.embed_tokens = Embedding(config.vocab_size, size, dtype, device)
        self.layers = nn.ModuleList(
            LlamaLayer(config, bias, dtype, device) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype, device)
        self.rope = RotaryEmbedding(config, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head = Linear.sharing(self.embed_tokens.weight)
        else:
            self.lm_head = Linear(size, (config.vocab_size,), False, dtype, device)

    @staticmethod
    def o_proj_bias(config: ModelConfig) -> bool:
        """Whether the output projection has a bias: in Llama, where the others have one."""
        return config.attention_bias

    def attention_specs(self) -> Sequence[AttentionSpec]:
        """See the contract."""
        config = self.config
        return [
            AttentionSpec(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                v_head_size=config.head_size,
                scale=config.head_size**-0.5,
                dtype=self.dtype,
                sliding_window=window,
            )
            for window in layer_windows(config)
        ]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """See the contract."""
        rows = self.rope.rows(positions)
        residual = self.embed_tokens(input_ids)
        for index, layer in enumerate(self.layers):
            layer(residual, self.rope, rows, index, attention)
        normed: Tensor = self.norm(residual)
        return normed

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """See the contract."""
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    def shards(self) -> Iterator[Shard]:
        """Every tensor that a checkpoint must hold, with the place that it fills."""
        yield from self.embed_tokens.shards("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.shards(f"model.layers.{index}")  # type: ignore[operator]
        yield from self.norm.shards("model.norm")
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.shards("lm_head")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See the contract."""
        tied = {"lm_head.weight": self.embed_tokens.weight.data}
        copy_weights(weights, dict(self.shards()), tied if self.config.tie_word_embeddings else {})

    def finish_loading(self) -> None:
        """See the contract."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finish_loading()


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5: Llama with a bias on query, key and value, and none on the output."""

    @staticmethod
    def o_proj_bias(config: ModelConfig) -> bool:
        """Never."""
        return False
