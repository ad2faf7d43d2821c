"""Tensors of a case from a few integers.

Needs torch and nothing of Jackfield: every reproducer carries the text of this module. All random
numbers are drawn on the CPU, so that a case is the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: A distribution for what is written only, since it holds infinity and NaN: numbers half way
#: between two that a cache of 8 bits can hold, beyond its largest ones, and signed zeros.
EDGES = "edges"
_EDGE_NUMBERS = (
    *(448.0, 449.0, 463.0, 464.0, 465.0, 480.0, 6e4, torch.inf, torch.nan, 0.0),
    *(2.0**-6, 2.0**-9, 2.0**-10, 1.001 * 2.0**-10, 3 * 2.0**-10, 15 * 2.0**-10, 2.0**-12),
    *(1.0625, 1.1875, 1.0626, 17.0, 19.0, 23.0, 31.0, 248.0, 432.0, 3.3),
)
#: Names of the distributions that queries, keys and values are drawn from.
DISTRIBUTIONS = (
    "normal",
    "counting",
    "large",
    "dominant_key",
    "near_ties",
    "constant",
    "denormal",
    "far_below_zero",
)


def block_tables(
    seq_lens: Sequence[int],
    shared_blocks: Sequence[int],
    block_size: int,
    spare_blocks: int,
    shuffle: int,
    extra_columns: int,
    garbage: int,
) -> tuple[Tensor, int]:
    """Physical blocks for each sequence.

    Args:
        seq_lens: tokens of each sequence.
        shared_blocks: leading blocks that a sequence has in common with the first one.
        block_size: tokens of a block.
        spare_blocks: blocks of the cache that nobody has.
        shuffle: seed of the order in which physical blocks are handed out; 0 is ascending.
        extra_columns: columns of the table beyond the longest sequence.
        garbage: what stands in the table past a sequence's blocks.

    Returns:
        The table, ``[S, max_blocks]``, int32, and the number of blocks in the cache.
    """
    counts = [-(-length // block_size) for length in seq_lens]
    owned = [
        count - min(common, count) for count, common in zip(counts, shared_blocks, strict=True)
    ]
    num_blocks = sum(owned) + spare_blocks
    order = torch.arange(num_blocks)
    if shuffle:
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(shuffle))
    free = iter(order.tolist())
    table = torch.full((len(counts), max(counts, default=0) + extra_columns), garbage)
    for row, (count, own) in enumerate(zip(counts, owned, strict=True)):
        table[row, : count - own] = table[0, : count - own]
        table[row, count - own : count] = torch.tensor(
            [next(free) for _ in range(own)], dtype=torch.int64
        )
    return table.to(torch.int32), num_blocks


def slots_of(table_row: Tensor, num_tokens: int, block_size: int) -> Tensor:
    """Cache slot of each token of a sequence: ``[num_tokens]``, int64."""
    positions = torch.arange(num_tokens)
    blocks = table_row[: -(-num_tokens // block_size)].long()
    return blocks.repeat_interleave(block_size)[:num_tokens] * block_size + positions % block_size


def draw(
    distribution: str,
    seed: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_rows: int,
    num_heads: int,
    num_slots: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    sequences: Sequence[Tensor],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query rows, what stands in every slot of the cache, and sinks.

    Args:
        distribution: one of ``DISTRIBUTIONS``, or ``EDGES``.
        seed: of all random numbers.
        dtype, kv_dtype: of the query and of the cache; the latter tells what is denormal.
        num_rows, num_heads, num_slots, num_kv_heads, head_size, v_head_size: sizes.
        sequences: slots of each sequence's tokens, as ``slots_of`` tells.
        k_scale, v_scale: what is an edge of a cache of 8 bits is one times these.

    Returns:
        query ``[num_rows, N, H]`` in its dtype; keys ``[num_slots, K, H]`` and values
        ``[num_slots, K, Hv]``, not yet rounded to any dtype; sinks ``[N]``, float32.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = normal(num_rows, num_heads, head_size)
    keys = normal(num_slots, num_kv_heads, head_size)
    values = normal(num_slots, num_kv_heads, v_head_size)
    sinks = 2 * normal(num_heads)
    if distribution == "counting":
        # Equal weights and unit vectors: the output shows which keys were seen.
        query.zero_()
        for slots in sequences:
            places = torch.arange(len(slots)) % v_head_size
            values[slots] = torch.eye(v_head_size)[places][:, None, :]
    elif distribution == "large":
        query, keys, values = 8 * query, 8 * keys, 30 * values
    elif distribution == "dominant_key":
        direction = normal(1, num_kv_heads, head_size).sign()
        query = query + 2 * direction.repeat_interleave(num_heads // num_kv_heads, dim=1)
        for index, slots in enumerate(sequences):
            if len(slots):
                keys[slots[(seed + 7 * index) % len(slots)]] = 2 * direction[0]
    elif distribution == "near_ties":
        keys = keys[:1] + 2.0**-10 * keys
    elif distribution == "constant":
        keys, values = keys[:1].expand_as(keys), values[:1].expand_as(values)
    elif distribution == "denormal":
        tiny = torch.finfo(kv_dtype).tiny
        keys, values = keys.double() * tiny / 2, values.double() * tiny / 2
    elif distribution == "far_below_zero":
        # Every score is below -10,000: a number that looks like minus infinity is not.
        query, keys = 100 + query, -100 + keys
    elif distribution == EDGES:
        keys, values = k_scale * _edges(keys, seed), v_scale * _edges(values, seed + 1)
    elif distribution != "normal":
        raise ValueError(f"distribution={distribution!r} is none of {', '.join(DISTRIBUTIONS)}")
    return query.to(dtype), keys, values, sinks


def _edges(like: Tensor, seed: int) -> Tensor:
    """The edge numbers over and over, of both signs, in the shape of ``like``."""
    numbers = torch.tensor(_EDGE_NUMBERS, dtype=torch.float64)
    both = torch.cat([numbers, -numbers])
    return both[(torch.arange(like.numel()) + seed) % len(both)].view(like.shape)


def quantised(tensor: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Numbers as a cache holds them that stands for its contents times ``scale``.

    Rounded to nearest, ties to even. In 8 bits ``number / scale``, computed in float32, and the
    largest number in place of a larger one; NaN stays NaN.
    """
    if dtype.itemsize > 1:
        return tensor.to(dtype)
    largest = torch.finfo(dtype).max
    divisor = torch.tensor(scale, dtype=torch.float32, device=tensor.device)
    return (tensor.to(torch.float32) / divisor).clamp(-largest, largest).to(dtype)


def dequantised(stored: Tensor, scale: float) -> Tensor:
    """What numbers of a cache stand for: float64 from 8 bits, else the numbers themselves."""
    return stored.double() * scale if stored.dtype.itemsize == 1 else stored


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, as bytes if it has a dtype of 8 bits, for which torch lacks operations."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def garbage_like(cache: Tensor, seed: int, size: float) -> Tensor:
    """Random finite numbers of about ``size``, in the shape and dtype of ``cache``."""
    generator = torch.Generator().manual_seed(seed)
    largest = torch.finfo(cache.dtype).max
    numbers = size * torch.randn(cache.shape, generator=generator, dtype=torch.float64)
    return numbers.clamp(-largest, largest).to(cache.dtype)
