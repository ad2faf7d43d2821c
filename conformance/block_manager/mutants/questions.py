"""Mutants of what can be asked, and of what is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ....core.block_manager import BlockManagerConfig, BlockTable, BlockUsage
from ....core.options import PartOptions
from ..plain_manager import PlainBlockManager
from .registry import mutant


@mutant(
    "probe_touches_the_order_of_eviction",
    "match_prefix counts as a use of the blocks that it finds.",
)
class _ProbeTouchesTheOrder(PlainBlockManager):
    def match_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        for block in reversed(self.chain(token_ids, salt)):
            if block in self.cached:
                self.cached.remove(block)
                self.cached.append(block)
        return super().match_prefix(token_ids, salt=salt)


@mutant("probe_counted_in_statistics", "match_prefix counts as a query and a hit.")
class _ProbeCountedInStatistics(PlainBlockManager):
    def match_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        hit = super().match_prefix(token_ids, salt=salt)
        self.count(len(token_ids), hit)
        return hit


@mutant("shared_blocks_counted_twice", "usage() counts a shared block once for each holder.")
class _SharedBlocksCountedTwice(PlainBlockManager):
    def usage(self) -> BlockUsage:
        usage = super().usage()
        used = sum(self.references)
        return replace(usage, used=min(used, usage.total), free=max(0, usage.total - used))


@mutant("cached_blocks_counted_as_used", "usage() says that cached blocks are used.")
class _CachedBlocksCountedAsUsed(PlainBlockManager):
    def usage(self) -> BlockUsage:
        usage = super().usage()
        return replace(usage, used=usage.used + usage.cached, cached=0)


@mutant("cached_blocks_counted_as_free", "usage() does not tell cached blocks from free ones.")
class _CachedBlocksCountedAsFree(PlainBlockManager):
    def usage(self) -> BlockUsage:
        usage = super().usage()
        return replace(usage, free=usage.free + usage.cached, cached=0)


@mutant("host_blocks_not_counted", "usage() says nothing about the host.")
class _HostBlocksNotCounted(PlainBlockManager):
    def usage(self) -> BlockUsage:
        return replace(super().usage(), host_used=0)


@mutant("reclaimable_counts_shared_blocks", "reclaimable counts blocks that others hold too.")
class _ReclaimableCountsSharedBlocks(PlainBlockManager):
    def reclaimable(self, request_id: str) -> int:
        return len(self.holdings[request_id].blocks)


@mutant("largest_request_ignores_lookahead", "largest_request promises the lookahead's slots.")
class _LargestRequestIgnoresLookahead(PlainBlockManager):
    def largest_request(self) -> int:
        return self.config.num_blocks * self.config.block_size


@mutant("largest_request_keeps_the_watermark", "largest_request leaves the watermark out.")
class _LargestRequestKeepsTheWatermark(PlainBlockManager):
    def largest_request(self) -> int:
        usable = self.config.num_blocks - self.config.watermark_blocks
        return min(super().largest_request(), usable * self.config.block_size)


@mutant("one_buffer_for_all_tables", "Asking for a table overwrites the one given before.")
class _OneBufferForAllTables(PlainBlockManager):
    buffer: NDArray[np.int32] | None = None

    def block_table(self, request_id: str) -> BlockTable:
        table = super().block_table(request_id)
        if self.buffer is None:
            self.buffer = np.zeros(self.config.num_blocks, np.int32)
        self.buffer[: len(table)] = table
        view = self.buffer[: len(table)]
        view.flags.writeable = False
        return view


@mutant("table_of_int64", "Block tables are int64.")
class _TableOfInt64(PlainBlockManager):
    def block_table(self, request_id: str) -> BlockTable:
        table = super().block_table(request_id).astype(np.int64)
        table.flags.writeable = False
        return table  # type: ignore[return-value]


@mutant("undeclared_power_is_silent", "reset_prefix_cache does nothing where nothing is cached.")
class _UndeclaredPowerIsSilent(PlainBlockManager):
    powers: ClassVar[frozenset[str]] = frozenset({"fork", "swap", "lookahead"})

    def reset_prefix_cache(self) -> bool:
        return True


@mutant("undeclared_setting_is_ignored", "Swap space is asked for and quietly not there.")
class _UndeclaredSettingIsIgnored(PlainBlockManager):
    powers: ClassVar[frozenset[str]] = frozenset({"fork", "prefix_caching"})

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        super().__init__(replace(config, num_host_blocks=0, num_lookahead_tokens=0), options)

    def swap_out(self, request_id: str) -> None:
        raise self._refusal("swap")

    def swap_in(self, request_id: str) -> None:
        raise self._refusal("swap")
