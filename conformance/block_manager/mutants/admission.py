"""Mutants of ``can_allocate`` and ``allocate``."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.block_manager import Allocation, AllocationStatus, BlockTable
from ..plain_manager import PlainBlockManager
from .registry import mutant


@mutant("watermark_ignored", "Admissions take the last blocks, and nobody can grow.")
class _WatermarkIgnored(PlainBlockManager):
    def kept_free(self) -> int:
        return 0


@mutant(
    "watermark_in_an_empty_pool",
    "A request that needs nearly all blocks waits for ever, since the watermark is kept alone too.",
)
class _WatermarkInAnEmptyPool(PlainBlockManager):
    def kept_free(self) -> int:
        return self.config.watermark_blocks


@mutant("watermark_counts_free_blocks_only", "Cached blocks are not counted as available.")
class _WatermarkCountsFreeBlocksOnly(PlainBlockManager):
    def admits(self, needed: int, hits: Sequence[int]) -> bool:
        return needed <= len(self.free_blocks) - self.kept_free()


@mutant(
    "allocate_takes_then_fails",
    "An admission that is refused keeps the free blocks that it had taken.",
)
class _AllocateTakesThenFails(PlainBlockManager):
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        got = super().allocate(request_id, token_ids, num_tokens, salt=salt)
        if got is None and self.free_blocks:
            self.references[self.free_blocks.pop()] = 1
        return got


@mutant(
    "free_list_turned_by_a_refusal",
    "A refused admission gives blocks back in another order than it took them.",
)
class _FreeListTurnedByARefusal(PlainBlockManager):
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        got = super().allocate(request_id, token_ids, num_tokens, salt=salt)
        if got is None:
            self.free_blocks.reverse()
        return got


@mutant(
    "refused_hits_stay_held",
    "A refused admission keeps its hold on the blocks it had found.",
    ("sglang#12693",),
)
class _RefusedHitsStayHeld(PlainBlockManager):
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        got = super().allocate(request_id, token_ids, num_tokens, salt=salt)
        if got is None:
            for block in self.find(token_ids, num_tokens, salt)[0]:
                self.hold(block)
        return got


@mutant("refusal_counted_in_statistics", "A refused admission is counted among the queries.")
class _RefusalCountedInStatistics(PlainBlockManager):
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        got = super().allocate(request_id, token_ids, num_tokens, salt=salt)
        if got is None:
            self.count(len(token_ids), 0)
        return got


@mutant("ok_then_refused", "can_allocate counts the blocks of a hit twice, as found and as free.")
class _OkThenRefused(PlainBlockManager):
    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        status = super().can_allocate(token_ids, num_tokens, salt=salt)
        hits, _ = self.find(token_ids, num_tokens, salt)
        needed = self.blocks_for(num_tokens) - len(hits)
        if status is AllocationStatus.LATER and needed <= self.available() - self.kept_free():
            return AllocationStatus.OK
        return status


@mutant("later_then_admitted", "can_allocate does not look for cached prefixes.")
class _LaterThenAdmitted(PlainBlockManager):
    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        status = super().can_allocate(token_ids, num_tokens, salt=salt)
        if status is AllocationStatus.OK and not self.admits(self.blocks_for(num_tokens), ()):
            return AllocationStatus.LATER
        return status


@mutant(
    "never_for_what_fits_alone",
    "A request as large as the pool is refused for ever.",
    ("vllm#35541",),
)
class _NeverForWhatFitsAlone(PlainBlockManager):
    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        if self.blocks_for(num_tokens) >= self.config.num_blocks:
            return AllocationStatus.NEVER
        return super().can_allocate(token_ids, num_tokens, salt=salt)


@mutant(
    "later_for_what_never_fits",
    "A request larger than the pool is told to wait.",
    ("vllm#35541",),
)
class _LaterForWhatNeverFits(PlainBlockManager):
    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        status = super().can_allocate(token_ids, num_tokens, salt=salt)
        return AllocationStatus.LATER if status is AllocationStatus.NEVER else status


@mutant(
    "second_admission_overwrites_the_first",
    "An id that is in use is admitted again, and the first request's blocks are lost.",
    ("vllm#10583",),
)
class _SecondAdmissionOverwritesTheFirst(PlainBlockManager):
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        self.holdings.pop(request_id, None)
        return super().allocate(request_id, token_ids, num_tokens, salt=salt)


@mutant("range_not_checked", "num_tokens above the tokens of the request is taken as it is.")
class _RangeNotChecked(PlainBlockManager):
    def check_range(self, token_ids: Sequence[int], num_tokens: int) -> None:
        if num_tokens < 1:
            super().check_range(token_ids, num_tokens)


@mutant("partial_block_forgotten", "Blocks are counted by whole ones; the rest has no slots.")
class _PartialBlockForgotten(PlainBlockManager):
    def blocks_for(self, num_tokens: int) -> int:
        return max(1, num_tokens // self.config.block_size)


@mutant("one_block_in_two_tables", "A block is handed out and stays on the free list.")
class _OneBlockInTwoTables(PlainBlockManager):
    def take(self, count: int) -> list[int]:
        taken = super().take(count)
        if count == 2:
            self.free_blocks.append(taken[0])
        return taken


@mutant("ids_depend_on_hash_order", "Free blocks are chosen by the hash of the request's id.")
class _IdsDependOnHashOrder(PlainBlockManager):
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        got = super().allocate(request_id, token_ids, num_tokens, salt=salt)
        if got is not None and len(self.free_blocks) > 1 and hash(request_id) % 2:
            self.free_blocks.append(self.free_blocks.pop(0))
        return got


@mutant("ids_depend_on_other_managers", "Each new manager begins with another block.")
class _IdsDependOnOtherManagers(PlainBlockManager):
    built = 0

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        if not self.holdings and not self.cached and len(self.free_blocks) > 1:
            type(self).built += 1
            self.free_blocks.sort()
            if type(self).built % 3 == 0:
                self.free_blocks.append(self.free_blocks.pop(0))
        return super().allocate(request_id, token_ids, num_tokens, salt=salt)


@mutant("table_can_be_written", "The caller can change a table in place.")
class _TableCanBeWritten(PlainBlockManager):
    def block_table(self, request_id: str) -> BlockTable:
        return super().block_table(request_id).copy()
