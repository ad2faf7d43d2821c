"""The order in which cached blocks are given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.eviction import EvictionPolicy, EvictionQueue, LeastRecentlyUsed
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.prefix_index import PrefixBlock
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.block_managers.sharing import SharingBlockManager, SharingOptions
from jackfield.core.errors import ConfigError

A, B, C = [1, 1, 9], [2, 2, 9], [3, 3, 9]


def build(options: SharingOptions, num_blocks: int = 3, block_size: int = 2) -> SharingBlockManager:
    config = BlockManagerConfig(num_blocks, block_size, 100, 0.0, enable_prefix_caching=True)
    return PagedBlockManager(config, options)


def serve(manager: SharingBlockManager, tokens: Sequence[int]) -> None:
    assert manager.allocate("r", tokens, len(tokens)) is not None
    manager.commit("r", tokens, len(tokens))
    manager.free("r")


def survivors(manager: SharingBlockManager) -> list[Sequence[int]]:
    return [tokens for tokens in (A, B, C) if manager.match_prefix(tokens)]


@pytest.mark.parametrize(("eviction", "left"), [("lru", [A, C]), ("lfu", [A, C]), ("fifo", [B, C])])
def test_policies_differ_in_what_they_give_up(eviction: str, left: list[Sequence[int]]) -> None:
    manager = build(SharingOptions.model_validate({"eviction": eviction}))
    for tokens in (A, B, A, C):
        serve(manager, tokens)
    assert survivors(manager) == left


def test_lfu_keeps_what_was_found_often_although_it_was_long_ago() -> None:
    for eviction, left in (("lfu", [A, C]), ("lru", [B, C])):
        manager = build(SharingOptions.model_validate({"eviction": eviction}))
        for tokens in (A, A, B, C):
            serve(manager, tokens)
        assert survivors(manager) == left


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("manager_class", [PagedBlockManager, RadixBlockManager])
def test_leaves_go_before_what_they_follow(
    eviction: str, manager_class: type[SharingBlockManager]
) -> None:
    """B13: whatever the policy, a prefix shrinks from its end."""
    config = BlockManagerConfig(6, 2, 100, 0.0, enable_prefix_caching=True)
    manager = manager_class(config, SharingOptions.model_validate({"eviction": eviction}))
    serve(manager, range(9))
    lengths = []
    for size in range(3, 7):
        manager.allocate("big", [50] * 2 * size, 2 * size)
        lengths.append(manager.match_prefix(range(9)))
        manager.free("big")
    assert lengths == [6, 4, 2, 0]


def test_pinned_prefixes_go_last_but_they_go() -> None:
    manager = build(SharingOptions(pinned_prefixes=((1, 1, 7),)), num_blocks=3)
    serve(manager, A)
    for tokens in (B, C, B, C):
        serve(manager, tokens)
        assert manager.match_prefix(A) == 2
    assert manager.allocate("all", [5] * 6, 6) is not None
    assert manager.match_prefix(A) == 0


def test_a_manager_may_have_an_order_of_its_own() -> None:
    class NewestFirst(EvictionPolicy):
        def rank(self, block: PrefixBlock) -> tuple[int, ...]:
            return (-block.last_used,)

    class Manager(PagedBlockManager):
        def make_eviction_policy(self, options: SharingOptions) -> EvictionPolicy:
            return NewestFirst()

    manager = Manager(BlockManagerConfig(3, 2, 100, 0.0, enable_prefix_caching=True))
    for tokens in (A, B, C):
        serve(manager, tokens)
    assert survivors(manager) == [A, C]


def test_pins_hold_without_salt_only() -> None:
    config = BlockManagerConfig(2, 2, 100, 0.0, enable_prefix_caching=True)
    manager = RadixBlockManager(config, SharingOptions(pinned_prefixes=((1, 1),)))
    for salt in ("x", ""):
        manager.allocate("r", A[:2], 2, salt=salt)
        manager.commit("r", A[:2], 2)
        manager.free("r")
    serve(manager, B[:2])
    assert manager.match_prefix(A, salt="x") == 0
    assert manager.match_prefix(A) == 2


def test_a_pinned_prefix_that_fills_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pinned_prefixes\[1\] has 1 tokens.*block_size=2"):
        build(SharingOptions(pinned_prefixes=((1, 1), (1,))))


@given(st.lists(st.tuples(st.sampled_from("adp"), st.integers(0, 7), st.integers(0, 5))))
def test_the_queue_gives_the_lowest_rank_and_drops_what_is_stale(
    operations: list[tuple[str, int, int]],
) -> None:
    queue = EvictionQueue(LeastRecentlyUsed())
    waiting: dict[int, int] = {}
    for action, block_id, last_used in operations * 3:
        if action == "a":
            block = PrefixBlock(block_id, None, None)
            block.last_used = waiting[block_id] = last_used
            queue.add(block)
        elif action == "d":
            queue.discard(block_id)
            waiting.pop(block_id, None)
        elif waiting:
            first = min(waiting, key=lambda block_id: (waiting[block_id], block_id))
            assert queue.pop() == first
            del waiting[first]
        assert len(queue) == len(waiting)
        assert all(block_id in queue for block_id in waiting)
        assert len(queue._heap) <= 2 * len(waiting) + 17


def test_an_empty_queue_has_nothing_to_give() -> None:
    with pytest.raises(IndexError):
        EvictionQueue(LeastRecentlyUsed()).pop()


def test_long_chains_are_forgotten_without_deep_recursion() -> None:
    manager = build(SharingOptions(), num_blocks=30_000, block_size=1)
    manager.allocate("r", [0] * 30_000, 30_000)
    manager.commit("r", [0] * 30_000, 30_000)
    manager.free("r")
    assert manager.usage().cached == 30_000
    assert manager.reset_prefix_cache()
    assert manager.usage().free == 30_000
