"""The model runner: carries out one assembled step on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
    allocate_kv_cache,
)
from .batch import StepInputs
from .block_manager import BlockCopy
from .model import Model
from .sampler import sample

BackendFactory = Callable[[AttentionSpec, KVCacheSpec], AttentionBackend]


@dataclass(frozen=True)
class LayerAttention:
    """What serves one layer: a backend (shared by layers with an equal spec) and its own cache."""

    backend: AttentionBackend
    cache: KVCache


def kv_cache_spec(
    spec: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVCacheSpec:
    """The cache that a layer of this spec needs."""
    return KVCacheSpec(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        v_head_size=spec.v_head_size,
        dtype=dtype,
    )


def bind_layers(
    specs: Sequence[AttentionSpec],
    make_backend: BackendFactory,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerAttention]:
    """One backend for each distinct spec, one zero-filled cache for each layer."""
    backends: dict[AttentionSpec, AttentionBackend] = {}
    layers = []
    for spec in specs:
        cache_spec = kv_cache_spec(spec, num_blocks, block_size, dtype)
        if spec not in backends:
            backends[spec] = make_backend(spec, cache_spec)
        layout = backends[spec].capabilities(device).kv_layout
        layers.append(LayerAttention(backends[spec], allocate_kv_cache(cache_spec, layout, device)))
    return layers


class _StepAttention:
    """The ``AttentionStep`` of one step: the plans of all backends, ready to be called by layer."""

    def __init__(self, layers: Sequence[LayerAttention], batch: AttentionBatch) -> None:
        plans: dict[int, AttentionPlan] = {}
        for layer in layers:
            if id(layer.backend) not in plans:
                plans[id(layer.backend)] = layer.backend.plan(batch)
        self._layers = [(layer.backend, layer.cache, plans[id(layer.backend)]) for layer in layers]
        self._slot_mapping = batch.slot_mapping

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        backend, cache, plan = self._layers[layer]
        backend.write_kv(key, value, cache, self._slot_mapping)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        return backend.forward(query, cache, plan, out, sinks=sinks)


class ModelRunner:
    """Model, caches and sampler together.

    Args:
        model: with its weights loaded.
        layers: what serves each attention layer, in order.
    """

    def __init__(self, model: Model, layers: Sequence[LayerAttention]) -> None:
        self.model = model
        self.layers = list(layers)

    @torch.inference_mode()
    def execute(self, inputs: StepInputs, copies: Sequence[BlockCopy] = ()) -> list[int]:
        """Run a step.

        Args:
            inputs: the assembled step.
            copies: block copies to be done first.

        Returns:
            The new token of each sampling row. Fetching them is the step's only wait for the
            device.
        """
        self._copy_blocks(copies)
        attention = _StepAttention(self.layers, inputs.attention)
        hidden_states = self.model(inputs.input_ids, inputs.positions, attention)
        if inputs.sampling is None:
            return []
        rows = hidden_states.index_select(0, inputs.sample_indices)
        logits = self.model.compute_logits(rows)
        return list(sample(logits, inputs.sampling).tolist())

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        device = self.layers[0].cache.k.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        destinations = torch.tensor([copy.destination for copy in copies], device=device)
        for layer in self.layers:
            for tensor in (layer.cache.k, layer.cache.v):
                tensor[destinations] = tensor[sources]
