"""A plain block manager with all powers, written to be read: what the suite's mutants are made of.

It keeps whole token tuples as keys and counts by walking, so it is slow and cannot be wrong by a
collision. Every decision is a small method of its own, which a mutant can override.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
    PrefixStats,
)
from ...core.options import PartOptions

#: Salt and all tokens up to the end of a full block.
Key = tuple[str, tuple[int, ...]]


@dataclass
class Holding:
    """What a request holds.

    Attributes:
        salt: of its prefixes.
        blocks: device blocks in logical order; empty while it is swapped.
        host: host blocks in logical order; empty unless it is swapped.
        committed: leading tokens that are in the cache.
    """

    salt: str
    blocks: list[int]
    host: list[int]
    committed: int


class PlainBlockManager(BlockManager):
    """Blocks from a list of free ones; prefixes by their tokens, evicted least recently used first.

    Of a request that is freed the last block is the first to be evicted. Admissions keep the
    watermark unless no request holds a device block.
    """

    name: ClassVar[str] = "plain"
    powers: ClassVar[frozenset[str]] = frozenset({"prefix_caching", "fork", "swap", "lookahead"})

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        super().__init__(config, options)
        self.free_blocks = list(range(config.num_blocks))
        self.free_host = list(range(config.num_host_blocks))
        self.holdings: dict[str, Holding] = {}
        self.references = [0] * config.num_blocks
        #: Findable blocks and their keys; those that nobody holds, the next to be evicted first.
        self.keys: dict[int, Key] = {}
        self.found: dict[Key, int] = {}
        self.cached: list[int] = []
        self.stats = PrefixStats()

    # Admission.

    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        self.check_range(token_ids, num_tokens)
        if self.blocks_for(num_tokens) > self.config.num_blocks:
            return AllocationStatus.NEVER
        hits, _ = self.find(token_ids, num_tokens, salt)
        if self.admits(self.blocks_for(num_tokens) - len(hits), hits):
            return AllocationStatus.OK
        return AllocationStatus.LATER

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        if request_id in self.holdings:
            raise ValueError(f"request {request_id!r} has blocks already")
        self.check_range(token_ids, num_tokens)
        hits, whole = self.find(token_ids, num_tokens, salt)
        needed = self.blocks_for(num_tokens) - len(hits)
        if not self.admits(needed, hits):
            return None
        for block in hits:
            self.hold(block)
        fresh = self.take(needed)
        copies: tuple[BlockCopy, ...] = ()
        num_cached = len(hits) * self.config.block_size
        if whole is not None:
            num_cached = len(token_ids) - 1
            # Where the block is handed out again itself, its contents are there already.
            copies = (BlockCopy(whole, fresh[0]),) if whole != fresh[0] else ()
        self.holdings[request_id] = Holding(salt, hits + fresh, [], num_cached)
        self.count(len(token_ids), num_cached)
        return Allocation(num_cached, copies)

    def check_range(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Raise ValueError unless 1 <= num_tokens <= len(token_ids)."""
        if not 1 <= num_tokens <= len(token_ids):
            raise ValueError(f"num_tokens={num_tokens} must be 1 to {len(token_ids)}")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request with so many tokens has."""
        return self.config.blocks_for(num_tokens)

    def admits(self, needed: int, hits: Sequence[int]) -> bool:
        """Whether so many blocks can be taken besides the hits."""
        revived = sum(self.references[block] == 0 for block in hits)
        return needed <= self.available() - revived - self.kept_free()

    def kept_free(self) -> int:
        """Blocks that an admission leaves available."""
        return self.config.watermark_blocks if any(self.references) else 0

    def available(self) -> int:
        """Blocks that somebody could get."""
        return len(self.free_blocks) + len(self.cached)

    def count(self, queried: int, hit: int) -> None:
        """Statistics of an admission."""
        if self.config.enable_prefix_caching:
            old = self.stats
            self.stats = PrefixStats(old.num_queried_tokens + queried, old.num_hit_tokens + hit)

    # Growth.

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        holding = self.on_device(request_id)
        needed = self.blocks_for(num_tokens)
        first = holding.committed // self.config.block_size
        shared = [
            index
            for index in range(first, min(needed, len(holding.blocks)))
            if self.references[holding.blocks[index]] > 1
        ]
        missing = max(0, needed - len(holding.blocks))
        if missing + len(shared) > self.room_to_grow():
            return None
        fresh = self.take(missing + len(shared))
        copies = []
        for index, block in zip(shared, fresh, strict=False):
            copies.append(BlockCopy(holding.blocks[index], block))
            self.drop(holding.blocks[index])
            holding.blocks[index] = block
        holding.blocks += fresh[len(shared) :]
        return tuple(copies)

    def room_to_grow(self) -> int:
        """Blocks that a running request may take."""
        return self.available()

    def on_device(self, request_id: str) -> Holding:
        """What a request holds. Raises KeyError if that is not device blocks."""
        holding = self.holdings[request_id]
        if holding.host:
            raise KeyError(request_id)
        return holding

    # Blocks.

    def take(self, count: int) -> list[int]:
        """Hand out blocks that nobody holds: free ones, then the cached ones in their order."""
        taken = []
        for _ in range(count):
            block = self.free_blocks.pop(0) if self.free_blocks else self.evict()
            self.references[block] = 1
            taken.append(block)
        return taken

    def evict(self) -> int:
        """Make the next cached block unfindable and give it."""
        block = self.cached.pop(0)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """A block can no longer be found, and so neither can those that continue it."""
        salt, tokens = self.keys[block]
        del self.found[self.keys.pop(block)]
        for other, (other_salt, longer) in list(self.keys.items()):
            if other_salt == salt and longer[: len(tokens)] == tokens:
                del self.found[self.keys.pop(other)]
                if other in self.cached:
                    self.cached.remove(other)
                    self.free_blocks.append(other)

    def hold(self, block: int) -> None:
        """One request more holds a block that was found."""
        if self.references[block] == 0:
            self.cached.remove(block)
        self.references[block] += 1

    def drop(self, block: int) -> None:
        """One request less holds a block."""
        self.references[block] -= 1
        if self.references[block] == 0:
            (self.cached if block in self.keys else self.free_blocks).append(block)

    # Prefixes.

    def key(self, token_ids: Sequence[int], index: int, salt: str) -> Key:
        """What the full block at this index is found by."""
        return salt, tuple(token_ids[: (index + 1) * self.config.block_size])

    def chain(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Blocks of the longest cached prefix."""
        blocks: list[int] = []
        if self.config.enable_prefix_caching:
            for index in range(len(token_ids) // self.config.block_size):
                block = self.found.get(self.key(token_ids, index, salt))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def find(
        self, token_ids: Sequence[int], num_tokens: int, salt: str
    ) -> tuple[list[int], int | None]:
        """Blocks that an admission shares, and the one that it copies or None."""
        chain = self.chain(token_ids, salt)
        whole = self.covers_all(chain, token_ids)
        blocks = chain[: num_tokens // self.config.block_size]
        if not whole:
            return blocks, None
        if num_tokens < len(token_ids):
            return blocks, None
        return blocks[:-1], blocks[-1]

    def covers_all(self, chain: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether nothing would be left to compute."""
        return len(chain) * self.config.block_size >= len(token_ids)

    def match_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        chain = self.chain(token_ids, salt)
        if self.covers_all(chain, token_ids):
            return max(0, len(token_ids) - 1)
        return len(chain) * self.config.block_size

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        holding = self.on_device(request_id)
        holding.committed = num_computed_tokens
        self.publish(holding, token_ids, num_computed_tokens // self.config.block_size)

    def publish(self, holding: Holding, token_ids: Sequence[int], count: int) -> None:
        """Make the first blocks of a request findable, each under the first that had its key."""
        if not self.config.enable_prefix_caching:
            return
        for index in range(count):
            key, block = self.key(token_ids, index, holding.salt), holding.blocks[index]
            if key not in self.found and block not in self.keys:
                self.found[key], self.keys[block] = block, key

    def reset_prefix_cache(self) -> bool:
        if self.holdings:
            return False
        self.free_blocks += self.cached
        self.cached, self.keys, self.found = [], {}, {}
        return True

    # The end.

    def free(self, request_id: str) -> None:
        holding = self.holdings.pop(request_id, None)
        if holding is not None:
            self.give_back(holding)
            self.free_host += holding.host

    def give_back(self, holding: Holding) -> None:
        """A request gives up its device blocks, the last one first."""
        for block in reversed(holding.blocks):
            self.drop(block)

    # Forks and swap space.

    def fork(self, parent_id: str, child_id: str) -> None:
        parent = self.on_device(parent_id)
        if child_id in self.holdings:
            raise ValueError(f"request {child_id!r} has blocks already")
        for block in parent.blocks:
            self.references[block] += 1
        self.holdings[child_id] = Holding(parent.salt, list(parent.blocks), [], parent.committed)

    def is_swapped(self, request_id: str) -> bool:
        return request_id in self.holdings and bool(self.holdings[request_id].host)

    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        holding = self.on_device(request_id)
        if len(holding.blocks) > len(self.free_host):
            return None
        host = [self.free_host.pop(0) for _ in holding.blocks]
        copies = tuple(map(BlockCopy, holding.blocks, host))
        self.give_back(holding)
        holding.blocks, holding.host = [], host
        return copies

    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        holding = self.holdings[request_id]
        if not holding.host:
            raise KeyError(request_id)
        if len(holding.host) > self.available():
            return None
        holding.blocks = self.take(len(holding.host))
        copies = tuple(map(BlockCopy, holding.host, holding.blocks))
        self.free_host += holding.host
        holding.host = []
        return copies

    # What can be asked.

    def block_table(self, request_id: str) -> BlockTable:
        table = np.array(self.on_device(request_id).blocks, dtype=np.int32)
        table.flags.writeable = False
        return table

    def usage(self) -> BlockUsage:
        config, free, cached = self.config, len(self.free_blocks), len(self.cached)
        return BlockUsage(
            total=config.num_blocks,
            used=config.num_blocks - free - cached,
            cached=cached,
            free=free,
            host_total=config.num_host_blocks,
            host_used=config.num_host_blocks - len(self.free_host),
        )

    def largest_request(self) -> int:
        slots = self.config.num_blocks * self.config.block_size
        if self.config.max_model_len <= slots:
            return self.config.max_model_len
        return slots - self.config.num_lookahead_tokens

    def reclaimable(self, request_id: str) -> int:
        return sum(self.references[block] == 1 for block in self.holdings[request_id].blocks)

    def prefix_stats(self) -> PrefixStats:
        return self.stats
