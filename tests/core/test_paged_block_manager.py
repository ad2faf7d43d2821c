"""The default block manager against a model of dicts (behaviours B1, B2, B5 to B9, B15, B24)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jackfield.core.block_manager import (
    Allocation,
    AllocationStatus,
    BlockManagerConfig,
    BlockUsage,
)
from jackfield.core.errors import ConfigError, UnsupportedError
from jackfield.core.paged_block_manager import PagedBlockManager

IDS = st.sampled_from(["a", "b", "c", "d"])


def build(num_blocks: int, block_size: int, watermark: float = 0.0) -> PagedBlockManager:
    return PagedBlockManager(BlockManagerConfig(num_blocks, block_size, 1000, watermark))


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockManagerMachine(RuleBasedStateMachine):
    """Operations in any order on a tiny pool; the model knows how many blocks each request has."""

    manager_class: type[PagedBlockManager] = PagedBlockManager

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        watermark=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]),
    )
    def start(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.config = BlockManagerConfig(num_blocks, block_size, 1000, watermark)
        self.manager = self.manager_class(self.config)
        self.tokens: dict[str, int] = {}
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.results: list[object] = []

    def call(self, method: str, *arguments: Any) -> Any:
        self.log.append((method, arguments))
        result = getattr(self.manager, method)(*arguments)
        self.results.append(result)
        return result

    def free_blocks(self) -> int:
        used = sum(blocks_for(count, self.config.block_size) for count in self.tokens.values())
        return self.config.num_blocks - used

    def state(self) -> tuple[BlockUsage, dict[str, list[int]]]:
        tables = {name: self.manager.block_table(name).tolist() for name in self.tokens}
        return self.manager.usage(), tables

    @rule(name=IDS, num_tokens=st.integers(1, 16), extra=st.integers(0, 3))
    def allocate(self, name: str, num_tokens: int, extra: int) -> None:
        token_ids = range(num_tokens + extra)
        before = self.state()
        if name in self.tokens:
            with pytest.raises(ValueError, match="has blocks already"):
                self.manager.allocate(name, token_ids, num_tokens)
            assert self.state() == before
            return
        need = blocks_for(num_tokens, self.config.block_size)
        watermark = int(self.config.watermark * self.config.num_blocks) if self.tokens else 0
        fits = need <= self.free_blocks() - watermark  # B7
        status = self.call("can_allocate", token_ids, num_tokens)
        assert self.state() == before, "a probe changed something"
        allocation = self.call("allocate", name, token_ids, num_tokens)
        assert (status is AllocationStatus.OK) == (allocation is not None) == fits  # B15
        assert (status is AllocationStatus.NEVER) == (need > self.config.num_blocks)  # B15
        if fits:
            assert allocation == Allocation(num_cached_tokens=0, copies=())
            self.tokens[name] = num_tokens
        else:
            assert self.state() == before  # B6

    @rule(name=IDS, more=st.one_of(st.integers(-2, 4), st.integers(5, 24)))
    def append(self, name: str, more: int) -> None:
        before = self.state()
        if name not in self.tokens:
            with pytest.raises(KeyError):
                self.manager.append(name, 1)
            assert self.state() == before
            return
        wanted = max(1, self.tokens[name] + more)
        grown = max(wanted, self.tokens[name])
        block_size = self.config.block_size
        need = blocks_for(grown, block_size) - blocks_for(self.tokens[name], block_size)
        copies = self.call("append", name, wanted)
        assert (copies is not None) == (need <= self.free_blocks())  # the watermark is no limit
        if copies is None:
            assert self.state() == before  # B6
        else:
            assert copies == ()
            held = before[1][name]
            assert self.manager.block_table(name).tolist()[: len(held)] == held
            self.tokens[name] = grown

    @rule(name=IDS)
    def free(self, name: str) -> None:
        self.call("free", name)
        self.tokens.pop(name, None)
        after = self.state()
        self.call("free", name)  # B9
        assert self.state() == after
        with pytest.raises(KeyError):
            self.manager.block_table(name)

    @precondition(lambda self: self.tokens)
    @rule()
    def free_all(self) -> None:
        for name in list(self.tokens):
            self.call("free", name)
        self.tokens.clear()

    @invariant()
    def partition(self) -> None:
        if not hasattr(self, "manager"):
            return
        usage, tables = self.state()
        owned = [block for table in tables.values() for block in table]
        assert usage.used + usage.cached + usage.free == usage.total == self.config.num_blocks  # B1
        assert usage.free == self.free_blocks()
        assert usage.cached == 0
        assert len(set(owned)) == len(owned) == usage.used  # B2: one owner each
        assert all(0 <= block < self.config.num_blocks for block in owned)
        for name, table in tables.items():
            assert len(table) == blocks_for(self.tokens[name], self.config.block_size)  # B5

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.free_all()
        assert self.manager.usage().free == self.config.num_blocks  # B8
        whole = range(self.manager.largest_request())
        assert self.manager.allocate("whole", whole, len(whole)) is not None
        assert sorted(self.manager.block_table("whole")) == list(range(self.config.num_blocks))
        twin = self.manager_class(self.config)  # B24
        assert [getattr(twin, method)(*arguments) for method, arguments in self.log] == self.results
        twin.allocate("whole", whole, len(whole))
        np.testing.assert_array_equal(twin.block_table("whole"), self.manager.block_table("whole"))


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=30)


class LeaksOnFree(PagedBlockManager):
    """Loses one block of every request that had several."""

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


class IgnoresWatermark(PagedBlockManager):
    """Admits down to the last block."""

    def _admits(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)


class TakesBeforeItLooks(PagedBlockManager):
    """Keeps what there is when there is not enough."""

    def append(self, request_id: str, num_tokens: int) -> Any:
        copies = super().append(request_id, num_tokens)
        if copies is None and self._free:
            self._tables[request_id].extend(self._take(1))
        return copies


class DoubleFree(PagedBlockManager):
    """Gives blocks back once more when a request is freed again."""

    def __init__(self, config: BlockManagerConfig) -> None:
        super().__init__(config)
        self._last: list[int] = []

    def free(self, request_id: str) -> None:
        if request_id in self._tables:
            self._last = self._tables[request_id].view().tolist()
            super().free(request_id)
        else:
            self._free.extend(self._last)


@pytest.mark.parametrize(
    "mutant", [LeaksOnFree, GivesTwice, IgnoresWatermark, TakesBeforeItLooks, DoubleFree]
)
def test_the_machine_catches(mutant: type[PagedBlockManager]) -> None:
    machine = type("Mutant", (BlockManagerMachine,), {"manager_class": mutant})
    quick = settings(
        deadline=None,
        max_examples=3000,  # it stops at the first one that is caught
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(machine, settings=quick)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_growing_past_a_block_edge(length: int, num_blocks: int) -> None:
    """B015: a request whose tokens end on a block's edge grows exactly while blocks last."""
    manager = build(num_blocks, block_size=4)
    if manager.can_allocate(range(length), length) is AllocationStatus.NEVER:
        assert length > num_blocks * 4
        assert manager.allocate("r", range(length), length) is None
        return
    assert manager.allocate("r", range(length), length) is not None
    total = length
    while manager.append("r", total + 1) is not None:
        total += 1
        assert len(manager.block_table("r")) == blocks_for(total, 4)
    assert total == manager.largest_request()
    assert len(manager.block_table("r")) == num_blocks


