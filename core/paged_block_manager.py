"""The default block manager: fixed-size blocks handed out one by one.

Paged KV cache as in https://arxiv.org/abs/2309.06180: a request owns as many blocks as its tokens
need and at most ``block_size - 1`` slots are wasted, in its last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
)
from .errors import ConfigError
from .options import PartOptions

_SPARE_ENTRIES = 8  # room that a new block table has for growing before it is moved


class _Table:
    """A block table that grows in place: a buffer of which the first ``count`` entries are used."""

    __slots__ = ("_buffer", "_view", "count")

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.count = len(block_ids)
        self._buffer: NDArray[np.int32] = np.empty(self.count + _SPARE_ENTRIES, np.int32)
        self._buffer[: self.count] = block_ids
        self._view: BlockTable | None = None

    def extend(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end."""
        old, new = self.count, self.count + len(block_ids)
        if new > len(self._buffer):
            buffer = np.empty(2 * new, np.int32)
            buffer[:old] = self._buffer[:old]
            self._buffer = buffer
        if new == old + 1:
            self._buffer[old] = block_ids[0]  # the common case, several times faster than a slice
        else:
            self._buffer[old:new] = block_ids
        self.count = new
        self._view = None

    def view(self) -> BlockTable:
        """The part in use, read-only, int32."""
        if self._view is None:
            self._view = self._buffer[: self.count]
            self._view.flags.writeable = False
        return self._view


class PagedBlockManager(BlockManager):
    """Gives each request the blocks that its tokens need, from one list of free blocks.

    The block freed last is handed out first. Admissions leave ``watermark * num_blocks`` blocks
    free, rounded down, unless no request holds any: an empty pool admits whatever fits, or
    a request that needs nearly all of it would wait for ever.

    Every operation costs time in proportion to the blocks it touches.

    Raises:
        ConfigError: ``num_blocks`` or ``block_size`` is below 1, or ``watermark`` is not in [0, 1).
    """

    name: ClassVar[str] = "paged"

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        super().__init__(config, options)
        if config.num_blocks < 1 or config.block_size < 1:
            raise ConfigError(
                f"num_blocks={config.num_blocks} and block_size={config.block_size} "
                "must both be at least 1"
            )
        if not 0 <= config.watermark < 1:
            raise ConfigError(f"watermark={config.watermark} must be at least 0 and below 1")
        self._block_size = config.block_size
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._free = list(range(config.num_blocks - 1, -1, -1))  # the next one stands last
        self._tables: dict[str, _Table] = {}

    def can_allocate(self, token_ids: Sequence[int], num_tokens: int) -> AllocationStatus:
        """As in the contract. Raises ValueError if ``num_tokens`` is out of range."""
        num_blocks = self._blocks_for(token_ids, num_tokens)
        if num_blocks > self.config.num_blocks:
            return AllocationStatus.NEVER
        return AllocationStatus.OK if self._admits(num_blocks) else AllocationStatus.LATER

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int
    ) -> Allocation | None:
        if request_id in self._tables:
            raise ValueError(f"request {request_id!r} has blocks already")
        num_blocks = self._blocks_for(token_ids, num_tokens)
        if not self._admits(num_blocks):
            return None
        self._tables[request_id] = _Table(self._take(num_blocks))
        return Allocation()

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        table = self._tables[request_id]
        missing = -(-num_tokens // self._block_size) - table.count
        if missing > len(self._free):
            return None
        if missing > 0:
            table.extend(self._take(missing))
        return ()

    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._free.extend(table.view()[::-1].tolist())

    def block_table(self, request_id: str) -> BlockTable:
        return self._tables[request_id].view()

    def usage(self) -> BlockUsage:
        total, free = self.config.num_blocks, len(self._free)
        return BlockUsage(total=total, used=total - free, cached=0, free=free)

    def largest_request(self) -> int:
        return self.config.num_blocks * self._block_size

    def _blocks_for(self, token_ids: Sequence[int], num_tokens: int) -> int:
        if not 1 <= num_tokens <= len(token_ids):
            raise ValueError(
                f"num_tokens={num_tokens} must be at least 1 and at most {len(token_ids)}, "
                "the tokens of the request"
            )
        return -(-num_tokens // self._block_size)

    def _admits(self, num_blocks: int) -> bool:
        kept_free = self._watermark_blocks if self._tables else 0
        return num_blocks <= len(self._free) - kept_free

    def _take(self, num_blocks: int) -> list[int]:
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        return taken
