"""Block managers that share blocks, in tiny worlds, against a plain model and simulated contents.

Each slot holds the salt and all tokens up to its position, as keys and values depend on them; after
each operation every request reads what it has computed. Behaviours: B1 to B20, B23, B24.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.block_manager_model import Holder, Model

from jackfield.core.block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockUsage,
)
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.block_managers.sharing import SharingBlockManager, SharingOptions

NAMES = "abcde"
PICKS = st.integers(0, 4)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14) | st.builds(
    lambda run, end: [0] * run + end, st.integers(1, 12), st.lists(st.integers(0, 1), max_size=2)
)
SALTS = st.sampled_from(["", "", "", "x", "y"])
MAX_LEN = 24
Slot = tuple[str, tuple[int, ...]] | str | None


class BlockManagerMachine(RuleBasedStateMachine):
    """Operations in any order on a tiny pool."""

    manager_class: type[SharingBlockManager] = PagedBlockManager
    only_without_caching = False

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        draw = Random(seed)
        caching = not self.only_without_caching and draw.random() < 0.8
        size = draw.randint(1, 4)
        self.config = BlockManagerConfig(
            num_blocks=draw.choice([1, 2, 4, 6, 8, 12, 16, 24]),
            block_size=size,
            max_model_len=MAX_LEN,
            watermark=draw.choice([0.0, 0.0, 0.1, 0.25, 0.5, 0.9]),
            num_host_blocks=draw.choice([0, 2, 4, 8]),
            enable_prefix_caching=caching,
            num_lookahead_tokens=draw.choice([0, 0, 1, 5]),
        )
        eviction = draw.choice(["lru", "lru", "lfu", "fifo"])
        pinned = draw.choice([(), (), ((0,) * size, (0, 1) * size)])
        settings = {"eviction": eviction, "pinned_prefixes": pinned} if caching else {}
        self.options = SharingOptions.model_validate(settings)
        self.manager = self.manager_class(self.config, self.options)
        self.model = Model(self.config, eviction, pinned)
        self.device: dict[int, list[Slot]] = {}
        self.host: dict[int, list[Slot]] = {}
        self.host_ids: dict[str, list[int]] = {}
        self.num_queried = self.num_hit = 0
        self.log: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.results: list[Any] = []

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        self.log.append((method, arguments, keywords))
        result = getattr(self.manager, method)(*arguments, **keywords)
        self.results.append(result)
        return result

    def on_device(self) -> dict[str, Holder]:
        return {name: held for name, held in self.model.holders.items() if not held.swapped}

    def tables(self) -> dict[str, list[int]]:
        return {name: self.manager.block_table(name).tolist() for name in self.on_device()}

    def state(self) -> tuple[BlockUsage, dict[str, list[int]], object]:
        return self.manager.usage(), self.tables(), self.manager.prefix_stats()

    def num_used(self) -> int:
        return len({block for table in self.tables().values() for block in table})

    def num_available(self) -> int:
        return self.config.num_blocks - self.num_used()

    def evictions_for(self, num_blocks: int, used: int) -> int:
        free = self.config.num_blocks - used - len(self.model.cached())
        return max(num_blocks - free, 0)

    @precondition(lambda self: len(self.model.holders) < len(NAMES))
    @rule(tokens=TOKENS, salt=SALTS, later=st.sampled_from([0, 0, 0, 1, 4]))
    def allocate(self, tokens: list[int], salt: str, later: int) -> None:
        name = self.new_name()
        num_tokens = max(len(tokens) - later, 1)
        before = self.state()
        held, used = self.model.held(), self.num_used()
        hits, whole = self.model.find(tokens, num_tokens, salt)
        shared = hits[:-1] if whole else hits
        num_blocks = self.config.blocks_for(num_tokens)
        kept = self.config.watermark_blocks if used else 0
        need = num_blocks - sum(key in held for key in shared)
        fits = need <= self.num_available() - kept  # B7
        status = self.call("can_allocate", tokens, num_tokens, salt=salt)
        assert self.state() == before, "a probe changed something"
        got: Allocation | None = self.call("allocate", name, tokens, num_tokens, salt=salt)
        assert (status is AllocationStatus.OK) == (got is not None) == fits  # B15
        assert (status is AllocationStatus.NEVER) == (num_blocks > self.config.num_blocks)
        if got is None:
            assert self.state() == before  # B6
            return
        cached = self.model.num_cached_tokens(tokens, num_tokens, salt)
        assert got.num_cached_tokens == cached < len(tokens)  # B11, S12
        self.model.tick += 1
        self.model.touch(hits, found=True)
        holder = Holder(list(tokens), salt, cached, len(shared), num_blocks)
        self.model.holders[name] = holder
        used_now = used + sum(key not in held for key in shared)
        gone = self.model.evict(self.evictions_for(num_blocks - len(shared), used_now))
        copied = whole and self.config.block_size > 1 and hits[-1] not in gone
        assert len(got.copies) == copied
        if copied:
            assert got.copies[0].destination == self.manager.block_table(name)[len(shared)]
        self.copy(got.copies)
        if self.config.enable_prefix_caching:
            self.num_queried += len(tokens)
            self.num_hit += cached

    @precondition(lambda self: self.on_device())
    @rule(pick=PICKS, new=st.lists(st.integers(0, 1), max_size=6), chunk=st.integers(1, 16))
    def step(self, pick: int, new: list[int], chunk: int) -> None:
        """Generate tokens, get slots and compute a chunk."""
        name = choose(self.on_device(), pick)
        holder = self.model.holders[name]
        tokens = [*holder.tokens, *new][:MAX_LEN]
        target = min(holder.num_computed + chunk, len(tokens))
        if not self.append(name, holder, target):
            return
        holder.tokens = tokens
        table = self.manager.block_table(name).tolist()
        self.write(table, holder.num_computed, [self.slot(holder, i + 1) for i in range(target)])
        drafts = self.config.num_lookahead_tokens
        self.write(table, target, [None] * target + ["draft"] * min(drafts, MAX_LEN - target))
        self.call("commit", name, list(tokens), target)
        assert self.manager.block_table(name).tolist() == table
        self.model.register(name, target)
        for other, blocks in self.tables().items():  # what a fork shares is registered for both
            pairs = zip(table[: holder.num_registered], blocks, strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            sharer = self.model.holders[other]
            sharer.num_registered = max(sharer.num_registered, shared)

    def append(self, name: str, holder: Holder, num_tokens: int) -> bool:
        before, old = self.state(), self.manager.block_table(name).tolist()
        size = self.config.block_size
        wanted = self.config.blocks_for(num_tokens)
        others = {block for n, table in self.tables().items() if n != name for block in table}
        writable = range(holder.num_computed // size, min(wanted, len(old)))
        shared = [place for place in writable if old[place] in others]
        need = max(wanted - len(old), 0) + len(shared)
        fits = need <= self.num_available()  # the watermark is no limit
        used = self.num_used()
        copies: tuple[BlockCopy, ...] | None = self.call("append", name, num_tokens)
        assert (copies is not None) == fits
        if copies is None:
            assert self.state() == before  # B6
            return False
        self.model.evict(self.evictions_for(need, used))
        new = self.manager.block_table(name).tolist()
        assert [(copy.source, copy.destination) for copy in copies] == [
            (old[place], new[place]) for place in shared
        ]
        kept = [place for place in range(len(old)) if place not in shared]
        assert [new[place] for place in kept] == [old[place] for place in kept]
        assert not {new[place] for place in writable} & others
        holder.num_blocks = max(holder.num_blocks, wanted)
        self.copy(copies)
        return True

    @precondition(lambda self: self.model.holders)
    @rule(pick=PICKS)
    def free(self, pick: int) -> None:
        name = choose(self.model.holders, pick)
        available = self.num_available()
        gain = self.manager.reclaimable(name)
        self.call("free", name)
        self.model.leave(name)
        self.host_ids.pop(name, None)
        assert self.num_available() == available + gain  # B20
        after = self.state()
        self.call("free", name)  # B9
        assert self.state() == after

    @precondition(lambda self: self.on_device() and len(self.model.holders) < len(NAMES))
    @rule(pick=PICKS)
    def fork(self, pick: int) -> None:
        parent, child = choose(self.on_device(), pick), self.new_name()
        before = self.manager.usage()
        self.call("fork", parent, child)
        holder = self.model.holders[parent]
        self.model.holders[child] = replace(holder, tokens=list(holder.tokens))
        assert self.manager.usage() == before
        assert self.tables()[child] == self.tables()[parent]  # B17

    @precondition(lambda self: self.on_device())
    @rule(pick=PICKS)
    def swap_out(self, pick: int) -> None:
        name = choose(self.on_device(), pick)
        before, table = self.state(), self.manager.block_table(name).tolist()
        gain = self.manager.reclaimable(name)
        free_host = before[0].host_total - before[0].host_used
        copies = self.call("swap_out", name)
        assert (copies is not None) == (len(table) <= free_host)
        if copies is None:
            assert self.state() == before
            return
        assert [copy.source for copy in copies] == table
        self.host_ids[name] = [copy.destination for copy in copies]
        for copy in copies:
            self.host[copy.destination] = list(self.slots(copy.source))
        self.model.leave(name, swapped=True)
        assert self.manager.is_swapped(name)
        assert self.manager.reclaimable(name) == 0
        assert self.manager.usage().available == before[0].available + gain  # B20

    @precondition(lambda self: self.host_ids)
    @rule(pick=PICKS)
    def swap_in(self, pick: int) -> None:
        name = choose(self.host_ids, pick)
        before, used = self.state(), self.num_used()
        host_ids = self.host_ids[name]
        copies = self.call("swap_in", name)
        assert (copies is not None) == (len(host_ids) <= self.num_available())
        if copies is None:
            assert self.state() == before
            return
        assert [copy.source for copy in copies] == host_ids  # B16
        assert [copy.destination for copy in copies] == self.manager.block_table(name).tolist()
        self.model.evict(self.evictions_for(len(host_ids), used))
        self.model.holders[name].swapped = False
        for copy in copies:
            self.device[copy.destination] = list(self.host[copy.source])
        del self.host_ids[name]

    @rule(tokens=TOKENS, salt=SALTS)
    def probe(self, tokens: list[int], salt: str) -> None:
        before = self.state()
        expected = self.model.num_cached_tokens(tokens, len(tokens), salt)
        assert self.call("match_prefix", tokens, salt=salt) == expected  # B10, B11, B23
        assert self.state() == before

    @precondition(lambda self: self.model.holders)
    @rule(pick=PICKS)
    def misuse(self, pick: int) -> None:
        """Calls that the contract forbids are refused, and change nothing."""
        before, name = self.state(), choose(self.model.holders, pick)
        manager = self.manager
        assert not self.call("reset_prefix_cache")  # B18
        with pytest.raises(ValueError, match="has blocks already"):
            manager.allocate(name, [0], 1)
        homeless = ["nobody", *self.host_ids]
        for other in homeless:
            with pytest.raises(KeyError):
                manager.block_table(other)
            with pytest.raises(KeyError):
                manager.swap_out(other)
            with pytest.raises(KeyError):
                manager.append(other, 1)
            with pytest.raises(KeyError):
                manager.commit(other, [0], 1)
            with pytest.raises(KeyError):
                manager.fork(other, "child")
        for other in ["nobody", *self.on_device()]:
            with pytest.raises(KeyError):
                manager.swap_in(other)
        for other in self.on_device():
            with pytest.raises(ValueError, match="has blocks already"):
                manager.fork(other, name)
        with pytest.raises(KeyError):
            manager.reclaimable("nobody")
        assert self.state() == before

    @precondition(lambda self: self.model.holders)
    @rule(reset=st.sampled_from([False, False, True]))
    def free_all(self, reset: bool) -> None:
        while self.model.holders:
            self.free(0)
        if reset:
            assert self.call("reset_prefix_cache")  # B18
            self.model.prefixes.clear()

    def new_name(self) -> str:
        return next(name for name in NAMES if name not in self.model.holders)

    def slots(self, block: int) -> list[Slot]:
        return self.device.setdefault(block, [None] * self.config.block_size)

    def slot(self, holder: Holder, end: int) -> Slot:
        return holder.salt, tuple(holder.tokens[:end])

    def write(self, table: list[int], start: int, slots: Sequence[Slot]) -> None:
        size = self.config.block_size
        for position in range(start, len(slots)):
            self.slots(table[position // size])[position % size] = slots[position]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self.device[copy.destination] = list(self.slots(copy.source))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        usage, cached, used = self.manager.usage(), len(self.model.cached()), self.num_used()
        free = self.config.num_blocks - used - cached
        assert (usage.used, usage.cached, usage.free) == (used, cached, free)  # B1, B2, B13
        assert usage.total == self.config.num_blocks
        in_use = sum(len(ids) for ids in self.host_ids.values())
        assert (usage.host_total, usage.host_used) == (self.config.num_host_blocks, in_use)
        host_ids = {block for ids in self.host_ids.values() for block in ids}
        assert len(host_ids) == in_use
        assert host_ids <= set(range(self.config.num_host_blocks))
        stats = self.manager.prefix_stats()
        assert (stats.num_queried_tokens, stats.num_hit_tokens) == (self.num_queried, self.num_hit)
        for name, table in self.tables().items():
            assert len(table) == self.model.holders[name].num_blocks  # B5
            assert len(set(table)) == len(table)
            assert set(table) <= set(range(self.config.num_blocks))

    @invariant()
    def contents_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        size = self.config.block_size
        for name, holder in self.model.holders.items():
            swapped = holder.swapped
            blocks = self.host_ids[name] if swapped else self.manager.block_table(name).tolist()
            pool = self.host if swapped else self.device
            for position in range(holder.num_computed):
                slot = pool[blocks[position // size]][position % size]
                assert slot == self.slot(holder, position + 1), f"{name} at {position}"  # B14

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.free_all(reset=False)
        usage = self.manager.usage()
        assert usage.used == usage.host_used == 0  # B8
        for salt, tokens in list(self.model.prefixes):
            self.probe([*tokens, 2], salt)
        whole = [2] * self.manager.largest_request()
        if whole:
            assert self.call("allocate", "whole", whole, len(whole)) is not None
            blocks = self.call("block_table", "whole").tolist()
            self.results[-1] = blocks
            assert len(set(blocks)) == len(blocks) == self.config.blocks_for(len(whole))
        # B24, and one index finds what the other finds
        twins: list[type[SharingBlockManager]] = [self.manager_class]
        if self.manager_class in (PagedBlockManager, RadixBlockManager):
            twins = [PagedBlockManager, RadixBlockManager]
        for twin in twins:
            assert self.replay(twin(self.config, self.options)) == self.results

    def replay(self, twin: BlockManager) -> list[Any]:
        results = [getattr(twin, method)(*args, **keywords) for method, args, keywords in self.log]
        if self.log and self.log[-1][0] == "block_table":
            results[-1] = results[-1].tolist()
        return results


def choose(names: Iterable[str], pick: int) -> str:
    """One of some names; the same pick gives the same one."""
    ordered = sorted(names)
    return ordered[pick % len(ordered)]
