"""Work lists, built on the host from a batch's lengths in a few numpy operations.

A sequence whose query rows, times the group size, fit one tile of the decode kernel is decoded, all
others are prefilled in tiles of rows. How a decoded sequence is cut into chunks of keys, and those
into groups of chunks, follows from its own length; chunks are folded to groups and groups to the
result in one order. So results do not depend on the batch, which only decides what a program takes:
whole groups, or single chunks where groups would leave processors idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.attention import AttentionBatch

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

#: Numbers of an entry of each list; 16-byte alignment of every list follows.
PREFILL_SIZE = 8
DECODE_SIZE = 16
#: Single chunks are handed out only where there are at most so many groups for each program.
_FEW_GROUPS = 4
#: Programs may have so much more to do with groups than they would have with chunks.
_IMBALANCE = 1.1


@dataclass(frozen=True)
class Geometry:
    """What shapes the work of a layer.

    Attributes:
        causal, sliding_window: as in ``AttentionSpec``.
        block_size: ``B``.
        group_size: query heads per key/value head.
        prefill_rows, prefill_keys: tile of the prefill kernel.
        decode_rows, decode_keys: tile of the decode kernel.
        chunk_keys: keys of a chunk, unless the sequence needs longer ones.
        max_chunks: chunks that a sequence has at most.
        group_chunks: chunks of a group.
        resident: programs of a key/value head that the device runs at a time.
        programs: programs of a key/value head at most.
    """

    causal: bool
    sliding_window: int | None
    block_size: int
    group_size: int
    prefill_rows: int
    prefill_keys: int
    decode_rows: int
    decode_keys: int
    chunk_keys: int
    max_chunks: int
    group_chunks: int
    resident: int
    programs: int

    @property
    def least_tiles(self) -> int:
        """Key tiles of the shortest chunks."""
        return max(1, self.chunk_keys // self.decode_keys)

    @property
    def table_overrun(self) -> int:
        """Entries past the end of a block table that the kernels may read, not use: while they
        compute a tile they read the block ids of the next one."""
        return 2 * max(self.prefill_keys, self.decode_keys) // self.block_size + 2

    def most_chunks(self, num_keys: int) -> int:
        """Chunks that a sequence of at most ``num_keys`` tokens has at most."""
        # A window may begin inside a tile: one tile more.
        tiles = -(-num_keys // self.decode_keys) + 1
        return max(1, min(self.max_chunks, -(-tiles // self.least_tiles)))

    def most_items(self, num_decoded: int, num_keys: int) -> int:
        """Decode items that need a partial slot, for so many sequences of at most so many keys."""
        chunks = self.most_chunks(num_keys)
        groups = -(-chunks // self.group_chunks)
        single = min(num_decoded * chunks, _FEW_GROUPS * self.group_chunks * self.resident)
        return max(num_decoded * groups, single)


@dataclass(frozen=True)
class WorkLists:
    """The work of a batch.

    Attributes:
        prefill: ``[items, 8]``: first query row, query rows, tokens, first table entry, token and
            head of the tile's first row, first tile of keys; the longest work first.
        decode: ``[items, 16]``: first query row, query rows, tokens, first table entry, first
            tile of keys, end key, partial slot or -1, next item of the same program or 0, tiles of
            a chunk; first slot and number of items of its group, first slot and number of groups
            of its sequence, slots from group to group. The first items of the programs come first.
            Slots of a sequence follow each other; it has none if it has one item.
        programs: of the decode kernel, for each key/value head.
        num_decoded: sequences that are decoded.
        longest_decoded: the most query rows of one of them.
    """

    prefill: Int32
    decode: Int32
    programs: int
    num_decoded: int
    longest_decoded: int


def build_work(batch: AttentionBatch, geometry: Geometry) -> WorkLists:
    """Cut a batch into the items of both kernels.

    Args:
        batch: read from the host twins only.
        geometry: the layer.
    """
    starts = batch.query_start_loc_cpu.numpy()
    num_seqs, width = batch.block_table_cpu.shape
    heads = np.empty((num_seqs, 4), np.int64)
    heads[:, 0] = starts[:-1]
    query_lens = heads[:, 1]
    np.subtract(starts[1:], starts[:-1], out=query_lens)
    heads[:, 2] = batch.seq_lens_cpu.numpy()
    heads[:, 3] = np.arange(0, num_seqs * width, width) if width else 0
    rows = query_lens * geometry.group_size
    few = (rows > 0) & (rows <= geometry.decode_rows)
    decoded = heads if few.all() else heads[few]
    many = rows > geometry.decode_rows
    prefill = np.empty((0, PREFILL_SIZE), np.int32)
    if many.any():
        prefill = _prefill_items(heads[many], geometry)
    items, programs = _decode_items(decoded, geometry)
    return WorkLists(
        prefill=prefill,
        decode=items,
        programs=programs,
        num_decoded=len(decoded),
        longest_decoded=int(decoded[:, 1].max(initial=0)),
    )


def _prefill_items(heads: Int64, geometry: Geometry) -> Int32:
    tiles = -(-heads[:, 1] * geometry.group_size // geometry.prefill_rows)
    owner, index = _repeat(tiles)
    items = np.zeros((len(owner), PREFILL_SIZE), np.int32)
    items[:, :4] = heads[owner]
    query_lens, seq_lens = heads[owner, 1], heads[owner, 2]
    first_token, first_head = np.divmod(index * geometry.prefill_rows, geometry.group_size)
    items[:, 4], items[:, 5] = first_token, first_head
    last_token = first_token + (first_head + geometry.prefill_rows - 1) // geometry.group_size
    context = seq_lens - query_lens
    end = seq_lens
    if geometry.causal:
        end = np.minimum(seq_lens, context + np.minimum(last_token, query_lens - 1) + 1)
    work = -(-end // geometry.prefill_keys)
    if geometry.sliding_window is not None:
        first_key = np.maximum(context + first_token - geometry.sliding_window + 1, 0)
        items[:, 6] = first_tile = first_key // geometry.prefill_keys
        work = work - first_tile
    return items[np.argsort(-work, kind="stable")]


def _decode_items(heads: Int64, geometry: Geometry) -> tuple[Int32, int]:
    """Decode items, and how many programs there are."""
    if not len(heads):
        return np.empty((0, DECODE_SIZE), np.int32), 0
    keys = geometry.decode_keys
    query_lens, seq_lens = heads[:, 1], heads[:, 2]
    tiles = (seq_lens + (keys - 1)) // keys
    first_tile: Int64 | int = 0
    if geometry.sliding_window is not None:
        first_key = np.maximum(seq_lens - query_lens - geometry.sliding_window + 1, 0)
        first_tile = first_key // keys
        tiles = tiles - first_tile
    tiles = np.maximum(tiles, 1)
    per_chunk = np.maximum(-(-tiles // geometry.max_chunks), geometry.least_tiles)
    chunks = -(-tiles // per_chunk)
    group_chunks = geometry.group_chunks
    num_groups = -(-chunks // group_chunks)

    owner, group = _repeat(num_groups)
    group_tiles = group_chunks * per_chunk[owner]
    group_start = group * group_tiles
    group_end = np.minimum(group_start + group_tiles, tiles[owner])
    work = group_end - group_start
    slots_apart = 1
    in_group: Int64 | int = 0
    start, end = group_start, group_end
    if len(owner) <= _FEW_GROUPS * geometry.resident:
        chunk_owner, chunk = _repeat(chunks)
        chunk_start = chunk * per_chunk[chunk_owner]
        chunk_end = np.minimum(chunk_start + per_chunk[chunk_owner], tiles[chunk_owner])
        chunk_work = chunk_end - chunk_start
        least = _most_work(chunk_work, geometry.resident)
        if _most_work(work, geometry.resident) > _IMBALANCE * least:
            owner, start, end, work = chunk_owner, chunk_start, chunk_end, chunk_work
            group, in_group = np.divmod(chunk, group_chunks)
            slots_apart = group_chunks
    counts = np.bincount(owner, minlength=len(heads))

    items = np.empty((len(owner), DECODE_SIZE), np.int32)
    items[:, :4] = heads[owner]
    if geometry.sliding_window is not None:
        offset = first_tile[owner]  # type: ignore[index]
        start, end = start + offset, end + offset
    items[:, 4] = start
    items[:, 5] = np.minimum(end * keys, items[:, 2])
    items[:, 8] = per_chunk[owner]
    items[:, 14:] = 0
    several = counts > 1
    if several.any():
        first_slot = (np.cumsum(counts * several) - counts * several)[owner]
        in_sequence = group * slots_apart
        items[:, 9] = first_slot + in_sequence
        items[:, 10] = np.minimum(counts[owner] - in_sequence, slots_apart)
        items[:, 11] = first_slot
        items[:, 12] = num_groups[owner]
        items[:, 13] = slots_apart
        items[:, 6] = np.where(several[owner], items[:, 9] + in_group, -1)
    else:
        items[:, 6] = -1
        items[:, 9:14] = 0
    return _linked(items, _programs_of(work, geometry.programs))


def _programs_of(work: Int64, programs: int) -> Int64:
    """Which program each item goes to: neighbours stay together, all get about as much."""
    if len(work) <= programs:
        return np.arange(len(work))
    ends = np.cumsum(work)
    middles: Int64 = 2 * ends - work
    return middles * programs // (2 * int(ends[-1]))


def _most_work(work: Int64, programs: int) -> int:
    """What the busiest of so many programs would have to do."""
    return int(np.bincount(_programs_of(work, programs), weights=work).max())


def _linked(items: Int32, owners: Int64) -> tuple[Int32, int]:
    """Items in the order that programs find them in, each naming the next one of its program."""
    items[:, 7] = 0
    is_first = np.empty(len(items), np.bool_)
    is_first[0] = True
    np.not_equal(owners[1:], owners[:-1], out=is_first[1:])
    programs = int(is_first.sum())
    if programs == len(items):
        return items, programs
    order = np.concatenate([np.flatnonzero(is_first), np.flatnonzero(~is_first)])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    items[:-1, 7] = np.where(is_first[1:], 0, place[1:])
    return items[order], programs


def _repeat(counts: Int64) -> tuple[Int64, Int64]:
    """For each of ``sum(counts)`` entries: whose it is, and the how-manieth."""
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, index
