"""What serves the attention layers of a model: backends, caches, and the plans of a step."""

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
    KVLayout,
    allocate_kv_cache,
)

BackendFactory = Callable[[AttentionSpec, KVCacheSpec], AttentionBackend]
#: The plan of each backend, by the backend's ``id``.
Plans = dict[int, AttentionPlan]


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
    kv_scales: Sequence[tuple[float, float]] | None = None,
) -> list[LayerAttention]:
    """One backend for each distinct spec, one zero-filled cache for each layer.

    Args:
        specs: of the layers, in order.
        make_backend: a backend for a spec and its caches.
        num_blocks, block_size, dtype: of the caches.
        device: where they go.
        kv_scales: of keys and values of each layer, for caches of 8 bits; None is 1.
    """
    backends: dict[AttentionSpec, AttentionBackend] = {}
    layouts: dict[AttentionSpec, KVLayout] = {}
    layers = []
    for index, spec in enumerate(specs):
        cache_spec = kv_cache_spec(spec, num_blocks, block_size, dtype)
        if spec not in backends:
            backends[spec] = make_backend(spec, cache_spec)
            layouts[spec] = backends[spec].capabilities(device).kv_layout
        scales = (1.0, 1.0) if kv_scales is None else kv_scales[index]
        cache = allocate_kv_cache(cache_spec, layouts[spec], device, *scales)
        layers.append(LayerAttention(backends[spec], cache))
    return layers


def plan_step(
    layers: Sequence[LayerAttention], batch: AttentionBatch, into: Plans | None = None
) -> Plans:
    """Let each backend plan a step once.

    Args:
        layers: of the model.
        batch: the step.
        into: plans to be updated in place, for a captured CUDA graph.
    """
    plans: Plans = {}
    for layer in layers:
        key = id(layer.backend)
        if key not in plans:
            plans[key] = layer.backend.plan(batch, None if into is None else into[key])
    return plans


class StepAttention:
    """The ``AttentionStep`` of one step: all plans made, ready to be called by layer.

    Args:
        layers: of the model.
        plans: from ``plan_step``.
        slot_mapping: where the new keys and values go, ``[T]``, int64, on the device.
    """

    def __init__(
        self, layers: Sequence[LayerAttention], plans: Plans, slot_mapping: Tensor
    ) -> None:
        self._layers = [(layer.backend, layer.cache, plans[id(layer.backend)]) for layer in layers]
        self._slot_mapping = slot_mapping

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See ``AttentionStep``."""
        backend, cache, plan = self._layers[layer]
        backend.write_kv(key, value, cache, self._slot_mapping)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        return backend.forward(query, cache, plan, out, sinks=sinks)
