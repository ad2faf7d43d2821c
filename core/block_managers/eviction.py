"""Which cached block is given up first.

A policy ranks blocks; a queue keeps the candidates. Candidates are the cached blocks without
children: whatever the policy, no block is evicted before those that can only be reached through it.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

from .prefix_index import PrefixBlock


class EvictionPolicy(ABC):
    """Ranks cached blocks. A rank must not change while its block waits to be evicted."""

    @abstractmethod
    def rank(self, block: PrefixBlock) -> tuple[int, ...]:
        """What blocks are ordered by; the lowest is evicted first. Ties go by block id."""


class LeastRecentlyUsed(EvictionPolicy):
    """First the block that requests have done without for longest; of one request's blocks, which
    it gives up all at once, the deepest."""

    def rank(self, block: PrefixBlock) -> tuple[int, ...]:
        return (block.last_used, -block.depth)


class LeastFrequentlyUsed(EvictionPolicy):
    """First the block that the fewest admissions have found since it was computed; of those, the
    least recently used one."""

    def rank(self, block: PrefixBlock) -> tuple[int, ...]:
        return (block.num_hits, block.last_used, -block.depth)


class FirstInFirstOut(EvictionPolicy):
    """First the block that was computed first, however often it was found since."""

    def rank(self, block: PrefixBlock) -> tuple[int, ...]:
        return (block.created, -block.depth)


class PinnedLast(EvictionPolicy):
    """Another policy's order, but blocks of pinned prefixes come after all others.

    They are evicted when nothing else is left: a pin never makes a request fail.
    """

    def __init__(self, inner: EvictionPolicy) -> None:
        self._inner = inner

    def rank(self, block: PrefixBlock) -> tuple[int, ...]:
        return (int(block.pins is not None), *self._inner.rank(block))


#: The built-in policies by name.
EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
}


class EvictionQueue:
    """The candidates, a heap in order of rank.

    A block that is taken out leaves its heap entry behind, which is skipped later; when those are
    the greater part the heap is made anew, so that each operation costs logarithmic time on
    average.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, ...]] = []
        self._waiting: dict[int, tuple[int, ...]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, block: PrefixBlock) -> None:
        """Make a block a candidate; one that is in already is ranked anew."""
        entry = (*self._policy.rank(block), block.block_id)
        self._waiting[block.block_id] = entry
        heapq.heappush(self._heap, entry)
        self._drop_stale_entries()

    def discard(self, block_id: int) -> None:
        """Take a block out, if it is in."""
        if self._waiting.pop(block_id, None) is not None:
            self._drop_stale_entries()

    def pop(self) -> int:
        """Take the first candidate out and return its block id.

        Raises:
            IndexError: there is none.
        """
        while True:
            entry = heapq.heappop(self._heap)
            block_id = entry[-1]
            if self._waiting.get(block_id) is entry:
                del self._waiting[block_id]
                return block_id

    def clear(self) -> None:
        """Take all out."""
        self._heap.clear()
        self._waiting.clear()

    def _drop_stale_entries(self) -> None:
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = list(self._waiting.values())
            heapq.heapify(self._heap)
