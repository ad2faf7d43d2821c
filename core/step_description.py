"""A step as one readable line, for the debug log."""

from __future__ import annotations

from .block_manager import BlockUsage
from .scheduler import MoveKind, SchedulerStats, StepPlan


def describe_step(
    plan: StepPlan, queues: SchedulerStats, blocks: BlockUsage, seconds: float
) -> str:
    """Which requests, how many tokens each, queues, blocks.

    Args:
        plan: of the step.
        queues, blocks: when it was planned.
        seconds: it took.
    """
    shares = " ".join(f"{item.request_id}:{item.num_new_tokens}" for item in plan.scheduled)
    parts = [
        f"step {plan.step}: {plan.num_tokens} tokens in {seconds * 1e3:.1f} ms [{shares}]",
        f"running {queues.running} waiting {queues.waiting} swapped {queues.swapped}",
        f"blocks {blocks.used}/{blocks.total} ({blocks.fraction:.1%})",
    ]
    pairs = (f"{parent}>{child}" for parent, child in plan.forked)
    hits = (f"{name}:{count}" for name, count in plan.prefix_hits)
    moved = (f"{kind.name.lower()}:{n}" for kind in MoveKind if (n := plan.num_copies(kind)))
    for what, items in (
        ("preempted", plan.preempted),
        ("to host memory", plan.swapped_out),
        ("back", plan.swapped_in),
        ("forked", pairs),
        ("prefix hits", hits),
        ("blocks moved", moved),
    ):
        if listed := " ".join(items):
            parts.append(f"{what} {listed}")
    parts += plan.clipped
    return " | ".join(parts)
