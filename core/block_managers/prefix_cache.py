"""The prefix cache: which blocks can be found, which of them are in use, which is evicted next.

Requests that compute the same prefix side by side end up with several blocks of equal contents. One
of them can be found, the others are its duplicates. As long as any of them is in use, the one that
can be found is in use: then a cached block has cached children only, and eviction from the leaves
reaches every cached block.
"""

from __future__ import annotations

from collections.abc import Sequence

from .eviction import EvictionPolicy, EvictionQueue
from .prefix_index import PrefixBlock, PrefixIndex


class PrefixCache:
    """Keeps the state of blocks that prefixes can be found by.

    Args:
        index: finds them; empty.
        policy: the order of eviction.
        num_blocks: device blocks.

    Attributes:
        num_cached: blocks that can be found and that no request holds.
    """

    def __init__(self, index: PrefixIndex, policy: EvictionPolicy, num_blocks: int) -> None:
        self.num_cached = 0
        self._index = index
        self._queue = EvictionQueue(policy)
        self._by_id: list[PrefixBlock | None] = [None] * num_blocks
        self._tick = 0

    def advance(self) -> None:
        """Begin a new operation: what is used from now on is used later than all before."""
        self._tick += 1

    def find(self, token_ids: Sequence[int], limit: int, salt: str) -> list[PrefixBlock]:
        """The longest chain that begins ``token_ids``, at most ``limit`` blocks; a probe."""
        return self._index.find(token_ids, limit, salt)

    def take(self, block: PrefixBlock) -> None:
        """A request has found a block and holds it from now on."""
        if not block.in_use:
            block.in_use = True
            self.num_cached -= 1
            self._queue.discard(block.block_id)
        block.num_hits += 1
        block.last_used = self._tick

    def read(self, block: PrefixBlock) -> None:
        """A request has found a block, to copy it."""
        block.num_hits += 1
        block.last_used = self._tick
        if block.block_id in self._queue:
            self._queue.add(block)

    def release(self, block_id: int) -> bool:
        """No request holds a block any more; False if it is free, True if it stays cached."""
        block = self._by_id[block_id]
        if block is None:
            return False
        if block.block_id != block_id:
            del block.duplicates[block_id]
        elif block.duplicates:
            block.block_id = block.duplicates.popitem()[0]
        else:
            block.in_use = False
            block.last_used = self._tick
            self.num_cached += 1
            if block.num_children == 0:
                self._queue.add(block)
            return True
        self._by_id[block_id] = None
        return False

    def register(
        self,
        parent: PrefixBlock | None,
        salt: str,
        token_ids: Sequence[int],
        start: int,
        block_ids: Sequence[int],
    ) -> tuple[PrefixBlock | None, list[int]]:
        """Make blocks that a request holds findable.

        Args:
            parent: the request's block before them, registered before.
            salt: of the request.
            token_ids: all its tokens.
            start: which of its blocks is the first of these.
            block_ids: the blocks.

        Returns:
            The last one as the cache knows it, and cached blocks of equal contents that have
            become free because one of these takes their place.
        """
        released: list[int] = []
        stop = start + len(block_ids)
        keys = self._index.keys(token_ids, start, stop)
        for block_id, key in zip(block_ids, keys, strict=True):
            parent = block = self._index.extend(parent, salt, key, block_id)
            if self._by_id[block_id] is block:  # a fork has registered it
                continue
            if block.block_id == block_id:
                block.created = self._tick
            elif block.in_use:
                block.duplicates[block_id] = None
            else:
                self._queue.discard(block.block_id)
                self._by_id[block.block_id] = None
                released.append(block.block_id)
                block.block_id = block_id
                block.in_use = True
                self.num_cached -= 1
            self._by_id[block_id] = block
        return parent, released

    def evict(self) -> int:
        """Forget the first block in the order of eviction and return its id.

        Raises:
            IndexError: nothing is cached.
        """
        block_id = self._queue.pop()
        block = self._by_id[block_id]
        if block is None:
            raise RuntimeError(f"block {block_id} waits for eviction but is not cached")
        self._by_id[block_id] = None
        self.num_cached -= 1
        self._index.remove(block)
        parent = block.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0 and not parent.in_use:
                self._queue.add(parent)
        return block_id

    def clear(self) -> list[int]:
        """Forget all blocks, none of which may be in use, and return their ids, the first to be
        evicted first."""
        block_ids = [self.evict() for _ in range(self.num_cached)]
        self._index.clear()
        return block_ids
