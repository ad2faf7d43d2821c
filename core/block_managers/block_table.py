"""A block table that grows in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..block_manager import BlockTable

_SPARE_ENTRIES = 8  # room that a new block table has for growing before it is moved


class GrowingTable:
    """A buffer of block ids of which the first ``count`` entries are used."""

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

    def replace(self, index: int, block_id: int) -> None:
        """Put another block in the place of one."""
        self._buffer[index] = block_id

    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Block ids from ``start`` to ``stop``, by default all."""
        stop = self.count if stop is None else min(stop, self.count)
        block_ids: list[int] = self._buffer[start:stop].tolist()
        return block_ids

    def view(self) -> BlockTable:
        """The part in use, read-only, int32."""
        if self._view is None:
            self._view = self._buffer[: self.count]
            self._view.flags.writeable = False
        return self._view
