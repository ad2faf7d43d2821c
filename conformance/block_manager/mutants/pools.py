"""Mutants of swap space."""

from __future__ import annotations

from ....core.block_manager import BlockCopy
from ..plain_manager import PlainBlockManager
from .registry import mutant


@mutant("swap_in_leaks_host_blocks", "A request that comes back keeps its host blocks.")
class _SwapInLeaksHostBlocks(PlainBlockManager):
    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_in(request_id)
        if copies:
            del self.free_host[-len(copies) :]
        return copies


@mutant(
    "free_leaks_host_blocks",
    "A request that ends while it is swapped out keeps its host blocks.",
    ("lmdeploy#1788",),
)
class _FreeLeaksHostBlocks(PlainBlockManager):
    def free(self, request_id: str) -> None:
        if self.is_swapped(request_id):
            self.holdings.pop(request_id)
        super().free(request_id)


@mutant("swap_out_leaks_device_blocks", "A swapped request keeps one of its device blocks.")
class _SwapOutLeaksDeviceBlocks(PlainBlockManager):
    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        before = list(self.holdings[request_id].blocks) if request_id in self.holdings else []
        copies = super().swap_out(request_id)
        if copies and before[-1] in self.free_blocks:
            self.free_blocks.remove(before[-1])
            self.references[before[-1]] = 1
        return copies


@mutant("swap_in_returns_blocks_of_another", "A request comes back with another's host blocks.")
class _SwapInReturnsBlocksOfAnother(PlainBlockManager):
    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_in(request_id)
        others = [block for one in self.holdings.values() for block in one.host]
        if not copies or not others:
            return copies
        return (BlockCopy(others[0], copies[0].destination), *copies[1:])


@mutant("swap_in_in_reverse", "Blocks come back in another order than they left.")
class _SwapInInReverse(PlainBlockManager):
    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_in(request_id)
        if copies:
            self.holdings[request_id].blocks.reverse()
        return copies


@mutant("swap_moves_full_blocks_only", "The last block is not copied to the host.")
class _SwapMovesFullBlocksOnly(PlainBlockManager):
    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_out(request_id)
        return copies[:-1] if copies and len(copies) > 1 else copies


@mutant(
    "swap_out_frees_shared_blocks",
    "Swapping out frees blocks that other requests hold.",
    ("vllm#1556",),
)
class _SwapOutFreesSharedBlocks(PlainBlockManager):
    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        holding = self.on_device(request_id)
        if len(holding.blocks) <= len(self.free_host):
            for block in holding.blocks:
                self.references[block] = 1
        return super().swap_out(request_id)


@mutant("swap_in_keeps_the_watermark", "A request comes back only if the watermark stays free.")
class _SwapInKeepsTheWatermark(PlainBlockManager):
    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        holding = self.holdings[request_id]
        if holding.host and len(holding.host) > self.available() - self.kept_free():
            return None
        return super().swap_in(request_id)


@mutant(
    "swap_out_without_room_raises",
    "A full host pool raises instead of returning None.",
    ("vllm#787",),
)
class _SwapOutWithoutRoomRaises(PlainBlockManager):
    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_out(request_id)
        if copies is None:
            raise RuntimeError("swap space is full")
        return copies


@mutant("host_pool_taken_then_refused", "Swapping out without room loses the room there was.")
class _HostPoolTakenThenRefused(PlainBlockManager):
    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_out(request_id)
        if copies is None and self.free_host:
            self.free_host.pop()
        return copies


@mutant("swapped_request_still_has_a_table", "A request on the host shows its old block table.")
class _SwappedRequestStillHasATable(PlainBlockManager):
    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        copies = super().swap_out(request_id)
        if copies is not None:
            self.old = {**getattr(self, "old", {}), request_id: [one.source for one in copies]}
        return copies

    def on_device(self, request_id: str):  # type: ignore[no-untyped-def]
        holding = self.holdings[request_id]
        if holding.host and request_id in getattr(self, "old", {}):
            return holding
        return super().on_device(request_id)
