"""The baseline that pages nothing: every request reserves room for the longest one possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
    check_num_tokens,
)
from ..options import PartOptions


class ContiguousBlockManager(BlockManager):
    """Reserves ``max_model_len`` slots in one run of blocks at admission, and never grows.

    The first gap that is long enough is taken. With it one can measure what paging saves: most of
    a reservation is never written to, and gaps too short for a request are of no use (both were so
    in serving systems before https://arxiv.org/abs/2309.06180). Its powers are none but lookahead,
    for which the reservation has room anyway.

    All requests reserve the same number of blocks, so gaps differ from multiples of it only at the
    end of the pool. The watermark is kept unless no request holds any blocks.
    """

    name: ClassVar[str] = "contiguous"
    powers: ClassVar[frozenset[str]] = frozenset({"lookahead"})

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        super().__init__(config, options)
        self._num_reserved = config.blocks_for(config.max_model_len)
        self._gaps = [(0, config.num_blocks)]  # (first block, number), in order, none adjacent
        self._num_free = config.num_blocks
        self._tables: dict[str, BlockTable] = {}

    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        check_num_tokens(token_ids, num_tokens)
        if num_tokens > self.largest_request():
            return AllocationStatus.NEVER
        return AllocationStatus.LATER if self._gap() is None else AllocationStatus.OK

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        if request_id in self._tables:
            raise ValueError(f"request {request_id!r} has blocks already")
        check_num_tokens(token_ids, num_tokens)
        place = self._gap()
        if place is None or num_tokens > self.largest_request():
            return None
        start, length = self._gaps[place]
        left = (start + self._num_reserved, length - self._num_reserved)
        self._gaps[place : place + 1] = [left] if left[1] else []
        self._num_free -= self._num_reserved
        table = np.arange(start, start + self._num_reserved, dtype=np.int32)
        table.flags.writeable = False
        self._tables[request_id] = table
        return Allocation()

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        slots = len(self._tables[request_id]) * self.config.block_size
        return () if num_tokens <= slots else None

    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        self._num_free += len(table)
        start, stop = int(table[0]), int(table[-1]) + 1
        place = bisect_left(self._gaps, (start, 0))
        first = last = place
        if place > 0 and sum(self._gaps[place - 1]) == start:
            first, start = place - 1, self._gaps[place - 1][0]
        if place < len(self._gaps) and self._gaps[place][0] == stop:
            last, stop = place + 1, sum(self._gaps[place])
        self._gaps[first:last] = [(start, stop - start)]

    def block_table(self, request_id: str) -> BlockTable:
        return self._tables[request_id]

    def usage(self) -> BlockUsage:
        total = self.config.num_blocks
        return BlockUsage(total=total, used=total - self._num_free, cached=0, free=self._num_free)

    def largest_request(self) -> int:
        fits = self._num_reserved <= self.config.num_blocks
        return self._num_reserved * self.config.block_size if fits else 0

    def _gap(self) -> int | None:
        """Which gap the next admission gets; None if there is none, or the watermark forbids it."""
        kept = self.config.watermark_blocks if self._tables else 0
        if self._num_reserved > self._num_free - kept:
            return None
        lengths = (length for _, length in self._gaps)
        return next((i for i, length in enumerate(lengths) if length >= self._num_reserved), None)
