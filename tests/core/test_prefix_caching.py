"""Examples of prefix caching, for the table of hashes and for the tree of tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from jackfield.core.block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManagerConfig,
    BlockUsage,
    PrefixStats,
)
from jackfield.core.block_managers.hash_index import DIGEST_SIZE, chained_digest, root_digest
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.block_managers.radix_index import RadixIndex
from jackfield.core.block_managers.sharing import SharingBlockManager


@pytest.fixture(params=[PagedBlockManager, RadixBlockManager])
def manager_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def build(
    manager_class: type[SharingBlockManager], num_blocks: int, block_size: int, **settings: Any
) -> SharingBlockManager:
    settings = {"max_model_len": 1000, "watermark": 0.0, **settings}
    config = BlockManagerConfig(num_blocks, block_size, enable_prefix_caching=True, **settings)
    return manager_class(config)


def compute(
    manager: SharingBlockManager, name: str, tokens: Sequence[int], **keywords: str
) -> Allocation:
    """Admit a request and compute all its tokens."""
    allocation = manager.allocate(name, tokens, len(tokens), **keywords)
    assert allocation is not None
    manager.commit(name, tokens, len(tokens))
    return allocation


def serve(manager: SharingBlockManager, tokens: Sequence[int], **keywords: str) -> int:
    """Admit a request, compute it, let it end; how many of its tokens were cached."""
    allocation = compute(manager, "served", tokens, **keywords)
    manager.free("served")
    return allocation.num_cached_tokens


def test_a_common_prefix_is_shared_down_to_the_block(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=16, block_size=4)
    compute(manager, "a", range(10))
    assert compute(manager, "b", [*range(8), 90, 91, 92]).num_cached_tokens == 8
    assert compute(manager, "c", [*range(6), 90, 91]).num_cached_tokens == 4
    tables = {name: manager.block_table(name).tolist() for name in "abc"}
    assert tables == {"a": [0, 1, 2], "b": [0, 1, 3], "c": [0, 4]}
    assert manager.usage().used == 5


def test_only_computed_tokens_are_shared(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=16, block_size=4)
    manager.allocate("a", range(12), 12)
    assert manager.match_prefix(range(12)) == 0
    manager.commit("a", range(12), 7)
    assert manager.match_prefix(range(12)) == 4
    assert manager.match_prefix(range(4)) == 3
    assert manager.match_prefix([]) == 0


def test_generated_tokens_are_shared_too(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=16, block_size=4)
    compute(manager, "a", range(6))
    for length in range(7, 14):
        manager.append("a", length)
        manager.commit("a", range(length), length)
    manager.free("a")
    assert manager.match_prefix(range(20)) == 12


@pytest.mark.parametrize("length", [16, 32, 33])
def test_a_whole_prompt_in_the_cache_leaves_one_token(manager_class: Any, length: int) -> None:
    """B012: the last token is computed anew, in a block of the request's own."""
    manager = build(manager_class, num_blocks=16, block_size=16)
    compute(manager, "first", range(length))
    last = (length - 1) // 16
    found = int(manager.block_table("first")[last])
    manager.free("first")
    for name in ("second", "third"):
        probed = manager.match_prefix(range(length))
        allocation = compute(manager, name, range(length))
        assert allocation.num_cached_tokens == probed == min(length - 1, length // 16 * 16)
        table = manager.block_table(name).tolist()
        assert allocation.copies == ((BlockCopy(found, table[-1]),) if length % 16 == 0 else ())
        assert len(table) == last + 1
        found = table[-1]  # nobody else holds one with these contents
    assert manager.block_table("second")[last] != manager.block_table("third")[last]


def test_a_whole_prompt_takes_its_last_block_over_when_no_other_is_left(
    manager_class: Any,
) -> None:
    manager = build(manager_class, num_blocks=3, block_size=4)
    serve(manager, range(12))
    assert manager.can_allocate(range(12), 12) is AllocationStatus.OK
    assert manager.allocate("again", range(12), 12) == Allocation(num_cached_tokens=11)
    assert manager.block_table("again").tolist() == [0, 1, 2]
    assert manager.match_prefix([*range(12), 99]) == 8


def test_blocks_of_one_token_need_no_copy(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=8, block_size=1)
    serve(manager, range(4))
    assert manager.allocate("again", range(4), 4) == Allocation(num_cached_tokens=3)


def test_a_hit_covers_no_more_than_the_slots_asked_for(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=8, block_size=4)
    serve(manager, range(16))
    assert manager.allocate("again", range(16), 9) == Allocation(num_cached_tokens=8)
    assert len(manager.block_table("again")) == 3


def test_adapters_and_tenants_never_share(manager_class: Any) -> None:
    """B010: the salt is part of the identity of every block."""
    manager = build(manager_class, num_blocks=40, block_size=4)
    salts = ["", "1", "2"]
    assert [serve(manager, range(13), salt=salt) for salt in salts] == [0, 0, 0]
    assert [serve(manager, range(13), salt=salt) for salt in salts] == [12, 12, 12]
    for salt in salts:
        compute(manager, salt, range(13), salt=salt)
    tables = [block for salt in salts for block in manager.block_table(salt)]
    assert len(set(tables)) == len(tables)


def test_a_fork_keeps_the_salt(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=40, block_size=4)
    compute(manager, "a", range(4), salt="x")
    manager.fork("a", "b")
    manager.append("b", 8)
    manager.commit("b", range(8), 8)
    assert manager.match_prefix(range(9)) == 0
    assert manager.match_prefix(range(9), salt="x") == 8


def test_other_tokens_never_hit() -> None:
    """B009: blocks are identified by 256 bits of a cryptographic hash of all tokens before."""
    manager = build(PagedBlockManager, num_blocks=8, block_size=4)
    compute(manager, "a", range(1, 9))
    assert compute(manager, "b", range(11, 19)).num_cached_tokens == 0
    assert not set(manager.block_table("a")) & set(manager.block_table("b"))
    root = root_digest("")
    digests = {
        root,
        root_digest("x"),
        chained_digest(root, b"x"),
        chained_digest(root_digest("x"), b""),
        chained_digest(chained_digest(root, b"x"), b""),
    }
    assert {len(digest) for digest in digests} == {DIGEST_SIZE} == {32}
    assert len(digests) == 5


def test_a_reused_block_is_found_no_more(manager_class: Any) -> None:
    """B011: eviction removes the old entry at that moment."""
    manager = build(manager_class, num_blocks=4, block_size=4)
    serve(manager, range(8))
    serve(manager, range(50, 66))
    assert manager.usage() == BlockUsage(total=4, used=0, cached=4, free=0)
    assert manager.match_prefix(range(9)) == 0
    assert serve(manager, range(8)) == 0
    assert manager.match_prefix([*range(50, 66), 0]) == 8  # the two deepest gave way


def test_requests_that_compute_the_same_side_by_side_leave_one_copy(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=12, block_size=4)
    for name in "abc":
        manager.allocate(name, range(9), 9)
    for name in "abc":
        manager.commit(name, range(9), 9)
    assert manager.usage().used == 9
    manager.free("a")
    assert manager.usage() == BlockUsage(total=12, used=6, cached=0, free=6)
    assert manager.match_prefix(range(9)) == 8
    manager.free("c")
    manager.free("b")
    assert manager.usage() == BlockUsage(total=12, used=0, cached=2, free=10)
    assert serve(manager, range(9)) == 8


def test_hits_count_as_available_once(manager_class: Any) -> None:
    """B15: blocks that a hit revives are not there for the rest of the same request."""
    manager = build(manager_class, num_blocks=4, block_size=4)
    serve(manager, range(12))
    compute(manager, "other", [90])
    assert manager.usage() == BlockUsage(total=4, used=1, cached=3, free=0)
    assert manager.can_allocate(range(14), 14) is AllocationStatus.LATER
    assert manager.allocate("r", range(14), 14) is None
    assert manager.can_allocate(range(10), 10) is AllocationStatus.OK
    allocation = manager.allocate("r", range(10), 10)
    assert allocation == Allocation(num_cached_tokens=8)


def test_statistics_count_admissions_only(manager_class: Any) -> None:
    """B19: probes and refused admissions leave them alone."""
    manager = build(manager_class, num_blocks=3, block_size=4)
    assert manager.prefix_stats() == PrefixStats()
    assert manager.prefix_stats().hit_rate == 0.0
    compute(manager, "a", range(8))
    manager.match_prefix(range(8))
    manager.can_allocate(range(8), 8)
    assert manager.allocate("b", range(16), 16) is None
    assert manager.prefix_stats() == PrefixStats(num_queried_tokens=8, num_hit_tokens=0)
    compute(manager, "c", [*range(4), 9, 9, 9, 9])
    assert manager.prefix_stats() == PrefixStats(num_queried_tokens=16, num_hit_tokens=4)
    assert manager.prefix_stats().hit_rate == 0.25


def test_a_swapped_request_is_shared_again_after_its_next_commit(manager_class: Any) -> None:
    manager = build(manager_class, num_blocks=6, block_size=4, num_host_blocks=4)
    compute(manager, "a", range(9))
    manager.swap_out("a")
    assert manager.usage().cached == 2
    serve(manager, range(50, 74))  # evicts them
    assert manager.match_prefix(range(9)) == 0
    manager.swap_in("a")
    assert manager.match_prefix(range(9)) == 0
    manager.append("a", 10)
    manager.commit("a", range(10), 10)
    assert manager.match_prefix(range(9)) == 8


def test_reset_forgets_everything_or_nothing(manager_class: Any) -> None:
    """B18: refused while requests hold blocks, those in host memory included."""
    manager = build(manager_class, num_blocks=6, block_size=4, num_host_blocks=4)
    compute(manager, "a", range(9))
    assert not manager.reset_prefix_cache()
    manager.swap_out("a")
    assert not manager.reset_prefix_cache()
    assert manager.match_prefix(range(9)) == 8
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.match_prefix(range(9)) == 0
    assert manager.usage() == BlockUsage(6, used=0, cached=0, free=6, host_total=4)


def test_without_prefix_caching_nothing_is_shared(manager_class: Any) -> None:
    manager = manager_class(BlockManagerConfig(8, 4, 100, 0.0))
    assert serve(manager, range(8)) == 0
    assert serve(manager, range(8)) == 0
    assert manager.match_prefix(range(8)) == 0
    assert manager.usage().cached == 0
    assert manager.prefix_stats() == PrefixStats()
    assert manager.reset_prefix_cache()


def test_edges_of_the_tree_are_split_where_prefixes_part_and_vanish_with_their_blocks() -> None:
    index = RadixIndex(2, {})
    chain = [index.extend(None, "", b"a", 0)]
    for number, key in enumerate([b"b", b"c", b"d"], start=1):
        chain.append(index.extend(chain[-1], "", key, number))
    (root,) = index._roots[""].values()
    assert root.keys == [b"a", b"b", b"c", b"d"]
    branch = index.extend(chain[1], "", b"x", 4)
    (root,) = index._roots[""].values()
    assert root.keys == [b"a", b"b"]
    assert {key: edge.keys for key, edge in root.children.items()} == {
        b"c": [b"c", b"d"],
        b"x": [b"x"],
    }
    assert index.extend(chain[1], "", b"c", 9) is chain[2]
    assert index.extend(chain[1], "", b"x", 9) is branch
    for block in (branch, *reversed(chain)):
        index.remove(block)
    assert index._roots == {}


def test_block_ids_do_not_depend_on_the_hash_seed() -> None:
    """B24: equal calls give equal ids in any process."""
    script = """
from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
for manager_class in (PagedBlockManager, RadixBlockManager):
    manager = manager_class(BlockManagerConfig(7, 2, 99, 0.0, enable_prefix_caching=True))
    for number in range(60):
        tokens = [number * number % 3, number % 2, number % 5, 1, number % 3, 0]
        if manager.allocate(str(number), tokens, 6, salt=str(number % 2)) is not None:
            manager.commit(str(number), tokens, 6)
            print(manager.block_table(str(number)), manager.usage())
        manager.free(str(number - 1))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("BlockUsage") == 120
