"""A paged cache in NHD order, seen token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.attention import KVCache, KVCacheSpec
from ._kv_store import store_on_host, store_without_sync

Shape = tuple[int, int, int]


class NhdCache:
    """How a backend reads and writes the caches that it was built for.

    Attributes:
        k_shape: shape of keys by token, ``(P * B, K, H)``.
        v_shape: shape of values by token, ``(P * B, K, Hv)``.
    """

    def __init__(self, backend: str, spec: KVCacheSpec, device: torch.device) -> None:
        """
        Args:
            backend: its name, for messages.
            spec: the caches.
            device: where they are.
        """
        tokens = spec.num_blocks * spec.block_size
        self.k_shape: Shape = (tokens, spec.num_kv_heads, spec.head_size)
        self.v_shape: Shape = (tokens, spec.num_kv_heads, spec.v_head_size)
        self._backend = backend
        self._store = store_on_host if device.type == "cpu" else store_without_sync

    def by_token(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Keys and values in the shapes above: the same memory.

        Raises:
            ValueError: the cache has another size or order.
        """
        return self._view(cache.k, self.k_shape), self._view(cache.v, self.v_shape)

    def write(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """``AttentionBackend.write_kv``."""
        if not len(slot_mapping):
            return
        new = key.to(cache.k.dtype), value.to(cache.v.dtype)
        self._store(self.by_token(cache), slot_mapping, new)

    def _view(self, cache: Tensor, shape: Shape) -> Tensor:
        try:
            return cache.view(shape)
        except RuntimeError:
            raise ValueError(
                f"attention backend {self._backend!r} was built for a cache of {shape[0]} tokens x "
                f"{shape[1]} heads x {shape[2]} in NHD order, not for one of shape "
                f"{tuple(cache.shape)} and strides {cache.stride()}"
            ) from None
