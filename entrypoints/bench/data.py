"""The tensors of a case, and what the right result of some of its rows is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...conformance.attention.generate import as_bytes, quantised
from ...conformance.attention.oracle import attention_with_bounds
from ...core.attention import (
    AttentionBatch,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
    KVLayout,
    allocate_kv_cache,
)
from .cases import BenchCase

#: Scales of keys and values in a cache of 8 bits: no powers of two, which would hide in exponents.
KV_SCALES = (0.03, 0.05)
#: Rows that are compared with float64 at most: of so many sequences, at so many places in each.
_MAX_SEQUENCES, _MAX_PLACES, _RUN = 16, 4, 4


@dataclass(frozen=True)
class Layer:
    """How a case is computed.

    Attributes:
        dtype: of query and output.
        kv_dtype: of the cache.
        device: where.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    def spec(self, case: BenchCase) -> AttentionSpec:
        """The layer of a case: causal, no further features."""
        size = case.head_size
        return AttentionSpec(case.num_heads, case.num_kv_heads, size, size, size**-0.5, self.dtype)

    def cache_spec(self, case: BenchCase, block_size: int) -> KVCacheSpec:
        """A cache with a block for each block of each sequence, and one that nobody has."""
        num_blocks = 1 + sum(-(-length // block_size) for length, _ in case.sequences)
        size = case.head_size
        return KVCacheSpec(num_blocks, block_size, case.num_kv_heads, size, size, self.kv_dtype)


@dataclass(frozen=True)
class BenchData:
    """A case on the device.

    Attributes:
        case, spec, cache_spec, batch: what it is.
        cache: holds the context; the slots of the new tokens are zero until they are written.
        query: ``[T, N, H]``; with key and value a slice of one projection, so rows are strided.
        key, value: of the new tokens: ``[T, K, H]``.
    """

    case: BenchCase
    spec: AttentionSpec
    cache_spec: KVCacheSpec
    batch: AttentionBatch
    cache: KVCache
    query: Tensor
    key: Tensor
    value: Tensor

    def new_out(self) -> Tensor:
        """An output, ``[T, N, H]``, full of NaN: a row that is not written shows."""
        shape = (self.batch.num_tokens, self.spec.num_heads, self.spec.v_head_size)
        return torch.full(shape, torch.nan, dtype=self.spec.dtype, device=self.query.device)


@dataclass(frozen=True)
class ExpectedRows:
    """What some rows of a case have to be.

    Attributes:
        rows: their numbers: ``[R]``, int64, on the device.
        out: ``[R, N, H]``, float64.
        bound: how far rounding may lead from it, same shape.
    """

    rows: Tensor
    out: Tensor
    bound: Tensor


def make_data(case: BenchCase, layer: Layer, block_size: int, layout: KVLayout) -> BenchData:
    """Random numbers in random blocks.

    The numbers are the same for every block size and layout; the blocks are in another order.
    """
    device = layer.device
    cache_spec = layer.cache_spec(case, block_size)
    batch, slots = _batch(case, block_size, cache_spec.num_blocks, device)
    packed, keys, values = _numbers(case, layer)
    scales = KV_SCALES if layer.kv_dtype.itemsize == 1 else (1.0, 1.0)
    cache = allocate_kv_cache(cache_spec, layout, device, *scales)
    _store(cache.k, slots, keys, cache.k_scale)
    _store(cache.v, slots, values, cache.v_scale)
    new_slots = batch.slot_mapping
    for stored in (cache.k, cache.v):
        as_bytes(stored)[new_slots // block_size, new_slots % block_size] = 0
    heads, kv_heads = case.num_heads, case.num_kv_heads
    query, key, value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
    return BenchData(case, layer.spec(case), cache_spec, batch, cache, query, key, value)


def expected_rows(case: BenchCase, layer: Layer) -> ExpectedRows:
    """The float64 result of a sample of rows, with error bounds.

    All rows of small batches; else runs of rows at the beginning, in the middle and at the end of
    sequences all over the batch.
    """
    data = make_data(case, layer, block_size=16, layout="NHD")
    runs = sampled_runs(case)
    # The newest token of a shorter sequence sees what a causal row in a longer one sees.
    lengths, counts, rows, table = [], [], [], []
    starts = data.batch.query_start_loc_cpu.tolist()
    for sequence, first, stop in runs:
        length, new = case.sequences[sequence]
        lengths.append(length - new + stop)
        counts.append(stop - first)
        rows.append(torch.arange(starts[sequence] + first, starts[sequence] + stop))
        table.append(data.batch.block_table_cpu[sequence])
    _fill_new_slots(data)
    chosen = torch.cat(rows)
    batch = AttentionBatch.from_host(
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.stack(table),
        torch.zeros(len(chosen), dtype=torch.int64),
    )
    indices = chosen.to(layer.device)
    out, _, bound, _ = attention_with_bounds(
        data.spec, data.query[indices], data.cache, batch, None
    )
    return ExpectedRows(indices, out, bound)


def sampled_runs(case: BenchCase) -> list[tuple[int, int, int]]:
    """Sequence, first row and end of each run of rows that is compared."""
    count = len(case.sequences)
    chosen = _spread(count, _MAX_SEQUENCES)
    runs = []
    for sequence in chosen:
        new = case.sequences[sequence][1]
        places = _spread(-(-new // _RUN), _MAX_PLACES)
        runs += [(sequence, _RUN * place, min(new, _RUN * (place + 1))) for place in places]
    return runs


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below ``count``, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({index * (count - 1) // (most - 1) for index in range(most)})


def _batch(
    case: BenchCase, block_size: int, num_blocks: int, device: torch.device
) -> tuple[AttentionBatch, Tensor]:
    """The batch, and the slot of every token of all sequences, one after the other."""
    counts = [-(-length // block_size) for length, _ in case.sequences]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randperm(num_blocks - 1, generator=generator) + 1
    table = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
    slots, new_slots = [], []
    for row, own, (length, new) in zip(
        table, torch.split(blocks, counts), case.sequences, strict=True
    ):
        row[: len(own)] = own
        places = (own[:, None] * block_size + torch.arange(block_size)).view(-1)[:length]
        slots.append(places)
        new_slots.append(places[length - new :])
    batch = AttentionBatch.from_host(
        torch.tensor([0, *(new for _, new in case.sequences)]).cumsum(0).to(torch.int32),
        torch.tensor([length for length, _ in case.sequences], dtype=torch.int32),
        table,
        torch.cat(new_slots),
        device,
    )
    return batch, torch.cat(slots).to(device)


def _numbers(case: BenchCase, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """The projection ``[T, N + 2K, H]``, and keys and values of all tokens, ``[tokens, K, H]``."""
    generator = torch.Generator(layer.device).manual_seed(0)

    def normal(rows: int, heads: int) -> Tensor:
        shape = (rows, heads, case.head_size)
        numbers = torch.randn(shape, generator=generator, device=layer.device)
        return numbers.to(layer.dtype)

    heads, kv_heads = case.num_heads, case.num_kv_heads
    tokens = sum(length for length, _ in case.sequences)
    packed = normal(case.num_tokens, heads + 2 * kv_heads)
    keys, values = normal(tokens, kv_heads), normal(tokens, kv_heads)
    row = end = 0
    for length, new in case.sequences:
        end += length
        keys[end - new : end] = packed[row : row + new, heads : heads + kv_heads]
        values[end - new : end] = packed[row : row + new, heads + kv_heads :]
        row += new
    return packed, keys, values


def _fill_new_slots(data: BenchData) -> None:
    """What ``write_kv`` has to do, in plain torch."""
    slots = data.batch.slot_mapping
    _store(data.cache.k, slots, data.key, data.cache.k_scale)
    _store(data.cache.v, slots, data.value, data.cache.v_scale)


def _store(cache: Tensor, slots: Tensor, numbers: Tensor, scale: float) -> None:
    block_size = cache.shape[1]
    stored = as_bytes(quantised(numbers, cache.dtype, scale))
    as_bytes(cache)[slots // block_size, slots % block_size] = stored
