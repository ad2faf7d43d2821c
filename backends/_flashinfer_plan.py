"""The host side of a plan for flashinfer: its arrays, and the memory that its kernels need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.attention import AttentionBatch, AttentionSpec

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

# Rows times heads of a group that a tile of the fa2 kernels has.
_SMALL_TILE, _TILE, _LARGE_TILE = 16, 64, 128
# The large tile is for head sizes below this.
_LARGE_TILE_HEAD_SIZE = 256
# The arrays of a plan on the device each start on a border of 16 bytes.
_ROOM_FOR_BORDERS = 1024


@dataclass(frozen=True)
class StepArrays:
    """A step as the library wants it. ``S`` sequences have query rows; the others are left out.

    Attributes:
        query_start_loc: first row of each sequence, then the total: ``[S + 1]``.
        page_start_loc: first of each sequence's entries in ``pages``, then their number:
            ``[S + 1]``.
        pages: the physical blocks of all sequences, one after the other, without those past a
            sequence's last token.
        last_page_lens: tokens in the last block of each sequence: ``[S]``. The library does not
            know 0: it is 1 for a sequence without tokens, which has no blocks either.
        seq_lens: tokens of each sequence: ``[S]``.
        blind: which query rows see no key, because their sequence has no token: ``[T]``.
    """

    query_start_loc: Int32
    page_start_loc: Int32
    pages: Int32
    last_page_lens: Int32
    seq_lens: Int32
    blind: Bool

    @staticmethod
    def of(batch: AttentionBatch, block_size: int) -> StepArrays:
        """The arrays of a batch, from its host twins."""
        query_lens = np.diff(batch.query_start_loc_cpu.numpy())
        kept = np.flatnonzero(query_lens)
        query_lens = query_lens[kept]
        seq_lens = batch.seq_lens_cpu.numpy()[kept]
        counts = -(-seq_lens // block_size)
        page_start_loc = _start_loc(counts)
        total = int(page_start_loc[-1])
        columns = np.arange(total, dtype=np.int32) - np.repeat(page_start_loc[:-1], counts)
        pages = batch.block_table_cpu.numpy()[np.repeat(kept, counts), columns]
        return StepArrays(
            query_start_loc=_start_loc(query_lens),
            page_start_loc=page_start_loc,
            pages=pages.astype(np.int32, copy=False),
            last_page_lens=np.where(counts > 0, seq_lens - (counts - 1) * block_size, 1).astype(
                np.int32
            ),
            seq_lens=seq_lens,
            blind=np.repeat(seq_lens == 0, query_lens),
        )

    @property
    def num_seqs(self) -> int:
        """``S``."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """``T``: query rows of all sequences."""
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """The most query rows of a sequence; 0 if there are none."""
        return int(np.diff(self.query_start_loc).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a sequence; 0 if there are none."""
        return int(self.seq_lens.max(initial=0))

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one query row."""
        return 0 < self.num_seqs == self.num_rows


def host_tensors(arrays: list[Int32], pinned: bool) -> list[Tensor]:
    """Copies of int32 arrays, in one piece of memory, pinned if the device is to copy from it."""
    sizes = [len(array) for array in arrays]
    memory = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
    np.concatenate(arrays, out=memory.numpy())
    return list(torch.split(memory, sizes))


@dataclass(frozen=True)
class Geometry:
    """What decides how much memory the fa2 kernels need.

    Where keys are split, the library stores a partial result for each tile of query rows and piece
    of keys, and refuses a workspace that is too small. The numbers here follow ``PrefillPlan`` in
    its ``attention/scheduler.cuh``.

    Attributes:
        num_heads, num_kv_heads, head_size: of the layer.
        processors: streaming multiprocessors of the device.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    processors: int

    @staticmethod
    def of(spec: AttentionSpec, device: torch.device) -> Geometry:
        """For a layer on a device."""
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        return Geometry(spec.num_heads, spec.num_kv_heads, spec.head_size, processors)

    def split_bytes(self, arrays: StepArrays) -> int:
        """Bytes for partial results of a step that is launched as large as it needs."""
        rows_of_group = arrays.num_rows * self._group_size // max(1, arrays.num_seqs)
        return self._partial_bytes(self._most_pieces, self._tile(rows_of_group))

    def captured_bytes(self, num_seqs: int) -> int:
        """The same for decoding this many sequences in a form that a CUDA graph can replay."""
        return self._partial_bytes(self._captured_pieces(num_seqs), self._tile(self._group_size))

    def captured_plan_bytes(self, num_seqs: int) -> int:
        """Bytes of the library's own arrays of such a plan: for each piece three numbers and a
        flag, for each row two numbers."""
        numbers = 3 * self._captured_pieces(num_seqs) + 2 * (num_seqs + 1) + 2
        return 4 * numbers + self._captured_pieces(num_seqs) + _ROOM_FOR_BORDERS

    @property
    def _group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def _most_pieces(self) -> int:
        """The library splits keys until two programs run on every processor."""
        return 2 * self.processors // self.num_kv_heads

    def _captured_pieces(self, num_seqs: int) -> int:
        tiles = -(-num_seqs * self._group_size // self._tile(self._group_size)) + num_seqs - 1
        return max(self._most_pieces, tiles)

    def _partial_bytes(self, pieces: int, tile: int) -> int:
        """A result and its LSE, both float32, for every row of a tile and head."""
        return 4 * self.num_heads * pieces * tile * (self.head_size + 1) + 2 * _ROOM_FOR_BORDERS

    def _tile(self, rows_of_group: int) -> int:
        if rows_of_group > _TILE and self.head_size < _LARGE_TILE_HEAD_SIZE:
            return _LARGE_TILE
        return _TILE if rows_of_group > _SMALL_TILE else _SMALL_TILE


def _start_loc(lengths: Int32) -> Int32:
    start_loc = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=start_loc[1:])
    return start_loc
