"""Visible keys and values copied out of the cache, for operators that cannot read it by blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.attention import AttentionBatch, AttentionSpec, KVCacheSpec
from ..core.errors import UnsupportedError
from ._batch_parts import BatchPart, Int64, blind_rows, take_part
from ._packed_keys import PackedKeys, pack_keys
from ._views import part_of, split

# Compiled kernels read 16 bytes at a time.
_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class GatheredPart:
    """Sequences whose keys are copied and attended to at once; on the host.

    Attributes:
        part: the sequences, each with query rows and tokens.
        keys: where their visible keys lie.
    """

    part: BatchPart
    keys: PackedKeys


def gathered_parts(
    batch: AttentionBatch,
    sequences: Int64,
    block_size: int,
    sliding_window: int | None,
    max_keys: int,
) -> list[GatheredPart]:
    """Cut sequences into runs whose keys are few enough to be copied at a time.

    Args:
        batch: read from its host twins.
        sequences: ascending numbers of sequences, each with query rows and tokens.
        block_size: ``B``.
        sliding_window: as in ``AttentionSpec``.
        max_keys: most keys of a run, unless a single sequence has more.
    """
    if not len(sequences):
        return []
    whole = take_part(batch, sequences, block_size)
    keys = pack_keys(whole, block_size, sliding_window)
    if len(keys.slots) <= max_keys:
        return [GatheredPart(whole, keys)]
    parts = []
    for first, end in _runs(keys.key_lens.tolist(), max_keys):
        part = take_part(batch, sequences[first:end], block_size)
        parts.append(GatheredPart(part, pack_keys(part, block_size, sliding_window)))
    return parts


def _runs(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """First and end index of runs of at most ``most`` in sum, unless one length is more."""
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > most:
            yield first, index
            first, total = index, 0
        total += length
    yield first, len(lengths)


def split_blind(batch: AttentionBatch, sequences: Int64) -> tuple[Int64, Int64]:
    """Sequences that see a key, and the query rows of those without any token, which see none.

    Args:
        batch: read from its host twins.
        sequences: ascending numbers of sequences with query rows.
    """
    seeing = sequences[batch.seq_lens_cpu.numpy()[sequences] > 0]
    return seeing, blind_rows(batch, sequences)


class KeyGather:
    """Copies keys and values into buffers that all plans of a backend share.

    Args:
        spec: the layer.
        cache: its cache.
        device: where both are.
        repeat: copies of each key/value head, for operators without grouped heads.
    """

    def __init__(
        self, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, repeat: int
    ) -> None:
        self._repeat = repeat
        heads = (spec.num_kv_heads, repeat)
        self._k_shape = (*heads, spec.head_size)
        self._v_shape = (*heads, spec.v_head_size)
        self._k_buffer = torch.empty(0, dtype=cache.dtype, device=device)
        self._v_buffer = torch.empty(0, dtype=cache.dtype, device=device)
        self.elements_per_key = spec.num_kv_heads * repeat * (spec.head_size + spec.v_head_size)

    def room(self, num_keys: int) -> tuple[Tensor, Tensor]:
        """Where so many keys and values go: ``[num_keys, K, repeat, H]`` and ``[.., Hv]``."""
        self._k_buffer, keys = part_of(self._k_buffer, (num_keys, *self._k_shape))
        self._v_buffer, values = part_of(self._v_buffer, (num_keys, *self._v_shape))
        return keys, values

    def gather(
        self, caches: tuple[Tensor, Tensor], slots: Tensor, room: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Copy.

        Args:
            caches: keys and values by token, ``[P * B, K, H]`` and ``[P * B, K, Hv]``.
            slots: ``[num_keys]``, int32 or int64, on the device.
            room: what ``room`` returned.

        Returns:
            Keys and values, ``[num_keys, K * repeat, H]`` and ``[.., Hv]``.
        """
        for cache, target in zip(caches, room, strict=True):
            repeated = cache.unsqueeze(2).expand(-1, -1, self._repeat, -1)
            torch.index_select(repeated, 0, slots, out=target)
        return room[0].flatten(1, 2), room[1].flatten(1, 2)


def grouped(tensor: Tensor, num_kv_heads: int) -> Tensor:
    """``[T, N, H]`` as ``[T, K, N // K, H]``: the same memory."""
    return split(tensor, 1, num_kv_heads, -1)


def aligned(rows: Tensor) -> Tensor:
    """The tensor, or a packed copy if a kernel cannot read it 16 bytes at a time."""
    size = rows.element_size()
    places = (rows.data_ptr(), *(stride * size for stride in rows.stride()[:-1]))
    if rows.stride(-1) == 1 and all(place % _ALIGNED_BYTES == 0 for place in places):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def refuse_large_caches(backend: str, cache: KVCacheSpec) -> None:
    """Slots are handed over in 32 bits.

    Raises:
        UnsupportedError: the cache has more slots than that.
    """
    slots = cache.num_blocks * cache.block_size
    if slots >= 2**31:
        raise UnsupportedError(
            f"attention backend {backend!r}",
            [
                f"num_blocks={cache.num_blocks} of block_size={cache.block_size} are {slots} "
                "slots, and fewer than 2**31 are supported; give the cache less memory"
            ],
        )
