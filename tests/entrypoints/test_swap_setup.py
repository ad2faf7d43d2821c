"""How much swap space there is, and what is said of space or a mode that changes nothing."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from jackfield.core.block_manager import BlockManager
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.config import EngineOptions
from jackfield.core.scheduler import Scheduler
from jackfield.core.scheduling_policy import SchedulingPolicy
from jackfield.entrypoints.swap_setup import choose_num_host_blocks
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler

GIB = 2**30


class MyPolicy(SchedulingPolicy):
    """It does not say that it asks for no swap."""

    name = "mine"


class MyScheduler(QueueScheduler):
    """It may swap of its own accord."""

    name = "own"


def choose(
    device: str = "cpu",
    manager: type[BlockManager] = PagedBlockManager,
    scheduler: type[Scheduler] = QueueScheduler,
    policy: type[SchedulingPolicy] = FcfsPolicy,
    **settings: Any,
) -> int:
    """Blocks of 1 MiB, of 64 GiB that are free."""
    options = EngineOptions.model_validate(settings)
    return choose_num_host_blocks(
        options, torch.device(device), manager, scheduler, policy, 2**20, lambda: 64 * GIB
    )


WARNINGS = [
    (
        {"swap_space": "1GiB"},
        1024,
        r"^swap_space=1\.00 GiB is taken from host memory and never used: "
        r"preemption_mode='recompute' .*'fcfs' asks for no swap, as another might; set "
        r"preemption_mode to 'swap' or 'auto', or leave swap_space out$",
    ),
    (
        {"swap_space": "1GiB", "policy": MyPolicy},
        1024,
        r"^swap_space=1\.00 GiB is used only if the scheduler 'queue' or the scheduling policy "
        r"'mine' asks for it: preemption_mode='recompute' computes all other victims anew",
    ),
    (
        {"swap_space": "1GiB", "scheduler": MyScheduler},
        1024,
        r"^swap_space=1\.00 GiB is used only if the scheduler 'own' or the scheduling policy "
        r"'fcfs' asks for it: preemption_mode='recompute' computes all other victims anew",
    ),
    (
        {"preemption_mode": "auto"},
        0,
        r"^preemption_mode='auto' computes every victim anew, as there is no swap space "
        r"\(the default on a CPU is none\): set swap_space, such as 4GiB",
    ),
    (
        {"preemption_mode": "auto", "swap_space": 0, "device": "cuda"},
        0,
        r"there is no swap space \(swap_space=0\): set swap_space",
    ),
    (
        {"preemption_mode": "auto", "manager": ContiguousBlockManager, "device": "cuda"},
        0,
        r"^preemption_mode='auto' computes every victim anew, as the block manager 'contiguous' "
        r"cannot swap: take another, or set preemption_mode='recompute'$",
    ),
]


@pytest.mark.parametrize(("settings", "num_blocks", "sentence"), WARNINGS)
def test_what_changes_nothing_is_said(
    settings: dict[str, Any], num_blocks: int, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jackfield"):
        assert choose(**settings) == num_blocks
    (record,) = caplog.records
    assert re.search(sentence, record.getMessage())


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({}, 0),
        ({"swap_space": 0}, 0),
        ({"device": "cuda"}, 0),
        ({"device": "cuda", "preemption_mode": "auto"}, 4096),
        ({"device": "cuda", "preemption_mode": "swap"}, 4096),
        ({"preemption_mode": "auto", "swap_space": "2GiB"}, 2048),
        ({"preemption_mode": "swap", "swap_space": "2GiB"}, 2048),
        ({"manager": ContiguousBlockManager}, 0),
    ],
)
def test_settings_that_work_are_met_with_silence(
    settings: dict[str, Any], num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "jackfield"):
        assert choose(**settings) == num_blocks
    assert not caplog.records
