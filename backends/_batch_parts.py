"""Cutting a batch into parts that one library call each can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.attention import AttentionBatch

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPart:
    """Some sequences of a batch, in batch order, renumbered from 0: ``S`` of them, ``R`` rows.

    All arrays are on the host.

    Attributes:
        sequences: their numbers in the batch: ``[S]``, int64.
        query_lens: query rows of each: ``[S]``, int32.
        seq_lens: tokens of each: ``[S]``, int32.
        query_start_loc: first row of each within the part, then the total: ``[S + 1]``, int32.
        block_table: their rows of the batch's table: ``[S, max_blocks]``, int32, with block 0 in
            every entry past the used ones.
        rows: the part's rows in the packed query: a slice if they are consecutive, else
            ``[R]``, int64.
    """

    sequences: Int64
    query_lens: Int32
    seq_lens: Int32
    query_start_loc: Int32
    block_table: Int32
    rows: slice | Int64

    @property
    def num_seqs(self) -> int:
        """``S``."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """``R``."""
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """The largest number of query rows of a sequence; 0 if there are none."""
        return int(self.query_lens.max(initial=0))

    @property
    def max_seq_len(self) -> int:
        """The largest number of tokens of a sequence; 0 if there are none."""
        return int(self.seq_lens.max(initial=0))

    def device_rows(self, device: torch.device) -> slice | Tensor:
        """``rows`` as what a tensor on the device can be indexed with."""
        if isinstance(self.rows, slice):
            return self.rows
        return torch.from_numpy(self.rows).to(device, non_blocking=True)


def take_part(batch: AttentionBatch, sequences: Int64, block_size: int) -> BatchPart:
    """The part of a batch that has these sequences.

    Args:
        batch: read from its host twins.
        sequences: ascending numbers of sequences.
        block_size: ``B``.
    """
    starts = batch.query_start_loc_cpu.numpy()
    query_lens = np.diff(starts)[sequences]
    seq_lens = batch.seq_lens_cpu.numpy()[sequences]
    query_start_loc = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    return BatchPart(
        sequences=sequences,
        query_lens=query_lens,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        block_table=clean_block_table(
            batch.block_table_cpu.numpy()[sequences], seq_lens, block_size
        ),
        rows=_rows(starts[:-1][sequences].astype(np.int64), query_lens, query_start_loc),
    )


def split_by_query_len(
    batch: AttentionBatch, block_size: int, lengths: Sequence[int] = (1,)
) -> tuple[list[BatchPart], BatchPart]:
    """Cut a batch into its sequences of certain query lengths and the rest.

    Sequences without query rows are in no part: they have nothing to compute.

    Args:
        batch: read from its host twins.
        block_size: ``B``.
        lengths: query lengths that get a part each; ``(1,)`` for decoding sequences.

    Returns:
        The parts of those lengths that occur, in the order of ``lengths``; and the rest, which may
        be empty.
    """
    query_lens = np.diff(batch.query_start_loc_cpu.numpy())
    parts = []
    rest = query_lens > 0
    for length in lengths:
        chosen = query_lens == length
        rest &= ~chosen
        if chosen.any():
            parts.append(take_part(batch, np.flatnonzero(chosen), block_size))
    return parts, take_part(batch, np.flatnonzero(rest), block_size)


def clean_block_table(table: Int32, seq_lens: Int32, block_size: int) -> Int32:
    """A copy of a block table with block 0 in every entry that belongs to no token.

    What a batch has there is undefined, and a library may read it ahead of time.

    Args:
        table: ``[S, max_blocks]``.
        seq_lens: ``[S]``.
        block_size: ``B``.
    """
    used = -(-seq_lens // block_size)
    return np.where(np.arange(table.shape[1]) < used[:, None], table, 0).astype(np.int32)


def blind_rows(batch: AttentionBatch, sequences: Int64) -> Int64:
    """Query rows of those of some sequences that have no token: they see no key. ``[..]``, int64.

    Args:
        batch: read from its host twins.
        sequences: ascending numbers of sequences.
    """
    starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
    empty = sequences[batch.seq_lens_cpu.numpy()[sequences] == 0]
    rows = [np.arange(starts[one], starts[one + 1]) for one in empty]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


def _rows(first_rows: Int64, query_lens: Int32, query_start_loc: Int32) -> slice | Int64:
    if not len(first_rows):
        return slice(0, 0)
    total = int(query_start_loc[-1])
    if int(first_rows[-1] + query_lens[-1] - first_rows[0]) == total:
        return slice(int(first_rows[0]), int(first_rows[0]) + total)
    rows: Int64 = np.repeat(first_rows - query_start_loc[:-1], query_lens) + np.arange(total)
    return rows
