"""Plans of the backends on xformers: the biases that its operators take, made once a step.

xformers describes lengths by objects that hold a tensor and the same numbers as a list. They are
built here from the host's arrays, because its own constructors copy each tensor separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.attention import AttentionBatch, AttentionPlan, AttentionSpec, KVCacheSpec
from ._batch_parts import BatchPart, Int32, Int64, split_by_query_len
from ._gathered_parts import GatheredPart, KeyGather, gathered_parts, split_blind
from ._packed_arrays import Array, PackedArrays

#: The most query rows of a sequence that the split-K operator masks causally.
MAX_PAGED_ROWS = 16


@dataclass(frozen=True)
class PagedCall:
    """A call of the split-K operator: equally many query rows of each sequence.

    The operator is compiled for a number of sequences and of table columns, so that both are
    rounded up to a power of two: by sequences without tokens, and by columns that nobody uses.

    Attributes:
        bias: ``PagedBlockDiagonalCausalWithOffsetPaddedKeysMask`` for ``S'`` sequences.
        rows: rows of the packed query that it computes.
        query_rows: packed row of each row of the call, ``[S' * rows]``, int64, on the device;
            padding repeats a row. None if the call's rows are ``rows``.
        num_rows: ``rows`` without padding.
    """

    bias: Any
    rows: slice | Tensor
    query_rows: Tensor | None
    num_rows: int


@dataclass(frozen=True)
class GatheredCall:
    """A call of the cutlass operator on copied keys.

    Attributes:
        bias: ``BlockDiagonalCausalFromBottomRightMask`` or its variant with a window.
        rows: rows of the packed query that it computes: a slice, or int64, on the device.
        slots: cache slot of each key: int32, on the device.
        room: where keys and values are copied to.
        sequence, position: where the LSE of each row stands in the operator's padded LSE; int64,
            on the device.
    """

    bias: Any
    rows: slice | Tensor
    slots: Tensor
    room: tuple[Tensor, Tensor]
    sequence: Tensor
    position: Tensor


@dataclass(frozen=True)
class XformersPlan(AttentionPlan):
    """A step's calls.

    Attributes:
        paged, gathered: the calls.
        blind_rows: rows that see no key and are in no call, int64, on the device; None without.
        num_tokens: query rows that belong to a sequence.
        query_start_loc: of the batch: ``[S + 1]``, on the host.
        table_width: columns of the widest block table that fits.
        arrays: all tensors of the calls.
    """

    paged: tuple[PagedCall, ...]
    gathered: tuple[GatheredCall, ...]
    blind_rows: Tensor | None
    num_tokens: int
    query_start_loc: Int32
    table_width: int
    arrays: PackedArrays


class PlanMaker:
    """Makes and updates plans.

    Args:
        fmha: the module ``xformers.ops.fmha``.
        spec: the layer.
        cache: its cache.
        device: where plans go.
        paged: whether short queries are left to the split-K operator.
        gather: copies the keys of all others.
        max_elements: most elements of copied keys and values, unless a sequence has more.
    """

    def __init__(
        self,
        fmha: ModuleType,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        *,
        paged: bool,
        gather: KeyGather,
        max_elements: int,
    ) -> None:
        self._biases: Any = fmha.attn_bias
        self._spec = spec
        self._block_size = cache.block_size
        self._device = device
        self._paged = paged
        self._gather = gather
        self._max_keys = max(1, max_elements // gather.elements_per_key)

    def make(self, batch: AttentionBatch) -> XformersPlan:
        """A new plan."""
        parts, rest = self._parts(batch)
        seeing, blind = split_blind(batch, rest)
        gathered = gathered_parts(
            batch, seeing, self._block_size, self._spec.sliding_window, self._max_keys
        )
        width = _power_of_two(batch.block_table_cpu.shape[1])
        arrays: list[Array] = [blind]
        for part in parts:
            arrays += _paged_arrays(part, width)
        for one in gathered:
            arrays += _gathered_arrays(one)
        packed = PackedArrays(arrays, self._device)
        tensors = iter(packed.tensors)
        blind_rows = next(tensors)
        return XformersPlan(
            paged=tuple(
                self._paged_call(part, width, *(next(tensors) for _ in range(4))) for part in parts
            ),
            gathered=tuple(
                self._gathered_call(one, *(next(tensors) for _ in range(6))) for one in gathered
            ),
            blind_rows=blind_rows if len(blind) else None,
            num_tokens=batch.num_tokens,
            query_start_loc=batch.query_start_loc_cpu.numpy().copy(),
            table_width=width,
            arrays=packed,
        )

    def update(self, plan: XformersPlan, batch: AttentionBatch) -> None:
        """Replace the lengths and blocks of a plan in place.

        Raises:
            ValueError: the plan was made for other query lengths or a narrower block table, or
                copies keys, so that its shapes follow from the lengths.
        """
        starts = batch.query_start_loc_cpu.numpy()
        if not np.array_equal(starts, plan.query_start_loc):
            raise ValueError("into was made for other query lengths")
        columns = batch.block_table_cpu.shape[1]
        if columns > plan.table_width:
            raise ValueError(
                f"into was made for a block table of at most {plan.table_width} columns, not of "
                f"{columns}"
            )
        if plan.gathered or plan.blind_rows is not None:
            raise ValueError(
                "into copies keys from the cache, so that it cannot be updated: plans can be if "
                "every sequence has one query row, or all that have more have the same number, "
                f"up to {MAX_PAGED_ROWS}"
            )
        parts, _ = self._parts(batch)
        arrays: list[Array] = [np.zeros(0, np.int64)]
        for part, call in zip(parts, plan.paged, strict=True):
            ours = _paged_arrays(part, plan.table_width)
            call.bias.k_seqinfo.seqlen_py[:] = ours[1].tolist()
            arrays += ours
        plan.arrays.replace(arrays)

    def _parts(self, batch: AttentionBatch) -> tuple[list[BatchPart], Int64]:
        """What the split-K operator computes, and the numbers of all other sequences with rows."""
        query_lens = np.diff(batch.query_start_loc_cpu.numpy())
        if not self._paged:
            return [], np.flatnonzero(query_lens > 0)
        parts, rest = split_by_query_len(batch, self._block_size, _paged_lengths(query_lens))
        return parts, rest.sequences

    def _paged_call(
        self, part: BatchPart, width: int, starts: Tensor, lens: Tensor, table: Tensor, rows: Tensor
    ) -> PagedCall:
        biases = self._biases
        padded = len(lens)
        length = part.max_query_len
        starts_list = list(range(0, padded * length + 1, length))
        room = width * self._block_size
        bias = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(
            q_seqinfo=biases._SeqLenInfo(
                seqstart=starts, max_seqlen=length, min_seqlen=length, seqstart_py=starts_list
            ),
            # A sequence's keys are found by its row of the table: their starts are not read.
            k_seqinfo=biases._PaddedSeqLenInfo(
                seqstart=starts,
                max_seqlen=room,
                min_seqlen=0,
                seqstart_py=starts_list,
                seqlen=lens,
                seqlen_py=part.seq_lens.tolist() + [0] * (padded - part.num_seqs),
                padding=room,
            ),
            block_tables=table,
            page_size=self._block_size,
        )
        consecutive = isinstance(part.rows, slice)
        return PagedCall(
            bias=bias,
            rows=part.rows if isinstance(part.rows, slice) else rows[: part.num_rows],
            query_rows=None if consecutive and padded == part.num_seqs else rows,
            num_rows=part.num_rows,
        )

    def _gathered_call(
        self,
        one: GatheredPart,
        query_starts: Tensor,
        key_starts: Tensor,
        slots: Tensor,
        sequence: Tensor,
        position: Tensor,
        rows: Tensor,
    ) -> GatheredCall:
        biases, window = self._biases, self._spec.sliding_window
        part, keys = one.part, one.keys
        lengths = {
            "q_seqinfo": biases._SeqLenInfo(
                seqstart=query_starts,
                max_seqlen=part.max_query_len,
                min_seqlen=int(part.query_lens.min()),
                seqstart_py=part.query_start_loc.tolist(),
            ),
            "k_seqinfo": biases._SeqLenInfo(
                seqstart=key_starts,
                max_seqlen=keys.max_key_len,
                min_seqlen=int(keys.key_lens.min()),
                seqstart_py=keys.key_start_loc.tolist(),
            ),
        }
        if window is None:
            bias = biases.BlockDiagonalCausalFromBottomRightMask(**lengths)
        else:
            # Both count the row itself.
            bias = biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask(
                **lengths, _window_size=window
            )
        return GatheredCall(
            bias=bias,
            rows=part.rows if isinstance(part.rows, slice) else rows,
            slots=slots,
            room=self._gather.room(len(keys.slots)),
            sequence=sequence,
            position=position,
        )


def _paged_lengths(query_lens: Int32) -> tuple[int, ...]:
    """One row, and the number of rows that all other sequences have, if it is small enough."""
    others = np.unique(query_lens[query_lens > 1])
    if len(others) == 1 and others[0] <= MAX_PAGED_ROWS:
        return (1, int(others[0]))
    return (1,)


def _paged_arrays(part: BatchPart, width: int) -> list[Array]:
    """Query starts, lengths, block table and query rows, all padded."""
    num_seqs, length = part.num_seqs, part.max_query_len
    padded = _power_of_two(num_seqs)
    lens = np.zeros(padded, np.int32)
    lens[:num_seqs] = part.seq_lens
    table = np.zeros((padded, width), np.int32)
    table[:num_seqs, : part.block_table.shape[1]] = part.block_table
    own = _row_numbers(part)
    rows = np.full(padded * length, own[0], np.int64)
    rows[: len(own)] = own
    starts = np.arange(0, padded * length + 1, length, dtype=np.int32)
    return [starts, lens, table, rows]


def _gathered_arrays(one: GatheredPart) -> list[Array]:
    """Query starts, key starts, slots, sequence and position of each row, packed rows."""
    part, keys = one.part, one.keys
    starts = part.query_start_loc
    return [
        starts,
        keys.key_start_loc,
        keys.slots.astype(np.int32),
        np.repeat(np.arange(part.num_seqs), part.query_lens),
        np.arange(part.num_rows) - np.repeat(starts[:-1], part.query_lens),
        np.zeros(0, np.int64) if isinstance(part.rows, slice) else part.rows,
    ]


def _row_numbers(part: BatchPart) -> Int64:
    if isinstance(part.rows, slice):
        return np.arange(part.rows.start, part.rows.stop)
    return part.rows


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``, and 1."""
    return 1 << max(0, number - 1).bit_length()
