"""How much host memory swapped requests get."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..core.block_manager import BlockManager
from ..core.config import EngineOptions
from ..core.errors import CapacityError, ConfigError, UnsupportedError
from ..core.memory import format_bytes
from ..core.scheduler import Scheduler
from ..core.scheduling_policy import SchedulingPolicy
from ..schedulers.queue_scheduler import QueueScheduler

logger = logging.getLogger("jackfield")

_DEFAULT_SIZE = 4 * 2**30  # where requests may be swapped and it is not said how much


def choose_num_host_blocks(
    options: EngineOptions,
    device: torch.device,
    manager: type[BlockManager],
    scheduler: type[Scheduler],
    policy: type[SchedulingPolicy],
    host_block: int,
    free_memory: Callable[[], int],
) -> int:
    """Blocks of swap space.

    Space that nothing may use, and a mode that is another one without space, are warned of.

    Args:
        options: the settings.
        device: where the KV cache is.
        manager: the block manager's class.
        scheduler: the scheduler's class.
        policy: the scheduling policy's class.
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
        if mode == "auto":
            logger.warning("%s", _auto_without_space(options, manager, can_swap))
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
    if mode == "recompute":
        logger.warning("%s", _space_beside_recompute(scheduler, policy, size))
    return num_blocks


def _auto_without_space(options: EngineOptions, manager: type[BlockManager], can_swap: bool) -> str:
    """Why mode ``auto`` swaps nobody."""
    if not can_swap:
        return (
            "preemption_mode='auto' computes every victim anew, as the block manager "
            f"{manager.name!r} cannot swap: take another, or set preemption_mode='recompute'"
        )
    where = "the default on a CPU is none" if options.swap_space is None else "swap_space=0"
    return (
        f"preemption_mode='auto' computes every victim anew, as there is no swap space ({where}): "
        "set swap_space, such as 4GiB, or preemption_mode='recompute'"
    )


def _space_beside_recompute(
    scheduler: type[Scheduler], policy: type[SchedulingPolicy], size: int
) -> str:
    """Who, if anybody, uses swap space in mode ``recompute``: a policy may name the mode itself,
    and another scheduler than the built-in one may do as it likes."""
    space = f"swap_space={format_bytes(size)}"
    if scheduler is QueueScheduler and not policy.may_ask_for_swap:
        return (
            f"{space} is taken from host memory and never used: preemption_mode='recompute' "
            f"computes victims anew, and the scheduling policy {policy.name!r} asks for no swap, "
            "as another might; set preemption_mode to 'swap' or 'auto', or leave swap_space out"
        )
    return (
        f"{space} is used only if the scheduler {scheduler.name!r} or the scheduling policy "
        f"{policy.name!r} asks for it: "
        "preemption_mode='recompute' computes all other victims anew; set preemption_mode to "
        "'swap' or 'auto' to swap them"
    )
