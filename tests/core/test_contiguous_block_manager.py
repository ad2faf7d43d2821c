"""The baseline that reserves room for the longest request possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.core.block_manager import (
    AllocationStatus,
    BlockManagerConfig,
    BlockUsage,
)
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.errors import UnsupportedError

NAMES = "abcdef"


def build(
    num_blocks: int, block_size: int, max_model_len: int, watermark: float = 0.0
) -> ContiguousBlockManager:
    config = BlockManagerConfig(num_blocks, block_size, max_model_len, watermark)
    return ContiguousBlockManager(config)


@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 16),
    st.sampled_from([0.0, 0.3, 0.6]),
    st.lists(st.tuples(st.sampled_from("+-~"), st.sampled_from(NAMES), st.integers(1, 20))),
)
def test_reservations_are_runs_that_never_overlap(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    watermark: float,
    operations: list[tuple[str, str, int]],
) -> None:
    """B1, B2, B6 to B9, B15: against a list of blocks with an owner each."""
    manager = build(num_blocks, block_size, max_model_len, watermark)
    owner: list[str | None] = [None] * num_blocks
    length = -(-max_model_len // block_size)
    longest = length * block_size if length <= num_blocks else 0
    assert manager.largest_request() == longest
    for action, name, num_tokens in operations:
        live = {holder for holder in owner if holder is not None}
        if action == "+" and name not in live:
            starts = [
                start
                for start in range(num_blocks - length + 1)
                if all(holder is None for holder in owner[start : start + length])
            ]
            kept = int(watermark * num_blocks) if live else 0
            fits = bool(starts) and owner.count(None) - length >= kept and num_tokens <= longest
            status = manager.can_allocate(range(num_tokens), num_tokens)
            allocation = manager.allocate(name, range(num_tokens), num_tokens)
            assert (status is AllocationStatus.OK) == (allocation is not None) == fits
            assert (status is AllocationStatus.NEVER) == (num_tokens > longest)
            if fits:
                owner[starts[0] : starts[0] + length] = [name] * length
        elif action == "-":
            manager.free(name)
            manager.free(name)
            owner = [None if holder == name else holder for holder in owner]
        elif action == "~" and name in live:
            before = manager.usage()
            assert (manager.append(name, num_tokens) is None) == (num_tokens > longest)
            assert manager.usage() == before
        free = owner.count(None)
        assert manager.usage() == BlockUsage(num_blocks, num_blocks - free, 0, free)
        for holder in {holder for holder in owner if holder is not None}:
            blocks = [block for block in range(num_blocks) if owner[block] == holder]
            assert manager.block_table(holder).tolist() == blocks
    for name in NAMES:
        manager.free(name)
    assert manager.usage().free == num_blocks
    assert manager._gaps == [(0, num_blocks)]


def test_it_serves_fewer_requests_than_paging() -> None:
    """What the baseline is for: short requests reserve as much as long ones."""
    config = BlockManagerConfig(64, 4, 64, 0.0)
    counts = []
    for manager in (ContiguousBlockManager(config), PagedBlockManager(config)):
        names = map(str, range(100))
        counts.append(sum(manager.allocate(n, range(6), 6) is not None for n in names))
    assert counts == [4, 32]


def test_a_gap_that_is_too_short_is_of_no_use() -> None:
    manager = build(num_blocks=7, block_size=1, max_model_len=3)
    for name in "ab":
        assert manager.allocate(name, [1], 1) is not None
    manager.free("a")
    assert manager.usage().free == 4
    assert manager.allocate("c", [1], 1) is not None
    assert manager.can_allocate([1], 1) is AllocationStatus.LATER


def test_misuse_is_refused() -> None:
    manager = build(num_blocks=8, block_size=2, max_model_len=8)
    manager.allocate("r", [1, 2, 3], 2)
    with pytest.raises(ValueError, match="has blocks already"):
        manager.allocate("r", [1, 2, 3], 2)
    for num_tokens in (0, 4):
        with pytest.raises(ValueError, match="at least 1 and at most 3"):
            manager.allocate("s", [1, 2, 3], num_tokens)
    with pytest.raises(ValueError, match="read-only"):
        manager.block_table("r")[0] = 1
    with pytest.raises(KeyError):
        manager.append("s", 1)
    with pytest.raises(UnsupportedError, match="'contiguous': swap is not supported"):
        manager.swap_out("r")


def test_prefix_caching_is_refused_and_lookahead_is_not() -> None:
    with pytest.raises(UnsupportedError, match="enable_prefix_caching=True needs"):
        ContiguousBlockManager(BlockManagerConfig(8, 2, 8, enable_prefix_caching=True))
    manager = ContiguousBlockManager(BlockManagerConfig(8, 2, 8, num_lookahead_tokens=3))
    assert manager.largest_request() == 8
