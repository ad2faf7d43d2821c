"""A block manager that keeps the free blocks on a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jackfield import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
    PartOptions,
)


class StackBlockManager(BlockManager):
    """The block that was given back last is handed out first; no block is ever shared.

    The watermark is kept as the contract says, on admission only; a request that is alone may use
    every block, or one that needs them all would wait for ever.
    """

    name: ClassVar[str] = "example_stack"

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        super().__init__(config, options)
        self._stack = list(reversed(range(config.num_blocks)))
        self._owned: dict[str, list[int]] = {}

    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        needed = self._num_blocks(token_ids, num_tokens)
        if needed > self.config.num_blocks:
            return AllocationStatus.NEVER
        return AllocationStatus.OK if self._fits(needed) else AllocationStatus.LATER

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        if request_id in self._owned:
            raise ValueError(f"request {request_id!r} has blocks already")
        needed = self._num_blocks(token_ids, num_tokens)
        if not self._fits(needed):
            return None
        self._owned[request_id] = [self._stack.pop() for _ in range(needed)]
        return Allocation()

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        owned = self._owned[request_id]
        missing = -(-num_tokens // self.config.block_size) - len(owned)
        if missing > len(self._stack):
            return None
        owned.extend(self._stack.pop() for _ in range(missing))
        return ()

    def free(self, request_id: str) -> None:
        self._stack.extend(reversed(self._owned.pop(request_id, [])))

    def block_table(self, request_id: str) -> BlockTable:
        table = np.array(self._owned[request_id], dtype=np.int32)
        table.flags.writeable = False
        return table

    def usage(self) -> BlockUsage:
        total, free = self.config.num_blocks, len(self._stack)
        return BlockUsage(total=total, used=total - free, cached=0, free=free)

    def largest_request(self) -> int:
        return self.config.num_blocks * self.config.block_size

    def _num_blocks(self, token_ids: Sequence[int], num_tokens: int) -> int:
        if not 1 <= num_tokens <= len(token_ids):
            raise ValueError(f"num_tokens={num_tokens} must be 1 to {len(token_ids)}")
        return -(-num_tokens // self.config.block_size)

    def _fits(self, needed: int) -> bool:
        reserve = int(self.config.watermark * self.config.num_blocks) if self._owned else 0
        return needed <= len(self._stack) - reserve
