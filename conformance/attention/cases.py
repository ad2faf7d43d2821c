"""A case of the suite: a layer and a batch as a few numbers, and the tensors made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.attention import (
    AttentionBatch,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
    KVLayout,
    allocate_kv_cache,
    dtype_name,
)
from . import generate
from .oracle import attention_with_bounds

#: Size of the numbers in slots that belong to nobody.
GARBAGE = 10.0


@dataclass(frozen=True)
class SequenceShape:
    """One sequence of a batch.

    Attributes:
        seq_len: tokens, context and new ones together.
        query_len: new tokens; at most ``seq_len``, or anything if that is 0.
        shared_blocks: leading blocks of the context that it has in common with the first sequence.
    """

    seq_len: int
    query_len: int
    shared_blocks: int = 0

    @property
    def context_len(self) -> int:
        """Tokens before the new ones."""
        return max(0, self.seq_len - self.query_len)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that its tokens take."""
        return -(-self.seq_len // block_size)


@dataclass(frozen=True)
class AttentionCase:
    """Everything that a law needs to know, readable, and equal for equal inputs.

    Attributes:
        spec: the layer.
        kv_dtype: dtype of the cache.
        k_scale, v_scale: of the cache; 1 unless it has 8 bits.
        block_size: tokens of a block.
        sequences: the batch.
        spare_blocks: blocks of the cache that nobody has.
        shuffle: seed of the order of physical blocks; 0 is ascending.
        extra_columns: columns of the block table beyond the longest sequence.
        table_garbage: what stands in the table past a sequence's blocks.
        padding_rows: rows of query and output behind the last query.
        unstored_every: every so many-th new token has slot -1; 0 is none.
        fused: whether query, key and value are slices of one projection (strided rows).
        distribution: of the numbers; one of ``generate.DISTRIBUTIONS``, or ``generate.EDGES``.
        seed: of all random numbers.
    """

    spec: AttentionSpec
    kv_dtype: torch.dtype
    block_size: int
    sequences: tuple[SequenceShape, ...]
    spare_blocks: int = 1
    shuffle: int = 0
    extra_columns: int = 0
    table_garbage: int = -1
    padding_rows: int = 0
    unstored_every: int = 0
    fused: bool = False
    distribution: str = "normal"
    seed: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(sequence.query_len for sequence in self.sequences)

    def __str__(self) -> str:
        spec = self.spec
        lines = [
            f"heads {spec.num_heads}/{spec.num_kv_heads}, head_size {spec.head_size}"
            + (f", v_head_size {spec.v_head_size}" if spec.v_head_size != spec.head_size else "")
            + f", {dtype_name(spec.dtype)}"
            + (f", cache {dtype_name(self.kv_dtype)}" if self.kv_dtype != spec.dtype else "")
            + (
                f" with k_scale {self.k_scale:g} and v_scale {self.v_scale:g}"
                if self.kv_dtype.itemsize == 1
                else ""
            )
            + f", block_size {self.block_size}, scale {spec.scale:.6g}",
            ", ".join(
                ["causal" if spec.causal else "not causal"]
                + [f"sliding_window {spec.sliding_window}"] * (spec.sliding_window is not None)
                + [f"logits_soft_cap {spec.logits_soft_cap}"] * (spec.logits_soft_cap is not None)
                + [f"alibi_slopes {spec.alibi_slopes}"] * (spec.alibi_slopes is not None)
                + ["sinks"] * spec.sinks
            ),
            "sequences (tokens, new, shared blocks): "
            + (
                ", ".join(
                    f"({one.seq_len}, {one.query_len}, {one.shared_blocks})"
                    for one in self.sequences[:12]
                )
                or "none"
            )
            + (f" and {len(self.sequences) - 12} more" if len(self.sequences) > 12 else ""),
            f"spare_blocks {self.spare_blocks}, shuffle {self.shuffle}, extra_columns "
            f"{self.extra_columns}, table_garbage {self.table_garbage}, padding_rows "
            f"{self.padding_rows}, unstored_every {self.unstored_every}, fused {self.fused}, "
            f"distribution {self.distribution}, seed {self.seed}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class CaseData:
    """The tensors of a case.

    Attributes:
        case: what they were made of.
        cache_spec, batch: what the backend is given.
        cache: holds all keys and values of the batch, garbage elsewhere.
        query: ``[T + padding_rows, N, H]``.
        key, value: what the cache holds for the new tokens, before it was rounded to the dtype of
            the cache: ``[T, K, H]`` and ``[T, K, Hv]``, in ``spec.dtype``.
        sinks: ``[N]`` float32, or None.
        table: block table before any law changed it, ``[S, max_blocks]``, int32, cpu.
    """

    case: AttentionCase
    cache_spec: KVCacheSpec
    batch: AttentionBatch
    cache: KVCache
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    table: Tensor

    @property
    def spec(self) -> AttentionSpec:
        """The layer."""
        return self.case.spec

    def slots(self, sequence: int) -> Tensor:
        """Cache slot of each token of a sequence: ``[seq_len]``, int64, cpu."""
        length = self.case.sequences[sequence].seq_len
        return generate.slots_of(self.table[sequence], length, self.case.block_size)


def build(case: AttentionCase, layout: KVLayout, device: torch.device) -> CaseData:
    """Make the tensors of a case.

    Args:
        case: what to make.
        layout: physical order of the cache.
        device: where everything goes, but for the host twins of the batch.
    """
    spec = case.spec
    seq_lens = [one.seq_len for one in case.sequences]
    table, num_blocks = generate.block_tables(
        seq_lens,
        [one.shared_blocks for one in case.sequences],
        case.block_size,
        case.spare_blocks,
        case.shuffle,
        case.extra_columns,
        case.table_garbage,
    )
    sequences = [
        generate.slots_of(row, length, case.block_size)
        for row, length in zip(table, seq_lens, strict=True)
    ]
    query, keys, values, sinks = generate.draw(
        case.distribution,
        case.seed,
        spec.dtype,
        case.kv_dtype,
        case.num_tokens + case.padding_rows,
        spec.num_heads,
        num_blocks * case.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.v_head_size,
        sequences,
        case.k_scale,
        case.v_scale,
    )
    new_slots = torch.cat(
        [torch.zeros(0, dtype=torch.int64)]
        + [
            _newest(slots, shape.query_len)
            for slots, shape in zip(sequences, case.sequences, strict=True)
        ]
    )
    key, value = keys[new_slots.clamp(min=0)], values[new_slots.clamp(min=0)]
    query, key, value = _projection(case, query, key.to(spec.dtype), value.to(spec.dtype), device)
    cache_spec = KVCacheSpec(
        num_blocks,
        case.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.v_head_size,
        case.kv_dtype,
    )
    cache = allocate_kv_cache(cache_spec, layout, device, case.k_scale, case.v_scale)
    for tensor, numbers, scale in ((cache.k, keys, case.k_scale), (cache.v, values, case.v_scale)):
        tensor.copy_(generate.quantised(numbers, case.kv_dtype, scale).view(tensor.shape))
    if case.unstored_every:
        new_slots[:: case.unstored_every] = -1
    data = CaseData(
        case=case,
        cache_spec=cache_spec,
        batch=batch_of(case.sequences, table, new_slots, device),
        cache=cache,
        query=query,
        key=key,
        value=value,
        sinks=sinks.to(device) if spec.sinks else None,
        table=table,
    )
    spoil(cache, unseen_slots(data), case.seed, GARBAGE)
    return data


def batch_of(
    sequences: Sequence[SequenceShape], table: Tensor, slot_mapping: Tensor, device: torch.device
) -> AttentionBatch:
    """The batch of some sequences with this block table and these slots."""
    query_lens = torch.tensor([0, *(one.query_len for one in sequences)])
    return AttentionBatch.from_host(
        query_lens.cumsum(0).to(torch.int32),
        torch.tensor([one.seq_len for one in sequences], dtype=torch.int32),
        table,
        slot_mapping,
        device,
    )


def seen_slots(spec: AttentionSpec, slots: Tensor, shape: SequenceShape) -> Tensor:
    """Those of a sequence's slots whose key some row sees."""
    if not shape.query_len or not shape.seq_len:
        return slots[:0]
    first = 0
    if spec.sliding_window is not None:
        first = max(0, shape.context_len - spec.sliding_window + 1)
    return slots[first:]


def spoil(cache: KVCache, slots: Tensor, seed: int, size: float) -> None:
    """Put numbers of about ``size`` into the slots where ``slots``, ``[P * B]`` bool, is true."""
    chosen = slots.view(cache.k.shape[:2]).to(cache.k.device)
    for number, tensor in enumerate((cache.k, cache.v)):
        stored = generate.as_bytes(tensor)
        if math.isfinite(size):
            like = stored[chosen].view(tensor.dtype).cpu()
            garbage = generate.garbage_like(like, seed + number, size)
        else:
            garbage = torch.full((), size).to(tensor.dtype)
        stored[chosen] = generate.as_bytes(garbage).to(tensor.device)


def unseen_slots(data: CaseData) -> Tensor:
    """Which slots hold no key that any row sees: ``[P * B]``, bool, cpu."""
    unseen = torch.ones(data.cache_spec.num_blocks * data.case.block_size, dtype=torch.bool)
    for index, shape in enumerate(data.case.sequences):
        unseen[seen_slots(data.spec, data.slots(index), shape)] = False
    return unseen


@dataclass(frozen=True)
class Expected:
    """What the oracle says about a batch, and how far a backend may be from it.

    Attributes:
        out: ``[T, N, Hv]``, float64.
        lse: ``[T, N]``, float64.
        out_bound, lse_bound: largest errors, same shapes.
    """

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor


def expect(data: CaseData) -> Expected:
    """What ``forward`` has to compute for a case."""
    query = data.query[: data.batch.num_tokens]
    return Expected(*attention_with_bounds(data.spec, query, data.cache, data.batch, data.sinks))


def _newest(slots: Tensor, count: int) -> Tensor:
    """The last ``count`` slots; -1 for tokens that the sequence does not have."""
    missing = max(0, count - len(slots))
    newest = slots[len(slots) - (count - missing) :]
    return torch.cat([torch.full((missing,), -1, dtype=torch.int64), newest])


def _projection(
    case: AttentionCase, query: Tensor, key: Tensor, value: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value on the device; slices of one tensor if the case says so."""
    if not case.fused:
        return query.to(device), key.to(device), value.to(device)
    rows, num_tokens = len(query), len(key)
    spec = case.spec
    widths = [
        spec.num_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size,
        spec.num_kv_heads * spec.v_head_size,
    ]
    packed = torch.zeros((rows, sum(widths)), dtype=spec.dtype)
    packed[:, : widths[0]] = query.reshape(rows, widths[0])
    packed[:num_tokens, widths[0] : widths[0] + widths[1]] = key.reshape(num_tokens, widths[1])
    packed[:num_tokens, widths[0] + widths[1] :] = value.reshape(num_tokens, widths[2])
    parts = torch.split(packed.to(device), widths, dim=1)
    return (
        parts[0].view(rows, spec.num_heads, spec.head_size),
        parts[1][:num_tokens].view(num_tokens, spec.num_kv_heads, spec.head_size),
        parts[2][:num_tokens].view(num_tokens, spec.num_kv_heads, spec.v_head_size),
    )
