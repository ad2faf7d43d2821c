"""Writing new keys and values to a paged cache that is contiguous by token (NHD), by torch."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def as_stored(new: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """New keys or values as a cache holds them, see ``AttentionBackend.write_kv``.

    Args:
        new: any shape and floating dtype.
        dtype: of the cache.
        scale: ``KVCache.k_scale`` or ``v_scale``; counts in a cache of 8 bits only.
    """
    if dtype.itemsize > 1 or new.dtype == dtype:
        return new.to(dtype)
    wide = new.to(torch.float32)
    if scale != 1.0:
        # Torch turns the division of a CUDA tensor by a number into a product.
        wide = wide / torch.full((), scale, dtype=torch.float32, device=new.device)
    largest = torch.finfo(dtype).max
    return wide.clamp(-largest, largest).to(dtype)


def store_on_host(caches: Pair, slots: Tensor, new: Pair) -> None:
    """Write keys and values to a cache on the CPU.

    Args:
        caches: keys and values by token, ``[P * B, K, H]`` and ``[P * B, K, Hv]``.
        slots: ``[T]``, int64; rows of ``new`` with -1 are not stored.
        new: ``[T, K, H]`` and ``[T, K, Hv]``, the cache's dtype.
    """
    if int(slots.min()) < 0:
        kept = (slots != -1).nonzero().squeeze(1)
        slots, new = slots[kept], (new[0][kept], new[1][kept])
    for rows, values in zip(caches, new, strict=True):
        bits(rows).index_copy_(0, slots, bits(values))


def store_without_sync(caches: Pair, slots: Tensor, new: Pair) -> None:
    """``store_on_host`` for any device, without waiting for it to learn which slots are -1.

    A row that is not stored repeats the first row that is. If there is none at all, all of them
    write back what slot 0 holds.
    """
    stored = slots != -1
    first = stored.to(torch.uint8).argmax()
    source = torch.where(stored, torch.arange(len(slots), device=slots.device), first)
    any_stored = stored.any()
    targets = torch.where(any_stored, slots.index_select(0, source), 0)
    for rows, values in zip(caches, new, strict=True):
        rows, values = bits(rows), bits(values)
        old, wanted = rows.index_select(0, targets), values.index_select(0, source)
        rows.index_copy_(0, targets, torch.where(any_stored, wanted, old))


def bits(tensor: Tensor) -> Tensor:
    """The same memory, as bytes if it has a dtype of 8 bits, for which torch lacks operations."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
