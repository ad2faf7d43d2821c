"""What block managers that share blocks have in common: everything but how prefixes are found.

Paged KV cache as in https://arxiv.org/abs/2309.06180: a request owns as many blocks as its tokens
need and at most ``block_size - 1`` slots are wasted, in its last block. Each device block has a
reference count, the number of block tables it stands in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ..block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
    PrefixStats,
    check_num_tokens,
)
from ..errors import ConfigError
from ..options import PartOptions
from .block_table import GrowingTable
from .eviction import EVICTION_POLICIES, EvictionPolicy, PinnedLast
from .holding import Holding
from .prefix_cache import PrefixCache
from .prefix_index import PinTree, PrefixBlock, PrefixIndex, pin_tree


class SharingOptions(PartOptions):
    """Options of the block managers that share blocks; all need ``enable_prefix_caching``."""

    eviction: Literal["lru", "lfu", "fifo"] = Field(
        default="lru",
        description="Which cached block gives way first: the least recently used, the least "
        "frequently used, or the one computed first. Blocks deeper in a prefix always go before "
        "those they follow.",
    )
    pinned_prefixes: tuple[tuple[int, ...], ...] = Field(
        default=(),
        description="Token ids of prefixes whose full blocks are evicted only when nothing else "
        "is left; of requests without salt.",
    )


class SharingBlockManager(BlockManager):
    """Gives each request the blocks that its tokens need, shared ones as far as there are any.

    The block freed last is handed out first; cached blocks are evicted when no free one is left.
    Admissions leave ``watermark * num_blocks`` blocks available, rounded down, unless no request
    holds any: an empty pool admits whatever fits, or a request that needs nearly all of it would
    wait for ever.

    Raises:
        ConfigError: options of prefix caching are set without ``enable_prefix_caching``, or a
            pinned prefix fills no block.
    """

    Options: ClassVar[type[PartOptions]] = SharingOptions
    powers: ClassVar[frozenset[str]] = frozenset({"prefix_caching", "fork", "swap", "lookahead"})

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        super().__init__(config, options)
        self._block_size = config.block_size
        self._free = list(range(config.num_blocks - 1, -1, -1))  # the next one stands last
        self._num_tables = [0] * config.num_blocks
        self._host_free = list(range(config.num_host_blocks - 1, -1, -1))
        self._holdings: dict[str, Holding] = {}
        self._num_queried = 0
        self._num_hits = 0
        chosen = self._checked_options()
        pins = pin_tree(chosen.pinned_prefixes, config.block_size)
        policy = self.make_eviction_policy(chosen)
        self._cache = PrefixCache(
            self._make_index(pins), PinnedLast(policy) if pins else policy, config.num_blocks
        )
        self._caches_prefixes = config.enable_prefix_caching

    @abstractmethod
    def _make_index(self, pins: PinTree) -> PrefixIndex:
        """How this manager finds prefixes."""

    def make_eviction_policy(self, options: SharingOptions) -> EvictionPolicy:
        """The order of eviction; a subclass may have one of its own."""
        return EVICTION_POLICIES[options.eviction]()

    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        num_blocks = self._blocks_for(token_ids, num_tokens)
        if num_blocks > self.config.num_blocks:
            return AllocationStatus.NEVER
        hits, _ = self._find(token_ids, num_tokens, salt)
        fits = self._admits(num_blocks - _num_in_use(hits))
        return AllocationStatus.OK if fits else AllocationStatus.LATER

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        self._refuse_if_known(request_id)
        num_blocks = self._blocks_for(token_ids, num_tokens)
        hits, whole = self._find(token_ids, num_tokens, salt)
        if not self._admits(num_blocks - _num_in_use(hits)):
            return None
        self._cache.advance()
        for block in hits:
            self._cache.take(block)
            self._num_tables[block.block_id] += 1
        copies: tuple[BlockCopy, ...] = ()
        source = None if whole is None else whole.block_id
        if whole is not None:
            self._cache.read(whole)
        fresh = self._take(num_blocks - len(hits))
        if source is not None and self._block_size > 1:
            copies = _copy_to_first(source, fresh)
        holding = Holding(GrowingTable([*(block.block_id for block in hits), *fresh]), salt)
        holding.num_registered = len(hits)
        holding.last_registered = hits[-1] if hits else None
        holding.num_computed = self._num_cached(hits, whole, token_ids)
        self._holdings[request_id] = holding
        if self._caches_prefixes:
            self._num_queried += len(token_ids)
            self._num_hits += holding.num_computed
        return Allocation(holding.num_computed, copies)

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        holding, table = self._on_device(request_id)
        wanted = self.config.blocks_for(num_tokens)
        missing = max(wanted - table.count, 0)
        shared = self._shared_places(holding, table, wanted) if holding.forked else []
        if missing + len(shared) > self._num_available():
            return None
        copies: list[BlockCopy] = []
        if shared:
            ids = table.ids()
            for place, block_id in zip(shared, self._take(len(shared)), strict=True):
                copies.append(BlockCopy(ids[place], block_id))
                self._num_tables[ids[place]] -= 1
                table.replace(place, block_id)
        if missing:
            table.extend(self._take(missing))
        return tuple(copies)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """As in the contract.

        Raises:
            KeyError: the request holds no device blocks.
            ValueError: fewer tokens than were committed before, more than the request has slots
                or tokens for.
        """
        holding, table = self._on_device(request_id)
        slots = table.count * self._block_size
        if not holding.num_computed <= num_computed_tokens <= slots:
            raise ValueError(
                f"num_computed_tokens={num_computed_tokens} of request {request_id!r} must be at "
                f"least {holding.num_computed}, which are computed, and at most {slots}, its slots"
            )
        num_full = num_computed_tokens // self._block_size
        if self._caches_prefixes and num_full > holding.num_registered:
            self._register(request_id, holding, table, token_ids, num_full)
        holding.num_computed = num_computed_tokens

    def match_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        hits, whole = self._find(token_ids, len(token_ids), salt)
        return self._num_cached(hits, whole, token_ids)

    def free(self, request_id: str) -> None:
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return
        if holding.table is None:
            self._host_free.extend(reversed(holding.host_blocks))
        else:
            self._release(holding.table)

    def block_table(self, request_id: str) -> BlockTable:
        return self._on_device(request_id)[1].view()

    def usage(self) -> BlockUsage:
        config, free, cached = self.config, len(self._free), self._cache.num_cached
        return BlockUsage(
            total=config.num_blocks,
            used=config.num_blocks - free - cached,
            cached=cached,
            free=free,
            host_total=config.num_host_blocks,
            host_used=config.num_host_blocks - len(self._host_free),
        )

    def largest_request(self) -> int:
        slots = self.config.num_blocks * self._block_size
        if slots >= self.config.max_model_len:
            return slots
        return max(slots - self.config.num_lookahead_tokens, 0)

    def reclaimable(self, request_id: str) -> int:
        table = self._holdings[request_id].table
        if table is None:
            return 0
        return sum(self._num_tables[block_id] == 1 for block_id in table.ids())

    def prefix_stats(self) -> PrefixStats:
        return PrefixStats(self._num_queried, self._num_hits)

    def fork(self, parent_id: str, child_id: str) -> None:
        parent, table = self._on_device(parent_id)
        self._refuse_if_known(child_id)
        ids = table.ids()
        child = Holding(GrowingTable(ids), parent.salt)
        child.num_computed = parent.num_computed
        child.num_registered = parent.num_registered
        child.last_registered = parent.last_registered
        child.forked = parent.forked = True
        for block_id in ids:
            self._num_tables[block_id] += 1
        self._holdings[child_id] = child

    def is_swapped(self, request_id: str) -> bool:
        holding = self._holdings.get(request_id)
        return holding is not None and holding.table is None

    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        holding, table = self._on_device(request_id)
        count = table.count
        if count > len(self._host_free):
            return None
        holding.host_blocks = [self._host_free.pop() for _ in range(count)]
        holding.table = None
        holding.forked = False
        holding.num_registered, holding.last_registered = 0, None
        copies = tuple(map(BlockCopy, table.ids(), holding.host_blocks))
        self._release(table)
        return copies

    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        holding = self._holdings[request_id]
        if holding.table is not None:
            raise KeyError(f"request {request_id!r} is not swapped out")
        host_blocks = holding.host_blocks
        if len(host_blocks) > self._num_available():
            return None
        fresh = self._take(len(host_blocks))
        holding.table = GrowingTable(fresh)
        holding.host_blocks = []
        self._host_free.extend(reversed(host_blocks))
        return tuple(map(BlockCopy, host_blocks, fresh))

    def reset_prefix_cache(self) -> bool:
        if self._holdings:
            return False
        self._free.extend(self._cache.clear())
        return True

    def _find(
        self, token_ids: Sequence[int], num_tokens: int, salt: str
    ) -> tuple[list[PrefixBlock], PrefixBlock | None]:
        """Blocks that a request would share, and the last block of one that is cached whole."""
        if not self._caches_prefixes:
            return [], None
        found = self._cache.find(token_ids, num_tokens // self._block_size, salt)
        if not found or len(found) * self._block_size < len(token_ids):
            return found, None
        return found[:-1], found[-1]

    def _num_cached(
        self, hits: list[PrefixBlock], whole: PrefixBlock | None, token_ids: Sequence[int]
    ) -> int:
        return len(hits) * self._block_size if whole is None else len(token_ids) - 1

    def _register(
        self,
        request_id: str,
        holding: Holding,
        table: GrowingTable,
        token_ids: Sequence[int],
        num_full: int,
    ) -> None:
        """Make the blocks up to ``num_full`` shareable."""
        if num_full * self._block_size > len(token_ids):
            raise ValueError(
                f"{num_full} blocks of request {request_id!r} are computed, but token_ids has "
                f"{len(token_ids)} tokens only"
            )
        start = holding.num_registered
        self._cache.advance()
        holding.last_registered, released = self._cache.register(
            holding.last_registered, holding.salt, token_ids, start, table.ids(start, num_full)
        )
        holding.num_registered = num_full
        self._free.extend(released)

    def _shared_places(self, holding: Holding, table: GrowingTable, wanted: int) -> list[int]:
        """Which blocks up to ``wanted`` the request may write to and others hold too."""
        first = holding.num_computed // self._block_size
        ids = table.ids(first, wanted)
        return [first + i for i, block_id in enumerate(ids) if self._num_tables[block_id] > 1]

    def _release(self, table: GrowingTable) -> None:
        """Take the blocks of a table from its request."""
        self._cache.advance()
        for block_id in reversed(table.ids()):
            self._num_tables[block_id] -= 1
            if self._num_tables[block_id] == 0 and not self._cache.release(block_id):
                self._free.append(block_id)

    def _take(self, num_blocks: int) -> list[int]:
        """Blocks for one request alone; as many must be available."""
        from_free = min(num_blocks, len(self._free))
        taken = [self._free.pop() for _ in range(from_free)]
        taken.extend(self._cache.evict() for _ in range(num_blocks - from_free))
        for block_id in taken:
            self._num_tables[block_id] = 1
        return taken

    def _admits(self, num_blocks: int) -> bool:
        """Whether an admission may take so many of the available blocks."""
        available = self._num_available()
        idle = available == self.config.num_blocks
        return num_blocks <= available - (0 if idle else self.config.watermark_blocks)

    def _num_available(self) -> int:
        return len(self._free) + self._cache.num_cached

    def _blocks_for(self, token_ids: Sequence[int], num_tokens: int) -> int:
        check_num_tokens(token_ids, num_tokens)
        return self.config.blocks_for(num_tokens)

    def _on_device(self, request_id: str) -> tuple[Holding, GrowingTable]:
        holding = self._holdings[request_id]
        if holding.table is None:
            raise KeyError(f"request {request_id!r} is swapped out: it has no block table")
        return holding, holding.table

    def _refuse_if_known(self, request_id: str) -> None:
        if request_id in self._holdings:
            raise ValueError(f"request {request_id!r} has blocks already")

    def _checked_options(self) -> SharingOptions:
        options = self.options
        if not isinstance(options, SharingOptions):
            raise ConfigError(
                f"block manager {self.name!r} takes options of type SharingOptions, not "
                f"{type(options).__name__}"
            )
        if options.model_fields_set and not self.config.enable_prefix_caching:
            raise ConfigError(
                f"block manager {self.name!r}: {', '.join(sorted(options.model_fields_set))} "
                "decides which cached prefixes stay, and none are cached; set "
                "enable_prefix_caching=True or leave the option out"
            )
        return options


def _num_in_use(blocks: Iterable[PrefixBlock]) -> int:
    return sum(block.in_use for block in blocks)


def _copy_to_first(source: int, fresh: list[int]) -> tuple[BlockCopy, ...]:
    """Make the first of some new blocks a copy of ``source``; if ``source`` itself has been
    evicted to be one of them, it comes first and nothing has to be copied."""
    if source in fresh:
        fresh.remove(source)
        fresh.insert(0, source)
        return ()
    return (BlockCopy(source, fresh[0]),)