def test_every_order_of_freeing_restores_the_pool() -> None:
    """B008, without sharing: the free list never holds an id twice."""
    for order in permutations(["p", "c", "d"]):
        manager = build(num_blocks=24, block_size=16)
        for name in ("p", "c", "d"):
            manager.allocate(name, range(70), 70)
            manager.append(name, 90)
        for name in order:
            manager.free(name)
            manager.free(name)
        assert manager.usage() == BlockUsage(total=24, used=0, cached=0, free=24)
        manager.allocate("all", range(24 * 16), 24 * 16)
        assert sorted(manager.block_table("all")) == list(range(24))


def test_block_table_is_a_read_only_int32_array_without_copying() -> None:
    manager = build(num_blocks=40, block_size=1)
    manager.allocate("r", range(3), 3)
    table = manager.block_table("r")
    assert table.dtype == np.int32
    assert table.tolist() == [0, 1, 2]
    assert manager.block_table("r") is table
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 9
    manager.append("r", 40)
    assert manager.block_table("r").tolist() == list(range(40))


def test_watermark_keeps_blocks_for_growth_but_an_empty_pool_admits_what_fits() -> None:
    manager = build(num_blocks=10, block_size=1, watermark=0.5)
    assert manager.allocate("big", range(8), 8) is not None
    assert manager.can_allocate([1], 1) is AllocationStatus.LATER
    assert manager.append("big", 10) == ()
    manager.free("big")
    assert manager.allocate("a", range(4), 4) is not None
    assert manager.allocate("b", range(2), 2) is None
    assert manager.allocate("b", range(1), 1) is not None


@pytest.mark.parametrize("num_tokens", [0, -1, 4])
def test_tokens_out_of_range_are_refused(num_tokens: int) -> None:
    manager = build(num_blocks=4, block_size=2)
    with pytest.raises(ValueError, match=r"at least 1 and at most 3"):
        manager.can_allocate([1, 2, 3], num_tokens)
    with pytest.raises(ValueError, match=r"at least 1 and at most 3"):
        manager.allocate("r", [1, 2, 3], num_tokens)
    assert manager.usage().used == 0


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "watermark", "named"),
    [
        (0, 16, 0.0, "num_blocks=0"),
        (4, 0, 0.0, "block_size=0"),
        (4, 4, 1.0, "watermark=1.0"),
        (4, 4, -0.1, "watermark=-0.1"),
    ],
)
def test_impossible_settings_are_refused(
    num_blocks: int, block_size: int, watermark: float, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build(num_blocks, block_size, watermark)


def test_optional_powers_are_refused_by_name() -> None:
    manager = build(num_blocks=4, block_size=4)
    token_ids: Sequence[int] = [1, 2, 3, 4, 5]
    manager.allocate("r", token_ids, 5)
    manager.commit("r", token_ids, 5)
    assert manager.powers == frozenset()
    assert manager.match_prefix(token_ids) == 0
    with pytest.raises(UnsupportedError, match=r"'paged': fork is not supported"):
        manager.fork("r", "s")
    with pytest.raises(UnsupportedError, match="swap is not supported"):
        manager.swap_out("r")
    with pytest.raises(UnsupportedError, match="prefix_caching is not supported"):
        manager.reset_prefix_cache()
