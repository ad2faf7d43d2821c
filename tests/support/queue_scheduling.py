"""A ``QueueScheduler`` in a small world, and its steps."""

from __future__ import annotations

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.request import Request, SchedulingHints
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import SchedulerConfig, StepPlan
from jackfield.core.scheduling_policy import SchedulingPolicy
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler


def request(name: str, prompt: int, completion: int = 4, priority: int = 0) -> Request:
    """A request that arrives at time 0; token 2 ends it early."""
    return Request(
        request_id=name,
        prompt_token_ids=list(range(100, 100 + prompt)),
        params=SamplingParams(),
        arrival_time=0.0,
        arrival_index=0,
        max_total_tokens=prompt + completion,
        stop_token_ids=frozenset({2}),
        hints=SchedulingHints(priority=priority),
    )


def build(
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    seats: int = 8,
    max_model_len: int = 1000,
    policy: SchedulingPolicy | None = None,
    chunk: int | None = None,
    chunked: bool = True,
    manager: type[PagedBlockManager] = PagedBlockManager,
) -> QueueScheduler:
    """A scheduler that has not met any request, with a block manager of its own."""
    return QueueScheduler(
        SchedulerConfig(budget, seats, max_model_len, chunk, chunked),
        manager(BlockManagerConfig(num_blocks, block_size, max_model_len, 0.0)),
        policy or FcfsPolicy(),
    )


def shares(plan: StepPlan) -> dict[str, int]:
    """How many tokens each request computes in a step."""
    return {item.request_id: item.num_new_tokens for item in plan.scheduled}


def step(scheduler: QueueScheduler, token: int = 7) -> StepPlan:
    """One step, in which every request that samples gets ``token``."""
    plan = scheduler.schedule(0.0)
    sampled = {item.request_id: token for item in plan.scheduled if item.samples}
    scheduler.update(plan, sampled, 0.0)
    return plan


def run(scheduler: QueueScheduler, most: int = 1000) -> list[StepPlan]:
    """Steps until nothing is left; more than ``most`` are a fault."""
    plans = []
    while scheduler.has_unfinished():
        plans.append(step(scheduler))
        assert len(plans) < most, "does not come to an end"
    return plans
