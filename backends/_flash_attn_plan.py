"""Plans for flash-attn: which sequences share a call, and what the call is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.attention import AttentionBatch, AttentionPlan
from ._batch_parts import BatchPart, split_by_query_len
from ._packed_arrays import Array, PackedArrays

#: The most query rows of a sequence that are computed by the call for equal query lengths. It cuts
#: the keys of such short ones over processors; more rows than these fill several tiles.
MOST_UNIFORM_ROWS = 64


@dataclass
class FlashAttnPart:
    """The sequences of one call: ``S`` of them, ``R`` rows. ``plan(into=...)`` updates it in place.

    Attributes:
        arrays: what the tensors below are parts of.
        rows: the part's rows in the packed query: a slice, or ``[R]``, int64, on the device.
        num_seqs, num_rows: ``S`` and ``R``.
        query_len: query rows of every sequence, if there are few and equally many: such a part is
            computed by ``fwd_kvcache``. None: it is computed by ``varlen_fwd``.
        max_query_len: the most query rows of a sequence.
        query_start_loc: first row of each sequence within the part, then the total: ``[S + 1]``,
            int32.
        seq_lens: tokens of each sequence: ``[S]``, int32.
        key_start_loc: sums of the lengths that ``varlen_fwd`` is given: ``[S + 1]``, int32. A
            sequence without tokens counts with one for each query row.
        block_table: ``[S, width]``, int32, with block 0 where nothing may be read. There is room
            for the widest table that ``plan(into=...)`` may bring.
        used_table: its columns that this step uses, at least one.
        blind: which rows see no key: ``[R]``, bool.
        any_blind: whether there is such a row in this step.
    """

    arrays: PackedArrays
    rows: slice | Tensor
    num_seqs: int
    num_rows: int
    query_len: int | None
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    key_start_loc: Tensor
    block_table: Tensor
    used_table: Tensor
    blind: Tensor
    any_blind: bool


@dataclass
class FlashAttnPlan(AttentionPlan):
    """A step's calls.

    Attributes:
        parts: together they have all query rows.
        num_tokens: query rows that belong to a sequence.
        query_start_loc: of the batch, on the host: ``[S + 1]``, int32.
        table_width: columns of the widest block table that fits.
    """

    parts: tuple[FlashAttnPart, ...]
    num_tokens: int
    query_start_loc: NDArray[np.int32]
    table_width: int


def make_plan(batch: AttentionBatch, block_size: int, device: torch.device) -> FlashAttnPlan:
    """Cut a batch into parts and copy what they need to the device, without waiting for it.

    Args:
        batch: read from the host twins only.
        block_size: ``B``.
        device: where tensors go.
    """
    # Sequences without tokens, and so maybe without columns, need room too: see ``_arrays``.
    width = max(batch.block_table_cpu.shape[1], -(-batch.max_query_len // block_size), 1)
    return FlashAttnPlan(
        parts=tuple(
            _make_part(part, width, block_size, device) for part in _cut(batch, block_size)
        ),
        num_tokens=batch.num_tokens,
        query_start_loc=batch.query_start_loc_cpu.numpy().copy(),
        table_width=width,
    )


def update_plan(plan: FlashAttnPlan, batch: AttentionBatch, block_size: int) -> None:
    """Put the lengths and blocks of another batch into a plan.

    Raises:
        ValueError: the batch has other query lengths or a wider block table.
    """
    starts = batch.query_start_loc_cpu.numpy()
    if not np.array_equal(starts, plan.query_start_loc):
        raise ValueError(
            f"into was planned for query_start_loc={plan.query_start_loc.tolist()}, not for "
            f"{starts.tolist()}"
        )
    width = batch.block_table_cpu.shape[1]
    if width > plan.table_width:
        raise ValueError(
            f"into was planned for block tables of up to {plan.table_width} columns, not for "
            f"{width}: plan the batch that is captured with the widest table"
        )
    for part, planned in zip(_cut(batch, block_size), plan.parts, strict=True):
        planned.arrays.replace(_arrays(part, plan.table_width))
        planned.used_table = _used(planned.block_table, part, block_size)
        planned.any_blind = bool((part.seq_lens == 0).any())


def _cut(batch: AttentionBatch, block_size: int) -> list[BatchPart]:
    """Sequences with one query row, and the others. Follows from the query lengths alone."""
    decoding, others = split_by_query_len(batch, block_size)
    return [*decoding, others] if others.num_rows else decoding


def _make_part(part: BatchPart, width: int, block_size: int, device: torch.device) -> FlashAttnPart:
    arrays = PackedArrays(_arrays(part, width), device)
    query_start_loc, seq_lens, key_start_loc, table, blind, *indices = arrays.tensors
    most = part.max_query_len
    uniform = most <= MOST_UNIFORM_ROWS and bool((part.query_lens == most).all())
    return FlashAttnPart(
        arrays=arrays,
        rows=part.rows if isinstance(part.rows, slice) else indices[0],
        num_seqs=part.num_seqs,
        num_rows=part.num_rows,
        query_len=most if uniform else None,
        max_query_len=most,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        key_start_loc=key_start_loc,
        block_table=table,
        used_table=_used(table, part, block_size),
        blind=blind,
        any_blind=bool((part.seq_lens == 0).any()),
    )


def _arrays(part: BatchPart, width: int) -> Sequence[Array]:
    """What goes to the device, in the order of ``_make_part``."""
    query_lens, seq_lens = part.query_lens, part.seq_lens
    table = np.zeros((part.num_seqs, width), np.int32)
    table[:, : part.block_table.shape[1]] = part.block_table
    key_start_loc = np.zeros(part.num_seqs + 1, np.int32)
    np.cumsum(_lengths(part), out=key_start_loc[1:])
    arrays: list[Array] = [
        part.query_start_loc,
        seq_lens,
        key_start_loc,
        table,
        np.repeat(seq_lens == 0, query_lens),
    ]
    if not isinstance(part.rows, slice):
        arrays.append(part.rows)
    return arrays


def _lengths(part: BatchPart) -> NDArray[np.int32]:
    """Keys that ``varlen_fwd`` reads of each sequence.

    Its kernel for paged caches writes the LSE of rows without keys to where it would be in a padded
    batch, which in a packed one is another row's place or nobody's memory. So a sequence without
    tokens reads as many keys of block 0 as it has rows, and its results are overwritten.
    """
    return np.where(part.seq_lens > 0, part.seq_lens, part.query_lens)


def _used(table: Tensor, part: BatchPart, block_size: int) -> Tensor:
    """The columns that are read. The library cuts the width, not the lengths, over processors:
    unused columns would be processors without work."""
    return table[:, : max(1, -(-int(_lengths(part).max()) // block_size))]
