"""A paged cache in NHD order, seen token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.attention import KVCache, KVCacheSpec
from ._kv_store import as_stored, store_on_host, store_without_sync
from .triton_paged.store import KernelStore, by_token_places, kernel_reads, kernel_writes
from .triton_paged.tensors import CachePlaces

Shape = tuple[int, int, int]


class NhdCache:
    """How a backend reads and writes the caches that it was built for.

    On CUDA a Triton kernel writes where Triton can compile one, else torch does, in more launches.

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
        self._kernel = KernelStore(spec, device) if kernel_writes(spec, device) else None
        self._places: dict[tuple[int, ...], CachePlaces] = {}

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
        by_token = self.by_token(cache)
        packed = by_token[0].stride(2) == by_token[1].stride(2) == 1
        if self._kernel is not None and packed and kernel_reads(key, value):
            self._kernel.write(key, value, cache, slot_mapping, self._places_of(*by_token))
            return
        new = (
            as_stored(key, cache.k.dtype, cache.k_scale),
            as_stored(value, cache.v.dtype, cache.v_scale),
        )
        self._store(by_token, slot_mapping, new)

    def _places_of(self, keys: Tensor, values: Tensor) -> CachePlaces:
        """Where tokens lie; blocks of one token may have gaps between them."""
        strides = (*keys.stride(), *values.stride())
        places = self._places.get(strides)
        if places is None:
            places = self._places.setdefault(strides, by_token_places(keys, values))
        return places

    def _view(self, cache: Tensor, shape: Shape) -> Tensor:
        try:
            return cache.view(shape)
        except RuntimeError:
            raise ValueError(
                f"attention backend {self._backend!r} was built for a cache of {shape[0]} tokens x "
                f"{shape[1]} heads x {shape[2]} in NHD order, not for one of shape "
                f"{tuple(cache.shape)} and strides {cache.stride()}"
            ) from None
