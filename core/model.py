"""The model contract: what a model is built from and what it owes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import AttentionSpec


@dataclass(frozen=True)
class ModelConfig:
    """Constants of a checkpoint.

    Attributes:
        architecture: the class name in the checkpoint's configuration, as ``LlamaForCausalLM``.
        vocab_size: rows of the embedding; logits have this many columns.
        hidden_size, intermediate_size: widths of the residual stream and of the MLP.
        num_layers: decoder layers.
        num_heads, num_kv_heads, head_size: attention shape.
        max_position_embeddings: longest sequence that the checkpoint was made for.
        rms_norm_eps: of the normalisation layers.
        rope_theta: base of the rotary embedding.
        rope_scaling: the checkpoint's rope parameters, with the key ``rope_type``; empty is none.
        tie_word_embeddings: whether the output layer is the embedding.
        attention_bias: whether query, key and value projections have a bias.
        eos_token_ids: the model's own end tokens.
        bos_token_id: its begin token, if any.
        torch_dtype: dtype of the stored weights.
        raw: the configuration as it was read, for models that need more of it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: torch.dtype = torch.float32
    raw: Mapping[str, Any] = field(default_factory=dict)


class AttentionStep(Protocol):
    """Attention of one step, handed to the model: each layer calls it with its own index."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store key and value in the layer's cache, then attend.

        Args:
            layer: index of the layer, 0 to ``num_layers - 1``.
            query: ``[T, N, H]``; rows may be strided.
            key: ``[T, K, H]``.
            value: ``[T, K, Hv]``.
            sinks: ``[N]``, float32, for layers whose spec has sinks.

        Returns:
            ``[T, N, Hv]``, the query's dtype.
        """
        ...


class Model(nn.Module, ABC):
    """A decoder-only language model on packed tokens.

    Registered by architecture name through the hook ``jackfield_models``.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the parameters, uninitialised.

        Raises:
            UnsupportedError: the configuration asks for what this model does not have.
        """
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """The spec of each layer, in order."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Hidden states of all tokens.

        Args:
            input_ids: ``[T]``, int64, on the device.
            positions: ``[T]``, int64, on the device: position of each token in its sequence.
            attention: see ``AttentionStep``.

        Returns:
            ``[T, hidden_size]``, after the final normalisation.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of some rows: ``[rows, hidden_size]`` to ``[rows, vocab_size]``."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from tensors under their Hugging Face names.

        Raises:
            ModelError: a tensor is missing, unknown, or of a wrong shape; it is named.
        """

    def finish_loading(self) -> None:
        """Called once after the weights are there: pack or repack them for this device."""
