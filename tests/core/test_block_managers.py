"""The block managers that share blocks, against a plain model, and broken ones that it catches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from support.block_manager_machine import BlockManagerMachine
from support.block_manager_walk import random_walk

from jackfield.core.block_manager import AllocationStatus, BlockCopy
from jackfield.core.block_managers import hash_index
from jackfield.core.block_managers.block_table import GrowingTable
from jackfield.core.block_managers.eviction import (
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    PinnedLast,
)
from jackfield.core.block_managers.hash_index import HashIndex
from jackfield.core.block_managers.holding import Holding
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.prefix_cache import PrefixCache
from jackfield.core.block_managers.prefix_index import PinTree, PrefixBlock, PrefixIndex
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.block_managers.radix_index import RadixIndex

NUM_WALKS = 150
MUTANT_WALKS = 400  # it stops at the first one that catches the mutant


class PagedMachine(BlockManagerMachine):
    """With chained hashes."""

    manager_class = PagedBlockManager


class RadixMachine(BlockManagerMachine):
    """With a tree of tokens."""

    manager_class = RadixBlockManager


TestPagedMachine = PagedMachine.TestCase
TestRadixMachine = RadixMachine.TestCase
TestPagedMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestRadixMachine.settings = TestPagedMachine.settings


@pytest.mark.parametrize("machine_class", [PagedMachine, RadixMachine])
def test_random_walks_through_crowded_worlds(machine_class: type[BlockManagerMachine]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        machine = machine_class()
        random_walk(machine, seed, num_steps=120)
        for (method, *_), result in zip(machine.log, machine.results, strict=True):
            seen[f"{method} {'nothing' if result is None else 'something'}"] += 1
            if method == "allocate" and result is not None:
                seen["hits"] += result.num_cached_tokens > 0
                seen["private copies"] += len(result.copies)
            elif method == "append" and result is not None:
                seen["copies on write"] += len(result)
            elif result is AllocationStatus.NEVER:
                seen["never"] += 1
    common = ["hits", "copies on write", "never", "fork nothing"]
    common += [
        f"{method} {outcome}"
        for method in ("allocate", "append", "swap_out", "swap_in")
        for outcome in ("nothing", "something")
    ]
    assert min(seen[event] for event in common) > 30, seen
    assert seen["private copies"] > 3, seen


class LeaksOnFree(PagedBlockManager):
    """Loses a block of every request that is freed."""

    def free(self, request_id: str) -> None:
        super().free(request_id)
        if len(self._free) > 1:
            self._free.pop()


class GivesTwice(PagedBlockManager):
    """Hands a block out and keeps it on the list."""

    def _take(self, num_blocks: int) -> list[int]:
        taken = super()._take(num_blocks)
        if num_blocks == 2:
            self._free.append(taken[0])
        return taken


class DoubleFree(PagedBlockManager):
    """Gives blocks back once more when a request is freed again."""

    last: Sequence[int] = ()

    def free(self, request_id: str) -> None:
        if request_id in self._holdings:
            table = self._holdings[request_id].table
            self.last = table.ids() if table is not None else ()
            super().free(request_id)
        else:
            self._free.extend(self.last)


class AdmitsBelowTheWatermark(PagedBlockManager):
    """Admits down to the last block."""

    def _admits(self, num_blocks: int) -> bool:
        return num_blocks <= self._num_available()


class KeepsTheWatermarkFromDecodes(PagedBlockManager):
    """Lets nobody grow into the reserve."""

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        if self._num_available() < self.config.watermark_blocks:
            self._on_device(request_id)
            return None
        return super().append(request_id, num_tokens)


class TakesBeforeItLooks(PagedBlockManager):
    """Keeps what there is when there is not enough."""

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        copies = super().append(request_id, num_tokens)
        if copies is None and self._free:
            self._on_device(request_id)[1].extend(self._take(1))
        return copies


class ForgetsTheLookahead(PagedBlockManager):
    """Reserves at admission what is asked for and no more."""

    def _blocks_for(self, token_ids: Sequence[int], num_tokens: int) -> int:
        super()._blocks_for(token_ids, num_tokens)
        return -(-num_tokens // self._block_size)


class WritesSharedBlocks(PagedBlockManager):
    """Has no copy-on-write."""

    def _shared_places(self, holding: Holding, table: GrowingTable, wanted: int) -> list[int]:
        return []


class CopiesTooLate(PagedBlockManager):
    """Takes the block being written to for a full one."""

    def _shared_places(self, holding: Holding, table: GrowingTable, wanted: int) -> list[int]:
        first = -(-holding.num_computed // self._block_size)
        return [p for p in super()._shared_places(holding, table, wanted) if p >= first]


class CoversTheLastToken(PagedBlockManager):
    """Shares all blocks of a request that is cached whole."""

    def _find(
        self, token_ids: Sequence[int], num_tokens: int, salt: str
    ) -> tuple[list[PrefixBlock], PrefixBlock | None]:
        hits, whole = super()._find(token_ids, num_tokens, salt)
        return ([*hits, whole], None) if whole is not None else (hits, None)


class CountsProbes(PagedBlockManager):
    """A probe counts as use."""

    def match_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        for block in self._find(token_ids, len(token_ids), salt)[0]:
            block.num_hits += 1
            self._num_hits += 1
        return super().match_prefix(token_ids, salt=salt)


class ReclaimsSharedBlocks(PagedBlockManager):
    """Counts blocks that others hold too as reclaimable."""

    def reclaimable(self, request_id: str) -> int:
        table = self._holdings[request_id].table
        return 0 if table is None else table.count


class ResetsInUse(PagedBlockManager):
    """Says that it has reset the cache while requests hold blocks."""

    def reset_prefix_cache(self) -> bool:
        super().reset_prefix_cache()
        return True


class SwapsInBackwards(PagedBlockManager):
    """Copies blocks back in the wrong order."""

    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_in(request_id)
        if copies is None:
            return None
        targets = reversed([copy.destination for copy in copies])
        return tuple(BlockCopy(c.source, target) for c, target in zip(copies, targets, strict=True))


class LosesHostBlocks(PagedBlockManager):
    """Forgets the host blocks of a swapped request that ends."""

    def free(self, request_id: str) -> None:
        if self.is_swapped(request_id):
            self._holdings[request_id].host_blocks = []
        super().free(request_id)


class ForkForgetsCounts(PagedBlockManager):
    """Does not count the child as a holder of the last block."""

    def fork(self, parent_id: str, child_id: str) -> None:
        super().fork(parent_id, child_id)
        self._num_tables[self._on_device(child_id)[1].ids()[-1]] -= 1


class OneSaltForAll(PagedBlockManager):
    """Ignores salts."""

    def _make_index(self, pins: PinTree) -> PrefixIndex:
        class Saltless(HashIndex):
            def find(self, token_ids: Sequence[int], limit: int, salt: str) -> list[PrefixBlock]:
                return super().find(token_ids, limit, "")

            def extend(
                self, parent: PrefixBlock | None, salt: str, key: bytes, block_id: int
            ) -> PrefixBlock:
                return super().extend(parent, "", key, block_id)

        return Saltless(self.config.block_size, pins)


class SplitsNoEdges(RadixBlockManager):
    """Lets a branch begin at the end of an edge, wherever it leaves it."""

    def _make_index(self, pins: PinTree) -> PrefixIndex:
        class Unsplit(RadixIndex):
            def find(self, token_ids: Sequence[int], limit: int, salt: str) -> list[PrefixBlock]:
                found = super().find(token_ids, limit, salt)
                return found[: len(found) - len(found) % 2]

        return Unsplit(self.config.block_size, pins)


MUTANTS = [
    LeaksOnFree,
    GivesTwice,
    DoubleFree,
    AdmitsBelowTheWatermark,
    KeepsTheWatermarkFromDecodes,
    TakesBeforeItLooks,
    ForgetsTheLookahead,
    WritesSharedBlocks,
    CopiesTooLate,
    CoversTheLastToken,
    CountsProbes,
    ReclaimsSharedBlocks,
    ResetsInUse,
    SwapsInBackwards,
    LosesHostBlocks,
    ForkForgetsCounts,
    OneSaltForAll,
    SplitsNoEdges,
]


def hunt(manager_class: type[Any]) -> None:
    machine_class = type("Mutant", (BlockManagerMachine,), {"manager_class": manager_class})

    def walk() -> None:
        for seed in range(MUTANT_WALKS):
            random_walk(machine_class(), seed, num_steps=120)

    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError)):
        walk()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_catches_a_broken_manager(mutant: type[Any]) -> None:
    hunt(mutant)


def release_anywhere(cache: PrefixCache, block_id: int) -> bool:
    """Makes a released block a candidate for eviction, whatever children it has."""
    stays = PROPER_RELEASE(cache, block_id)
    if stays:
        block = cache._by_id[block_id]
        assert block is not None
        cache._queue.add(block)
    return stays


def release_without_duplicates(cache: PrefixCache, block_id: int) -> bool:
    """Caches a block although requests hold another one with the same contents."""
    block = cache._by_id[block_id]
    if block is not None:
        block.duplicates.clear()
    return PROPER_RELEASE(cache, block_id)


PROPER_RELEASE = PrefixCache.release
LOWEST_RANK = LeastRecentlyUsed.rank


@pytest.mark.parametrize(
    ("target", "name", "replacement"),
    [
        (hash_index, "chained_digest", lambda parent, key: b"same"),
        (hash_index, "chained_digest", lambda parent, key: key),
        (hash_index, "chained_digest", lambda parent, key: parent + key[:8]),
        (HashIndex, "remove", lambda index, block: None),
        (PrefixCache, "release", release_anywhere),
        (PrefixCache, "release", release_without_duplicates),
        (PrefixCache, "advance", lambda cache: None),
        (LeastRecentlyUsed, "rank", lambda policy, block: (-block.last_used, -block.depth)),
        (LeastFrequentlyUsed, "rank", LOWEST_RANK),
        (FirstInFirstOut, "rank", LOWEST_RANK),
        (PinnedLast, "rank", LOWEST_RANK),
    ],
)
def test_the_model_catches_a_broken_part(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, replacement: Any
) -> None:
    monkeypatch.setattr(target, name, replacement)
    hunt(PagedBlockManager)
