"""Slots of scheduled requests, those of lookahead included."""

from __future__ import annotations

import pytest

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import SchedulerConfig
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler


@pytest.mark.parametrize("lookahead", [0, 1, 3, 5])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 17, 18, 20])
def test_one_token_more_than_is_writable_needs_another_block(
    lookahead: int, num_tokens: int
) -> None:
    config = BlockManagerConfig(10, 4, 20, num_lookahead_tokens=lookahead)
    most = config.writable_tokens(num_tokens)
    assert most >= num_tokens
    assert config.blocks_for(most) == config.blocks_for(num_tokens)
    assert most >= config.max_model_len or config.blocks_for(most + 1) > config.blocks_for(most)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_each_step_has_its_lookahead_slots(lookahead: int, mode: str) -> None:
    """The slots are there before the step is computed, after preemption and return too."""
    blocks = BlockManagerConfig(
        9, 4, 24, watermark=0.0, num_host_blocks=9, num_lookahead_tokens=lookahead
    )
    manager = PagedBlockManager(blocks)
    config = SchedulerConfig(8, 4, 24, 3, preemption_mode=mode)  # type: ignore[arg-type]
    scheduler = QueueScheduler(config, manager, FcfsPolicy())
    for index in range(3):
        name, prompt = f"r{index}", [index] * 7
        scheduler.add(Request(name, prompt, SamplingParams(), 0.0, index, 24), 0.0)
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        for item in plan.scheduled:
            end = item.num_computed_tokens + item.num_new_tokens
            slots = len(manager.block_table(item.request_id)) * 4
            assert slots >= min(end + lookahead, 24)
        scheduler.update(plan, {item.request_id: 9 for item in plan.scheduled}, 0.0)
    assert scheduler.stats().num_preemptions > 0
    assert manager.usage().used == 0
