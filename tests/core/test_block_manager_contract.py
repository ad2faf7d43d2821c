"""What the contract gives to every block manager, those of other distributions too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jackfield.core.block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
    PrefixStats,
)
from jackfield.core.errors import ConfigError, UnsupportedError


class PlainManager(BlockManager):
    """Has what the contract demands, and no optional power."""

    name = "plain"

    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        return AllocationStatus.OK

    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        return Allocation()

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        return ()

    def free(self, request_id: str) -> None:
        return None

    def block_table(self, request_id: str) -> BlockTable:
        if request_id != "r":
            raise KeyError(request_id)
        return np.arange(3, dtype=np.int32)

    def usage(self) -> BlockUsage:
        return BlockUsage(total=8, used=3, cached=1, free=4)

    def largest_request(self) -> int:
        return 8


class WithSwap(PlainManager):
    """Has one power."""

    powers = frozenset({"swap"})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"max_model_len": 0}, "max_model_len=0 must be at least 1"),
        ({"watermark": 1.0}, "watermark=1.0 must be at least 0 and below 1"),
        ({"watermark": -0.1}, "watermark=-0.1"),
        ({"watermark": float("nan")}, "watermark=nan"),
        ({"num_host_blocks": -1}, "num_host_blocks=-1 must be at least 0"),
        ({"num_lookahead_tokens": -1}, "num_lookahead_tokens=-1 must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BlockManagerConfig(**{"num_blocks": 4, "block_size": 4, "max_model_len": 100, **settings})


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (2, 2), (6, 3), (7, 3), (9, 3), (10, 3), (13, 4)]
)
def test_blocks_for_a_number_of_tokens(num_tokens: int, num_blocks: int) -> None:
    config = BlockManagerConfig(16, 4, max_model_len=10, num_lookahead_tokens=3)
    assert config.blocks_for(num_tokens) == num_blocks


def test_a_configuration_that_asks_for_a_missing_power_is_refused() -> None:
    config = BlockManagerConfig(
        8, 4, 100, num_host_blocks=2, enable_prefix_caching=True, num_lookahead_tokens=1
    )
    with pytest.raises(UnsupportedError, match="block manager 'plain'") as refusal:
        PlainManager(config)
    settings = [reason.split("=")[0] for reason in refusal.value.reasons]
    assert settings == ["enable_prefix_caching", "num_host_blocks", "num_lookahead_tokens"]
    with pytest.raises(UnsupportedError, match=r"power 'lookahead'.*powers \(swap\)"):
        WithSwap(config)
    assert WithSwap(BlockManagerConfig(8, 4, 100, num_host_blocks=2)).config.num_host_blocks == 2


def test_optional_calls_are_refused_by_name() -> None:
    manager = PlainManager(BlockManagerConfig(8, 4, 100))
    manager.commit("r", [1, 2, 3], 3)
    with pytest.raises(UnsupportedError, match=r"'plain': fork is not supported.*powers: none"):
        manager.fork("r", "s")
    for call in (manager.swap_out, manager.swap_in):
        with pytest.raises(UnsupportedError, match="swap is not supported"):
            call("r")
    with pytest.raises(UnsupportedError, match="prefix_caching is not supported"):
        manager.reset_prefix_cache()


def test_what_a_manager_without_sharing_need_not_write() -> None:
    manager = PlainManager(BlockManagerConfig(8, 4, 100))
    assert manager.match_prefix([1, 2, 3], salt="x") == 0
    assert manager.prefix_stats() == PrefixStats()
    assert not manager.is_swapped("r")
    assert manager.reclaimable("r") == 3
    with pytest.raises(KeyError):
        manager.reclaimable("s")


def test_usage_counts_cached_blocks_as_available() -> None:
    usage = PlainManager(BlockManagerConfig(8, 4, 100)).usage()
    assert usage.available == 5
    assert usage.fraction == 3 / 8
    assert (usage.host_total, usage.host_used) == (0, 0)
