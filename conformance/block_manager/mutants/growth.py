"""Mutants of ``append``, ``fork`` and ``free``."""

from __future__ import annotations

from ....core.block_manager import BlockCopy
from ..plain_manager import Holding, PlainBlockManager
from .registry import mutant


@mutant("watermark_kept_for_growth", "Running requests may not use the watermark's blocks.")
class _WatermarkKeptForGrowth(PlainBlockManager):
    def room_to_grow(self) -> int:
        return self.available() - self.config.watermark_blocks


@mutant("growth_does_not_evict", "Running requests get free blocks only, never cached ones.")
class _GrowthDoesNotEvict(PlainBlockManager):
    def room_to_grow(self) -> int:
        return len(self.free_blocks)


@mutant(
    "edge_of_a_block_counted_twice",
    "A request whose tokens end with a block is taken to have room for one more.",
    ("nano-vllm#66",),
)
class _EdgeOfABlockCountedTwice(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        if num_tokens % self.config.block_size == 1:
            num_tokens -= 1
        return super().append(request_id, num_tokens)


@mutant("append_takes_then_fails", "append without room keeps the blocks that there were.")
class _AppendTakesThenFails(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        copies = super().append(request_id, num_tokens)
        if copies is None and self.available():
            self.on_device(request_id).blocks += self.take(1)
        return copies


@mutant("append_without_room_raises", "append without room raises instead of returning None.")
class _AppendWithoutRoomRaises(PlainBlockManager):
    def room_to_grow(self) -> int:
        return self.config.num_blocks


@mutant("lookahead_ignored", "No slots are kept for the drafts of speculative decoding.")
class _LookaheadIgnored(PlainBlockManager):
    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)


@mutant(
    "lookahead_past_the_model_length",
    "Slots for drafts are reserved where no token can ever be.",
)
class _LookaheadPastTheModelLength(PlainBlockManager):
    def blocks_for(self, num_tokens: int) -> int:
        return -(-(num_tokens + self.config.num_lookahead_tokens) // self.config.block_size)


@mutant("append_reorders_the_table", "New blocks are put in front.")
class _AppendReordersTheTable(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        copies = super().append(request_id, num_tokens)
        if copies is not None:
            self.on_device(request_id).blocks.sort()
        return copies


@mutant("copy_on_write_forgotten", "A shared tail is written in place.")
class _CopyOnWriteForgotten(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        references = self.references
        self.references = [min(count, 1) for count in references]
        copies = super().append(request_id, num_tokens)
        self.references = [max(pair) for pair in zip(references, self.references, strict=True)]
        return copies


@mutant("copy_on_write_of_the_last_only", "Of several shared blocks only the last is copied.")
class _CopyOnWriteOfTheLastOnly(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        holding = self.on_device(request_id)
        committed = holding.committed
        last = (len(holding.blocks) - 1) * self.config.block_size
        holding.committed = max(committed, last)
        copies = super().append(request_id, num_tokens)
        holding.committed = committed
        return copies


@mutant(
    "copy_on_write_short_of_the_lookahead",
    "Blocks that hold the slots of drafts stay shared after a fork.",
)
class _CopyOnWriteShortOfTheLookahead(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        tail = -(-num_tokens // self.config.block_size)
        references, holding = list(self.references), self.on_device(request_id)
        for block in holding.blocks[tail:]:
            self.references[block] = 1
        copies = super().append(request_id, num_tokens)
        for block in holding.blocks[tail:]:
            self.references[block] = max(references[block], 1)
        return copies


@mutant("fork_forgets_what_is_committed", "A fork copies blocks that are never written again.")
class _ForkForgetsWhatIsCommitted(PlainBlockManager):
    def fork(self, parent_id: str, child_id: str) -> None:
        super().fork(parent_id, child_id)
        self.holdings[child_id].committed = 0


@mutant("copy_turned_round", "Source and destination of a copy are exchanged.")
class _CopyTurnedRound(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        copies = super().append(request_id, num_tokens)
        if not copies:
            return copies
        return tuple(BlockCopy(one.destination, one.source) for one in copies)


@mutant("copy_not_told", "A block is replaced by a private one, and nobody is told to copy.")
class _CopyNotTold(PlainBlockManager):
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        copies = super().append(request_id, num_tokens)
        return () if copies else copies


@mutant("fork_copies_at_once", "A fork gets new blocks, and keys that nobody copied.")
class _ForkCopiesAtOnce(PlainBlockManager):
    def fork(self, parent_id: str, child_id: str) -> None:
        super().fork(parent_id, child_id)
        child = self.holdings[child_id]
        if self.available() >= len(child.blocks):
            self.give_back(child)
            child.blocks = self.take(len(child.blocks))


@mutant("fork_not_counted", "A fork shares the blocks without counting as a holder.")
class _ForkNotCounted(PlainBlockManager):
    def fork(self, parent_id: str, child_id: str) -> None:
        super().fork(parent_id, child_id)
        self.give_back(self.holdings[child_id])


@mutant("fork_forgets_the_salt", "The fork of a request goes on without its salt.")
class _ForkForgetsTheSalt(PlainBlockManager):
    def fork(self, parent_id: str, child_id: str) -> None:
        super().fork(parent_id, child_id)
        self.holdings[child_id].salt = ""


@mutant("fork_tail_shared_table", "Parent and child have one table: what grows one grows both.")
class _ForkTailSharedTable(PlainBlockManager):
    def fork(self, parent_id: str, child_id: str) -> None:
        super().fork(parent_id, child_id)
        self.holdings[child_id].blocks = self.holdings[parent_id].blocks


@mutant("fork_of_a_living_child", "Forking to an id in use loses that request's blocks.")
class _ForkOfALivingChild(PlainBlockManager):
    def fork(self, parent_id: str, child_id: str) -> None:
        if child_id != parent_id:
            self.holdings.pop(child_id, None)
        super().fork(parent_id, child_id)


@mutant(
    "leak_on_free",
    "The last of several blocks is not given back.",
    ("lmdeploy#1788",),
)
class _LeakOnFree(PlainBlockManager):
    def give_back(self, holding: Holding) -> None:
        if len(holding.blocks) > 1:
            holding.blocks.pop()
        super().give_back(holding)


@mutant(
    "leak_that_counts_hide",
    "A block is lost with every third request; usage() computes as if it were not.",
)
class _LeakThatCountsHide(PlainBlockManager):
    freed = 0

    def take(self, count: int) -> list[int]:
        self.free_blocks = [one for one in self.free_blocks if one >= 0]
        return super().take(count)

    def free(self, request_id: str) -> None:
        super().free(request_id)
        self.freed += 1
        if self.freed % 3 == 0 and len(self.free_blocks) > 1:
            self.free_blocks[-1] = -1


@mutant(
    "shared_block_freed_with_its_first_holder",
    "A block that others hold goes to the free list.",
    ("vllm#1556",),
)
class _SharedBlockFreed(PlainBlockManager):
    def drop(self, block: int) -> None:
        self.references[block] = min(self.references[block], 1)
        super().drop(block)


@mutant(
    "freed_twice",
    "Freeing a request once more puts its blocks on the free list again.",
    ("vllm#3347",),
)
class _FreedTwice(PlainBlockManager):
    last: tuple[str, tuple[int, ...]] = ("", ())

    def free(self, request_id: str) -> None:
        holding = self.holdings.get(request_id)
        if holding is not None:
            self.last = request_id, tuple(holding.blocks)
        elif self.last[0] == request_id:
            self.free_blocks += self.last[1]
        super().free(request_id)


@mutant("free_of_an_unknown_request_raises", "Freeing a request without blocks is an error.")
class _FreeOfAnUnknownRequestRaises(PlainBlockManager):
    def free(self, request_id: str) -> None:
        if request_id not in self.holdings:
            raise KeyError(request_id)
        super().free(request_id)
