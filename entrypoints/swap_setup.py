"""How much host memory swapped requests get."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.block_manager import BlockManager
from ..core.config import EngineOptions
from ..core.errors import CapacityError, ConfigError, UnsupportedError
from ..core.memory import format_bytes

_DEFAULT_SIZE = 4 * 2**30  # where requests may be swapped and it is not said how much


def choose_num_host_blocks(
    options: EngineOptions,
    device: torch.device,
    manager: type[BlockManager],
    host_block: int,
    free_memory: Callable[[], int],
) -> int:
    """Blocks of swap space.

    Args:
        options: the settings.
        device: where the KV cache is.
        manager: the block manager's class.
        host_block: bytes of a block in host memory.
        free_memory: bytes that can be had there.

    Raises:
        UnsupportedError: the block manager cannot swap, and was asked to.
        ConfigError: requests are to be swapped, and there is no space to swap to.
        CapacityError: the space holds no block, or is not free.
    """
    mode, size, can_swap = options.preemption_mode, options.swap_space, "swap" in manager.powers
    if not can_swap and (size or mode == "swap"):
        asked = f"swap_space={size}" if size else "preemption_mode='swap'"
        raise UnsupportedError(
            f"block manager {manager.name!r}",
            [f"{asked} needs the power 'swap', which it has not: leave it out, or take another"],
        )
    if size is None:
        default = device.type == "cuda" and can_swap and mode != "recompute"
        size = _DEFAULT_SIZE if default else 0
    if not size:
        if mode == "swap":
            raise ConfigError(
                "preemption_mode='swap' needs swap space, and there is none: set swap_space to the "
                "host memory that swapped requests may take, such as 4GiB"
            )
        return 0
    num_blocks = size // host_block
    if num_blocks < 1:
        raise CapacityError(
            f"swap_space={size} (bytes, {format_bytes(size)}) holds no KV block of "
            f"{format_bytes(host_block)}; a size such as 4GiB does"
        )
    free = free_memory()
    if num_blocks * host_block > free:
        raise CapacityError(
            f"swap_space={format_bytes(size)} is more than the {format_bytes(free)} of host memory "
            "that are free; lower swap_space, or set it to 0"
        )
    return num_blocks
