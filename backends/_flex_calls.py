"""Host-side planning for flex attention: which rows and which cache blocks share a call.

Everything here depends on lengths and block tables only. A *piece* is a run of query rows of one
sequence; a call computes some pieces over a pool of key blocks. The pool is either the whole cache,
read in place, or a copy of just the visible slots. Blocks of a copy are numbered in the order in
which the pieces meet them, so that physical places cannot matter, and slots of a block that no
piece of the call sees repeat a slot that one does, so that their contents (NaN included) cannot
matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.attention import AttentionBatch

IntArray = NDArray[np.int64]

# Rows that a call with tiles has at least. A dimension of size 1 would be compiled anew, and torch
# has another kernel for fewer rows, in which every row takes every key of the batch.
_MIN_TILED_ROWS = 128


@dataclass(frozen=True)
class Geometry:
    """The numbers of a layer that shape its calls.

    Attributes:
        causal, sliding_window: as in ``AttentionSpec``.
        num_heads: ``N``: scores of a query row per key.
        block_size, num_blocks: ``B`` and ``P`` of the cache.
    """

    causal: bool
    sliding_window: int | None
    num_heads: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class CallStyle:
    """How calls are made.

    Attributes:
        in_place: whether a call may read the cache where it lies; else it gets a copy.
        tile_sizes: rows of a tile, ascending, each a divisor of 128: every piece is padded to whole
            tiles. Empty: all rows of a call are one tile, without padding.
        max_score_elements: most scores of a call, unless a single row has more; None is unlimited.
    """

    in_place: bool
    tile_sizes: tuple[int, ...]
    max_score_elements: int | None


@dataclass(frozen=True)
class PagedMask:
    """What a row of a call may see. All tensors int32, on the device; ``R`` rows, ``U`` blocks in
    the pool, ``S`` pieces, ``L`` logical blocks, ``Q`` tiles.

    Attributes:
        piece: piece of each row, ``[R]``.
        first_key, end_key: the positions that each row sees, ``[R]``; both 0 for padding.
        position: each row's own position, ``[R]``.
        block_table: block of the pool at each logical place of each piece, ``[S or 2, L or 2]``;
            -1 where a piece sees none.
        logical_of: logical place of each block of the pool, ``[U or 2]``.
        kv_num_blocks: blocks that some row of a tile sees, ``[1, 1, Q]``.
        kv_indices: these blocks, in logical order, ``[1, 1, Q, most of a tile or 2]``.
        tile_rows: rows of a tile.
        dense: whether each row sees each slot of the pool, ``[R, U * B]``, bool: all of the above,
            for attention that computes every score anyway; else None.
    """

    piece: Tensor
    first_key: Tensor
    end_key: Tensor
    position: Tensor
    block_table: Tensor
    logical_of: Tensor
    kv_num_blocks: Tensor
    kv_indices: Tensor
    tile_rows: int
    dense: Tensor | None = None


@dataclass(frozen=True)
class FlexCall:
    """One call.

    Attributes:
        rows: rows of the packed query that it computes.
        mask: what they see; None if none of them sees any key.
        slots: cache slots to be copied into the pool, ``[U * B]``, int64, on the device; None if
            the pool is the cache.
        query_rows: packed row of each row of the call, ``[R]``, int64, on the device; padding
            repeats a row. None if the call's rows are ``rows``.
        result_rows: row of the call of each of ``rows``, int64, on the device; None likewise.
    """

    rows: slice
    mask: PagedMask | None
    slots: Tensor | None
    query_rows: Tensor | None
    result_rows: Tensor | None


@dataclass(frozen=True)
class _Pieces:
    """Runs of query rows, one entry per piece.

    Attributes:
        sequence: the sequence.
        seq_len: tokens of the sequence.
        first_row: first row in the packed query.
        count: rows.
        position: position of the first row; negative if it stands before the first key.
        first_key, end_key: positions of the keys that some row sees.
    """

    sequence: IntArray
    seq_len: IntArray
    first_row: IntArray
    count: IntArray
    position: IntArray
    first_key: IntArray
    end_key: IntArray


@dataclass(frozen=True)
class _Pool:
    """The blocks of a call: for every block that a piece sees, piece by piece in logical order.

    Attributes:
        owner: the piece.
        logical: its logical place in that piece's sequence.
        block: its number in the pool.
        logical_of: logical place by number in the pool.
        slots: as in ``FlexCall``, on the host.
    """

    owner: IntArray
    logical: IntArray
    block: IntArray
    logical_of: IntArray
    slots: IntArray | None


@dataclass(frozen=True)
class _Rows:
    """The rows of a call, padding included; see ``PagedMask`` and ``FlexCall``."""

    tile_rows: int
    piece: IntArray
    first_key: IntArray
    end_key: IntArray
    position: IntArray
    query_rows: IntArray
    result_rows: IntArray


def build_calls(
    batch: AttentionBatch, geometry: Geometry, style: CallStyle, device: torch.device
) -> tuple[FlexCall, ...]:
    """Cut a batch into calls, which together compute every row that belongs to a sequence.

    Args:
        batch: read from the host twins only.
        geometry: the layer.
        style: how calls are made.
        device: where the tensors go.
    """
    table = batch.block_table_cpu.numpy()
    return tuple(
        _build_call(pieces, table, geometry, style, device)
        for pieces in _cut(batch, geometry, style.max_score_elements)
    )


def _cut(batch: AttentionBatch, geometry: Geometry, max_scores: int | None) -> Iterator[_Pieces]:
    """The pieces of each call, in batch order."""
    starts = batch.query_start_loc_cpu.tolist()
    seq_lens = batch.seq_lens_cpu.tolist()
    # Sequence, its first query row in this piece, and rows.
    runs: list[tuple[int, int, int]] = []
    rows = keys = 0
    for index, seq_len in enumerate(seq_lens):
        start, query_len = 0, starts[index + 1] - starts[index]
        while start < query_len:
            count = query_len - start
            if max_scores is not None:
                scores_per_row = geometry.num_heads * max(keys + seq_len, 1)
                if runs and (rows + count) * scores_per_row > max_scores:
                    yield _pieces(runs, batch, geometry)
                    runs, rows, keys = [], 0, 0
                    continue
                count = min(count, max(max_scores // scores_per_row - rows, 1))
            runs.append((index, start, count))
            rows, keys, start = rows + count, keys + seq_len, start + count
    if runs:
        yield _pieces(runs, batch, geometry)


def _pieces(runs: list[tuple[int, int, int]], batch: AttentionBatch, geometry: Geometry) -> _Pieces:
    sequence, start, count = np.array(runs, dtype=np.int64).T
    starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
    seq_len = batch.seq_lens_cpu.numpy().astype(np.int64)[sequence]
    position = seq_len - np.diff(starts)[sequence] + start
    first_key, end_key = _visible(position, seq_len, geometry)
    if geometry.causal:
        end_key = np.clip(position + count, 0, seq_len)
    return _Pieces(sequence, seq_len, starts[sequence] + start, count, position, first_key, end_key)


def _visible(
    position: IntArray, seq_len: IntArray, geometry: Geometry
) -> tuple[IntArray, IntArray]:
    """First and end of the keys that a row at a position sees."""
    first, end = np.zeros_like(position), seq_len
    if geometry.sliding_window is not None:
        first = np.maximum(position - geometry.sliding_window + 1, 0)
    if geometry.causal:
        end = np.clip(position + 1, 0, seq_len)
    return first, end


def _build_call(
    pieces: _Pieces,
    table: NDArray[np.int32],
    geometry: Geometry,
    style: CallStyle,
    device: torch.device,
) -> FlexCall:
    first_row = int(pieces.first_row[0])
    packed = slice(first_row, first_row + int(pieces.count.sum()))
    pool = _make_pool(pieces, table, geometry, style.in_place)
    if pool is None:
        return FlexCall(packed, None, None, None, None)
    rows = _lay_out(pieces, geometry, style.tile_sizes)
    num_logical = int(pool.logical.max()) + 1
    block_table = np.full((max(len(pieces.count), 2), max(num_logical, 2)), -1, dtype=np.int64)
    block_table[pool.owner, pool.logical] = pool.block
    if style.tile_sizes:
        kv_num_blocks, kv_indices = _tiles(rows, block_table, geometry.block_size)
    else:
        kv_num_blocks = np.array([len(pool.logical_of)])
        kv_indices = np.arange(len(pool.logical_of))[None]

    def on_device(values: IntArray, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(values).to(dtype).to(device)

    def to_index(values: IntArray) -> Tensor | None:
        return on_device(values, torch.int64) if style.tile_sizes else None

    mask = PagedMask(
        piece=on_device(rows.piece),
        first_key=on_device(rows.first_key),
        end_key=on_device(rows.end_key),
        position=on_device(rows.position),
        block_table=on_device(block_table),
        logical_of=on_device(np.pad(pool.logical_of, (0, max(2 - len(pool.logical_of), 0)))),
        kv_num_blocks=on_device(kv_num_blocks).view(1, 1, -1),
        kv_indices=on_device(kv_indices).view(1, 1, *kv_indices.shape),
        tile_rows=rows.tile_rows,
    )
    slots = None if pool.slots is None else on_device(pool.slots, torch.int64)
    return FlexCall(packed, mask, slots, to_index(rows.query_rows), to_index(rows.result_rows))


def _make_pool(
    pieces: _Pieces, table: NDArray[np.int32], geometry: Geometry, in_place: bool
) -> _Pool | None:
    """The blocks that the pieces see; None if there are none.

    A cache read in place tells a block's logical place by its physical one. If a block stands at
    two logical places, that fails, and the blocks are copied.
    """
    size = geometry.block_size
    first_block = pieces.first_key // size
    num_blocks = np.where(
        pieces.end_key > pieces.first_key, -(-pieces.end_key // size) - first_block, 0
    )
    owner = np.repeat(np.arange(len(num_blocks)), num_blocks)
    logical = _ragged(first_block, num_blocks)
    if not len(logical):
        return None
    physical = table[pieces.sequence[owner], logical].astype(np.int64)
    if in_place:
        logical_of = np.zeros(geometry.num_blocks, dtype=np.int64)
        logical_of[physical] = logical
        if (logical_of[physical] == logical).all():
            return _Pool(owner, logical, physical, logical_of, None)
    first = np.maximum(pieces.first_key[owner] - logical * size, 0)
    end = np.minimum(pieces.end_key[owner] - logical * size, size)
    # Pieces share a copy of a block only if they see all of it.
    whole = (first == 0) & (end == size)
    name = np.where(whole, physical * (logical.max() + 1) + logical, -1 - np.arange(len(logical)))
    _, first_seen, inverse = np.unique(name, return_index=True, return_inverse=True)
    order = np.argsort(first_seen)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    kept = first_seen[order]
    offsets = np.clip(np.arange(size), first[kept, None], end[kept, None] - 1)
    slots = (physical[kept, None] * size + offsets).reshape(-1)
    return _Pool(owner, logical, rank[inverse], logical[kept], slots)


def _lay_out(pieces: _Pieces, geometry: Geometry, tile_sizes: tuple[int, ...]) -> _Rows:
    """Place the rows of all pieces one after the other, padded to whole tiles."""
    count, num_rows = pieces.count, int(pieces.count.sum())
    tile_rows = _choose_tile(count, tile_sizes) if tile_sizes else 1
    padded = -(-count // tile_rows) * tile_rows
    total = max(int(padded.sum()), _MIN_TILED_ROWS) if tile_sizes else num_rows
    target = _ragged(np.cumsum(padded) - padded, count)
    owner = np.repeat(np.arange(len(count)), count)
    position = _ragged(pieces.position, count)
    first_key, end_key = _visible(position, pieces.seq_len[owner], geometry)
    first_row = int(pieces.first_row[0])

    def place(values: IntArray, fill: int = 0) -> IntArray:
        placed = np.full(total, fill, dtype=np.int64)
        placed[target] = values
        return placed

    return _Rows(
        tile_rows=tile_rows if tile_sizes else total,
        piece=place(owner),
        first_key=place(first_key),
        end_key=place(end_key),
        position=place(position),
        query_rows=place(np.arange(first_row, first_row + num_rows), first_row),
        result_rows=target,
    )


def _choose_tile(count: IntArray, tile_sizes: tuple[int, ...]) -> int:
    """The largest tile that at most doubles the rows that the smallest one takes."""
    rows = [int((-(-count // size) * size).sum()) for size in tile_sizes]
    return max(size for size, taken in zip(tile_sizes, rows, strict=True) if taken <= 2 * rows[0])


def _tiles(rows: _Rows, block_table: IntArray, block_size: int) -> tuple[IntArray, IntArray]:
    """How many blocks each tile sees, ``[Q]``, and which, ``[Q, most of a tile or 2]``.

    A tile holds rows of one piece, in order, and then padding.
    """
    first_key = rows.first_key[:: rows.tile_rows]
    end_key = rows.end_key.reshape(-1, rows.tile_rows).max(axis=1)
    first_block = first_key // block_size
    num_blocks = np.where(end_key > first_key, -(-end_key // block_size) - first_block, 0)
    columns = np.arange(max(int(num_blocks.max()), 2))
    places = np.minimum(first_block[:, None] + columns, block_table.shape[1] - 1)
    blocks = block_table[rows.piece[:: rows.tile_rows, None], places]
    return num_blocks, np.where(columns < num_blocks[:, None], blocks, 0)


def _ragged(first: IntArray, count: IntArray) -> IntArray:
    """``count[i]`` numbers from ``first[i]`` on, for each ``i`` in turn."""
    ends = np.cumsum(count)
    return np.repeat(first - (ends - count), count) + np.arange(int(count.sum()))
