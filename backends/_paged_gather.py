"""Host-side planning for backends that gather a sequence's keys before they attend.

Everything here depends on lengths and block tables only. A batch is cut into ``KeyGroup``s:
sequences with equal numbers of query rows and similar numbers of keys, which are gathered into one
rectangle. The rectangle is aligned to the right: the last column is the newest token of every
sequence, so that whether a row sees a column depends on their distance alone, whatever the
sequence. Columns left of a sequence's first key are padding and repeat its first visible key: no
slot outside the visible keys is ever read, so its contents (NaN included) cannot matter.
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

# Longer queries make work enough for a call of their own; they share one only if equally long.
_MAX_PADDED_QUERY_LEN = 8


@dataclass(frozen=True)
class Limits:
    """What bounds one gather and one tile.

    Attributes:
        score_elements: most scores in a tile, unless a single query row has more.
        gathered_elements: most key and value elements in a gather, unless a single sequence has
            more.
        call_cost: elements that are gathered and attended to in the time of a group's fixed cost;
            padding beyond it is avoided by another group.
        tile_rows: most query rows of a tile.
    """

    score_elements: int
    gathered_elements: int
    call_cost: int
    tile_rows: int = 256


@dataclass(frozen=True)
class Geometry:
    """The numbers of a layer that shape a plan.

    Attributes:
        causal, sliding_window: as in ``AttentionSpec``.
        block_size: ``B``.
        num_heads: ``N``: scores of a query row per key.
        scores_per_key: how many of these a tile of one sequence holds in memory.
        elements_per_key: elements of a key and a value, all heads.
    """

    causal: bool
    sliding_window: int | None
    block_size: int
    num_heads: int
    scores_per_key: int
    elements_per_key: int


@dataclass(frozen=True)
class Tile:
    """Some query rows of every sequence of a group, with the columns that they may see.

    Attributes:
        rows: rows of the packed query, sequence by sequence: a slice if they are consecutive, else
            ``[S * R]``, int64, on the device.
        num_rows: ``R``, rows of each sequence.
        position: column of the first row's own token; negative if it lies before the first key.
        first_key, end_key: range of columns, ``C = end_key - first_key``.
        mask: 0 where a row sees a column, else ``-inf``: ``[S or 1, 1, R or 1, C]``; None if every
            row sees every column.
    """

    rows: slice | Tensor
    num_rows: int
    position: int
    first_key: int
    end_key: int
    mask: Tensor | None


@dataclass(frozen=True)
class KeyGroup:
    """Sequences whose keys are gathered together.

    Attributes:
        num_seqs: ``S``.
        num_keys: columns of the rectangle.
        slots: cache slot of each column of each sequence: ``[S * num_keys]``, int64, on the device.
        tiles: the query rows.
    """

    num_seqs: int
    num_keys: int
    slots: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class _Sequences:
    """A batch as numbers: one entry per sequence.

    Attributes:
        first_row: first query row.
        query_len: query rows.
        seq_len: tokens.
        first_key: first key that any row sees.
        num_keys: keys that some row sees: all from ``first_key`` on.
    """

    first_row: IntArray
    query_len: IntArray
    seq_len: IntArray
    first_key: IntArray
    num_keys: IntArray


@dataclass(frozen=True)
class _TileShape:
    """A tile before its tensors are made; ``first_row`` and ``end_row`` count within a query."""

    first_row: int
    end_row: int
    position: int
    first_key: int
    end_key: int


def build_groups(
    batch: AttentionBatch,
    geometry: Geometry,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[KeyGroup, ...], Tensor | None]:
    """Cut a batch into groups and tiles.

    Args:
        batch: read from the host twins only.
        geometry: the layer.
        limits: bounds on memory.
        dtype: dtype of the masks.
        device: where index tensors and masks go.

    Returns:
        The groups, and the query rows that see no key at all (int64, on the device; None if there
        are none): these may be in a tile and hold nonsense afterwards.
    """
    sequences = _read(batch, geometry.sliding_window)
    table = batch.block_table_cpu.numpy()
    members = list(_group(sequences, geometry, limits))
    shapes = [
        _tile_shapes(
            int(sequences.query_len[group[0]]),
            int(sequences.num_keys[group].max()),
            len(group),
            geometry,
            limits,
        )
        for group in members
    ]
    band = _Band.covering([shape for group in shapes for shape in group], geometry, dtype, device)
    groups = []
    for group, group_shapes in zip(members, shapes, strict=True):
        num_keys = int(sequences.num_keys[group].max())
        slots = _slots(table, sequences, group, num_keys, geometry.block_size)
        padding = num_keys - sequences.num_keys[group]
        groups.append(
            KeyGroup(
                num_seqs=len(group),
                num_keys=num_keys,
                slots=torch.from_numpy(slots).to(device),
                tiles=tuple(
                    Tile(
                        rows=_rows(sequences.first_row[group], shape, device),
                        num_rows=shape.end_row - shape.first_row,
                        position=shape.position,
                        first_key=shape.first_key,
                        end_key=shape.end_key,
                        mask=band.mask(shape, padding),
                    )
                    for shape in group_shapes
                ),
            )
        )
    return tuple(groups), _blind_rows(sequences, geometry.causal, device)


def _read(batch: AttentionBatch, sliding_window: int | None) -> _Sequences:
    starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
    seq_len = batch.seq_lens_cpu.numpy().astype(np.int64)
    query_len = np.diff(starts)
    first_key = np.zeros_like(seq_len)
    if sliding_window is not None:
        first_key = np.maximum(seq_len - query_len - sliding_window + 1, 0)
    return _Sequences(starts[:-1], query_len, seq_len, first_key, seq_len - first_key)


def _blind_rows(sequences: _Sequences, causal: bool, device: torch.device) -> Tensor | None:
    """Rows that stand before the first key, or whose sequence has none."""
    if causal:
        blind = sequences.query_len - sequences.seq_len
    else:
        blind = np.where(sequences.seq_len == 0, sequences.query_len, 0)
    if not (blind > 0).any():
        return None
    rows = [
        np.arange(first, first + count)
        for first, count in zip(sequences.first_row, blind, strict=True)
        if count > 0
    ]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def _group(sequences: _Sequences, geometry: Geometry, limits: Limits) -> Iterator[IntArray]:
    """Sequences to be gathered together, each group in batch order; those without rows or keys are
    in none."""
    live = np.flatnonzero((sequences.query_len > 0) & (sequences.num_keys > 0))
    call_cost = limits.call_cost / geometry.elements_per_key
    for query_len in np.unique(sequences.query_len[live]):
        same = live[sequences.query_len[live] == query_len]
        same = same[np.argsort(sequences.num_keys[same], kind="stable")]
        cost = call_cost if query_len <= _MAX_PADDED_QUERY_LEN else 0.0
        for part in _split_by_length(same, sequences.num_keys[same], cost):
            num_keys = int(sequences.num_keys[part[-1]])
            size = min(
                limits.gathered_elements // (num_keys * geometry.elements_per_key),
                limits.score_elements // (num_keys * geometry.num_heads * query_len),
            )
            for start in range(0, len(part), max(size, 1)):
                yield np.sort(part[start : start + max(size, 1)])


def _split_by_length(members: IntArray, lengths: IntArray, call_cost: float) -> Iterator[IntArray]:
    """Cut where the padded tokens saved cost more than another call, best cut first.

    ``lengths`` ascend; all members of a part are padded to the part's last.
    """
    if len(members) < 2 or lengths[0] == lengths[-1]:
        if len(members):
            yield members
        return
    saved = np.arange(1, len(members)) * (lengths[-1] - lengths[:-1])
    cut = int(saved.argmax()) + 1
    if saved[cut - 1] <= call_cost:
        yield members
        return
    yield from _split_by_length(members[:cut], lengths[:cut], call_cost)
    yield from _split_by_length(members[cut:], lengths[cut:], call_cost)


def _tile_shapes(
    query_len: int, num_keys: int, num_seqs: int, geometry: Geometry, limits: Limits
) -> list[_TileShape]:
    """Cut the rows of a group evenly; each tile gets the columns between what its first row and
    its last row may see."""
    fitting = limits.score_elements // (num_seqs * num_keys * geometry.scores_per_key)
    most = max(1, min(limits.tile_rows, fitting, query_len))
    num_rows = -(-query_len // -(-query_len // most))
    shapes = []
    for first_row in range(0, query_len, num_rows):
        end_row = min(first_row + num_rows, query_len)
        position = num_keys - query_len + first_row
        first_key, end_key = 0, num_keys
        if geometry.causal:
            end_key = num_keys - query_len + end_row
        if geometry.sliding_window is not None:
            first_key = max(0, position - geometry.sliding_window + 1)
        if end_key > first_key:
            shapes.append(_TileShape(first_row, end_row, position, first_key, end_key))
    return shapes


def _slots(
    table: NDArray[np.int32],
    sequences: _Sequences,
    group: IntArray,
    num_keys: int,
    block_size: int,
) -> IntArray:
    """Cache slot of every column of every sequence of a group, flat.

    Blocks are looked up one by one and spelled out side by side, where a sequence's columns are a
    run that starts in the first or second block.
    """
    seq_len, first_key = sequences.seq_len[group], sequences.first_key[group]
    num_blocks = num_keys // block_size + 2
    first_block = -(-seq_len // block_size) - num_blocks
    blocks = np.maximum(
        first_block[:, None] + np.arange(num_blocks), first_key[:, None] // block_size
    )
    first_slots = table[group[:, None], blocks].astype(np.int64) * block_size
    spelled_out = (first_slots[:, :, None] + np.arange(block_size)).reshape(len(group), -1)
    starts = (seq_len - num_keys - first_block * block_size).tolist()
    padding = (num_keys - sequences.num_keys[group]).tolist()
    slots = np.empty((len(group), num_keys), dtype=np.int64)
    for target, source, start, hidden in zip(slots, spelled_out, starts, padding, strict=True):
        target[:] = source[start : start + num_keys]
        if hidden:
            target[:hidden] = target[hidden]
    return slots.reshape(-1)


def _rows(first_rows: IntArray, shape: _TileShape, device: torch.device) -> slice | Tensor:
    rows = first_rows[:, None] + np.arange(shape.first_row, shape.end_row)
    flat = rows.reshape(-1)
    if flat[-1] - flat[0] == len(flat) - 1:
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat).to(device)


@dataclass(frozen=True)
class _Band:
    """The mask of causality and window. It depends on column minus position only, so that one
    matrix is enough for the whole batch and a tile's mask is a part of it.

    Attributes:
        matrix: row ``i``, column ``x``: 0 if a row sees a column ``x - origin - i`` to its right,
            else ``-inf``.
        origin: column of ``matrix`` at which the first row of a tile stands.
    """

    matrix: Tensor
    origin: int
    geometry: Geometry

    @classmethod
    def covering(
        cls,
        shapes: list[_TileShape],
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Band:
        """The smallest band that holds the masks of all these tiles."""
        needed = [shape for shape in shapes if cls._hides_something(shape, geometry)]
        if not needed:
            return cls(torch.zeros((0, 0), dtype=dtype, device=device), 0, geometry)
        origin = max(shape.position - shape.first_key for shape in needed)
        end = max(shape.end_key - shape.position for shape in needed)
        rows = max(shape.end_row - shape.first_row for shape in needed)
        columns = torch.arange(-origin, end, device=device)
        distance = columns - torch.arange(rows, device=device)[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if geometry.causal:
            hidden |= distance > 0
        if geometry.sliding_window is not None:
            hidden |= distance <= -geometry.sliding_window
        matrix = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return cls(matrix.masked_fill_(hidden, -torch.inf), origin, geometry)

    @staticmethod
    def _hides_something(shape: _TileShape, geometry: Geometry) -> bool:
        last_position = shape.position + shape.end_row - shape.first_row - 1
        future = geometry.causal and shape.end_key - 1 > shape.position
        window = geometry.sliding_window
        past = window is not None and shape.first_key <= last_position - window
        return future or past

    def mask(self, shape: _TileShape, padding: IntArray) -> Tensor | None:
        """The mask of a tile.

        Args:
            shape: the tile.
            padding: columns of padding of each sequence.
        """
        parts: list[Tensor] = []
        if self._hides_something(shape, self.geometry):
            start = self.origin + shape.first_key - shape.position
            rows, columns = shape.end_row - shape.first_row, shape.end_key - shape.first_key
            parts.append(self.matrix[:rows, start : start + columns][None, None])
        if padding.max() > shape.first_key:
            line = np.arange(shape.first_key, shape.end_key)
            hidden = torch.from_numpy(line < padding[:, None]).to(self.matrix.device)
            zeros = torch.zeros(hidden.shape, dtype=self.matrix.dtype, device=self.matrix.device)
            parts.append(zeros.masked_fill_(hidden, -torch.inf)[:, None, None])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
