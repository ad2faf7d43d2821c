"""Examples of block managers that share blocks: growing, freeing, forks, swapping, lookahead."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from jackfield.core.block_manager import (
    AllocationStatus,
    BlockCopy,
    BlockManagerConfig,
    BlockUsage,
)
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.block_managers.sharing import SharingBlockManager
from jackfield.core.errors import ConfigError
from jackfield.core.options import NoOptions

MANAGERS = [PagedBlockManager, RadixBlockManager]


@pytest.fixture(params=MANAGERS)
def manager_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def build(
    manager_class: type[SharingBlockManager], num_blocks: int, block_size: int, **settings: Any
) -> SharingBlockManager:
    settings = {"max_model_len": 1000, "watermark": 0.0, **settings}
    return manager_class(BlockManagerConfig(num_blocks, block_size, **settings))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_growing_past_a_block_edge(manager_class: Any, length: int, num_blocks: int) -> None:
    """B015: a request whose tokens end on a block's edge grows exactly while blocks last."""
    manager = build(manager_class, num_blocks, block_size=4)
    if manager.can_allocate(range(length), length) is AllocationStatus.NEVER:
        assert length > num_blocks * 4
        assert manager.allocate("r", range(length), length) is None
        return
    assert manager.allocate("r", range(length), length) is not None
    total = length
    while manager.append("r", total + 1) is not None:
        total += 1
        assert len(manager.block_table("r")) == -(-total // 4)
    assert total == manager.largest_request()
    assert len(manager.block_table("r")) == num_blocks


def test_every_order_of_freeing_restores_the_pool(manager_class: Any) -> None:
    """B008: references count requests, whatever they share."""
    for order in permutations(["parent", "child", "twin"]):
        manager = build(manager_class, num_blocks=24, block_size=16)
        manager.allocate("parent", range(70), 70)
        manager.commit("parent", range(70), 70)
        for child in ("child", "twin"):
            manager.fork("parent", child)
        for name in order:
            assert manager.append(name, 90) is not None
        assert manager.usage().used == 4 + 3 * 2
        for name in order:
            manager.free(name)
            manager.free(name)
        assert manager.usage() == BlockUsage(total=24, used=0, cached=0, free=24)
        manager.allocate("all", range(24 * 16), 24 * 16)
        assert sorted(manager.block_table("all")) == list(range(24))


def test_block_table_is_a_read_only_int32_array_without_copying(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=40, block_size=1)
    manager.allocate("r", range(3), 3)
    table = manager.block_table("r")
    assert table.dtype == np.int32
    assert table.tolist() == [0, 1, 2]
    assert manager.block_table("r") is table
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 9
    manager.append("r", 40)
    assert manager.block_table("r").tolist() == list(range(40))


def test_watermark_keeps_blocks_for_growth_but_an_empty_pool_admits_what_fits(
    manager_class: Any,
) -> None:
    manager = build(manager_class, num_blocks=10, block_size=1, watermark=0.5)
    assert manager.allocate("big", range(8), 8) is not None
    assert manager.can_allocate([1], 1) is AllocationStatus.LATER
    assert manager.append("big", 10) == ()
    manager.free("big")
    assert manager.allocate("a", range(4), 4) is not None
    assert manager.allocate("b", range(2), 2) is None
    assert manager.allocate("b", range(1), 1) is not None


@pytest.mark.parametrize("num_tokens", [0, -1, 4])
def test_tokens_out_of_range_are_refused(manager_class: Any, num_tokens: int) -> None:
    manager = build(manager_class, num_blocks=4, block_size=2)
    with pytest.raises(ValueError, match=r"at least 1 and at most 3"):
        manager.can_allocate([1, 2, 3], num_tokens)
    with pytest.raises(ValueError, match=r"at least 1 and at most 3"):
        manager.allocate("r", [1, 2, 3], num_tokens)
    assert manager.usage().used == 0


def test_the_first_of_two_holders_to_write_gets_a_copy_and_the_last_none(
    manager_class: Any,
) -> None:
    """B17: full blocks stay shared, the last block is copied when it is about to be written to."""
    manager = build(manager_class, num_blocks=8, block_size=4)
    manager.allocate("parent", range(6), 6)
    manager.commit("parent", range(6), 6)
    manager.fork("parent", "child")
    assert manager.usage().used == 2
    assert manager.reclaimable("parent") == manager.reclaimable("child") == 0
    assert manager.append("child", 7) == (BlockCopy(source=1, destination=2),)
    assert manager.append("parent", 7) == ()
    assert manager.block_table("parent").tolist() == [0, 1]
    assert manager.block_table("child").tolist() == [0, 2]
    assert manager.reclaimable("parent") == 1
    manager.free("parent")
    assert manager.block_table("child").tolist() == [0, 2]


def test_a_fork_at_a_block_edge_needs_no_copy(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=8, block_size=4)
    manager.allocate("parent", range(8), 8)
    manager.commit("parent", range(8), 8)
    manager.fork("parent", "child")
    assert manager.append("parent", 9) == ()
    assert manager.append("child", 9) == ()
    assert manager.usage().used == 4


def test_copy_on_write_without_room_changes_nothing(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=2, block_size=4)
    manager.allocate("parent", range(6), 6)
    manager.commit("parent", range(6), 6)
    manager.fork("parent", "child")
    assert manager.append("child", 7) is None
    assert manager.block_table("child").tolist() == manager.block_table("parent").tolist()
    manager.free("parent")
    assert manager.append("child", 7) == ()


def test_a_fork_in_mid_prompt_shares_what_is_computed(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=8, block_size=2)
    manager.allocate("parent", range(7), 7)
    manager.commit("parent", range(7), 3)
    manager.fork("parent", "child")
    copies = manager.append("child", 6)
    assert copies is not None
    assert [copy.source for copy in copies] == [1, 2]
    assert manager.block_table("child").tolist() == [0, 4, 5, 3]


def test_swapping_keeps_the_number_of_blocks_and_their_order(manager_class: Any) -> None:
    """B16: one host block for each block; copies name both pools."""
    manager = build(manager_class, num_blocks=4, block_size=2, num_host_blocks=3)
    manager.allocate("r", range(5), 5)
    manager.commit("r", range(5), 5)
    out = manager.swap_out("r")
    assert out == (BlockCopy(0, 0), BlockCopy(1, 1), BlockCopy(2, 2))
    assert manager.usage() == BlockUsage(4, used=0, cached=0, free=4, host_total=3, host_used=3)
    assert manager.is_swapped("r")
    with pytest.raises(KeyError, match="swapped out"):
        manager.block_table("r")
    with pytest.raises(ValueError, match="has blocks already"):
        manager.allocate("r", range(5), 5)
    manager.allocate("other", range(4), 4)
    assert manager.swap_in("r") is None
    assert manager.is_swapped("r")
    manager.free("other")
    back = manager.swap_in("r")
    assert back is not None
    assert [copy.source for copy in back] == [0, 1, 2]
    assert [copy.destination for copy in back] == manager.block_table("r").tolist()
    assert manager.usage().host_used == 0


@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_too_little_swap_space_changes_nothing(manager_class: Any, num_host_blocks: int) -> None:
    """B014: no error, so that the caller can fall back to computing the request anew."""
    manager = build(manager_class, num_blocks=4, block_size=2, num_host_blocks=num_host_blocks)
    manager.allocate("r", range(5), 5)
    before = manager.usage()
    assert manager.swap_out("r") is None
    assert manager.usage() == before
    assert manager.block_table("r").tolist() == [0, 1, 2]


def test_freeing_a_swapped_request_gives_its_host_blocks_back(manager_class: Any) -> None:
    """B022, swapped out: neither pool leaks, over and over."""
    manager = build(manager_class, num_blocks=4, block_size=2, num_host_blocks=3)
    for _ in range(50):
        assert manager.allocate("r", range(5), 5) is not None
        assert manager.swap_out("r") is not None
        manager.free("r")
        manager.free("r")
        assert not manager.is_swapped("r")
    usage = manager.usage()
    assert (usage.used, usage.host_used) == (0, 0)


def test_lookahead_is_reserved_but_not_past_the_longest_request(manager_class: Any) -> None:
    manager = build(
        manager_class, num_blocks=6, block_size=4, max_model_len=18, num_lookahead_tokens=3
    )
    manager.allocate("r", range(5), 5)
    assert len(manager.block_table("r")) == 2
    manager.append("r", 6)
    assert len(manager.block_table("r")) == 3
    manager.append("r", 17)
    assert len(manager.block_table("r")) == 5
    assert manager.largest_request() == 24


def test_lookahead_counts_in_the_largest_request(manager_class: Any) -> None:
    manager = build(
        manager_class, num_blocks=4, block_size=4, max_model_len=100, num_lookahead_tokens=5
    )
    assert manager.largest_request() == 11
    assert manager.can_allocate(range(11), 11) is AllocationStatus.OK
    assert manager.can_allocate(range(12), 12) is AllocationStatus.NEVER


@pytest.mark.parametrize(("num_computed", "named"), [(2, "at least 3"), (7, "at most 6")])
def test_commits_out_of_range_are_refused(
    manager_class: Any, num_computed: int, named: str
) -> None:
    manager = build(manager_class, num_blocks=4, block_size=2)
    manager.allocate("r", range(8), 5)
    manager.commit("r", range(8), 3)
    with pytest.raises(ValueError, match=named):
        manager.commit("r", range(8), num_computed)


def test_options_of_another_part_are_refused(manager_class: Any) -> None:
    with pytest.raises(ConfigError, match="takes options of type SharingOptions, not NoOptions"):
        manager_class(BlockManagerConfig(4, 4, 100), NoOptions())


@pytest.mark.parametrize(
    "options", [{"eviction": "lfu"}, {"pinned_prefixes": ((1, 2, 3, 4),), "eviction": "lru"}]
)
def test_options_of_prefix_caching_need_it(manager_class: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"eviction.*set enable_prefix_caching=True"):
        manager_class(BlockManagerConfig(4, 4, 100), manager_class.Options(**options))
