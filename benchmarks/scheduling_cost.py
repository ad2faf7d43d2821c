"""What scheduling a decoding step costs on the host.

    python benchmarks/scheduling_cost.py --output benchmarks/results/scheduling_cost.json

The built-in scheduler with the ``fcfs`` policy, without a model: microseconds of ``schedule``, of
``update`` (committing to the block manager included) and of both (``step``) for a step in which
every running request computes one token, at several numbers of running and waiting requests. The
median over the steps; other work on the machine shows in the difference to the fastest one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from reporting import write_report

from jackfield import SamplingParams
from jackfield.core.block_manager import BlockManager, BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.request import Request
from jackfield.core.scheduler import SchedulerConfig
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler

PROMPT, BLOCK_SIZE, LONGEST = 100, 16, 4096
MANAGERS: dict[str, type[BlockManager]] = {"paged": PagedBlockManager, "radix": RadixBlockManager}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", nargs="+", type=int, default=[16, 256, 1024])
    parser.add_argument("--waiting", nargs="+", type=int, default=[0, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--block-manager", default="paged", choices=sorted(MANAGERS))
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def build(running: int, waiting: int, arguments: argparse.Namespace) -> QueueScheduler:
    """A scheduler whose seats are all taken by decoding requests."""
    num_blocks = running * LONGEST // BLOCK_SIZE
    config = BlockManagerConfig(
        num_blocks, BLOCK_SIZE, LONGEST, enable_prefix_caching=arguments.enable_prefix_caching
    )
    scheduler = QueueScheduler(
        SchedulerConfig(running * PROMPT, running, LONGEST),
        MANAGERS[arguments.block_manager](config),
        FcfsPolicy(),
    )
    params = SamplingParams()
    for index in range(running + waiting):
        prompt = [index % 1000] * PROMPT
        scheduler.add(Request(str(index), prompt, params, 0.0, index, LONGEST), 0.0)
    return scheduler


def measure(running: int, waiting: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Microseconds per step."""
    scheduler = build(running, waiting, arguments)
    times: dict[str, list[float]] = {"schedule": [], "update": [], "step": []}
    for step in range(arguments.steps + 10):
        started = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        sampled = {item.request_id: 7 for item in plan.scheduled}
        told = time.perf_counter()
        scheduler.update(plan, sampled, 0.0)
        done = time.perf_counter()
        if step >= 10:  # the prompts, and caches of the processor
            times["schedule"].append(planned - started)
            times["update"].append(done - told)
            times["step"].append(planned - started + done - told)
    result = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    fastest = {f"{name}_fastest": min(values) * 1e6 for name, values in times.items()}
    return {"running": running, "waiting": waiting, **result, **fastest}


def main() -> None:
    """Measure, print a table, and write it down."""
    arguments = parse_arguments()
    timed = ("schedule", "update", "step")
    columns = ("running", "waiting", *timed, *(f"{name}_fastest" for name in timed))
    print("  ".join(f"{column:>16}" for column in columns) + "   (microseconds)")
    rows = []
    for running in arguments.running:
        for waiting in arguments.waiting:
            row = measure(running, waiting, arguments)
            rows.append(row)
            print("  ".join(f"{row[column]:16.0f}" for column in columns), flush=True)
    report = {
        "block_manager": arguments.block_manager,
        "enable_prefix_caching": arguments.enable_prefix_caching,
        "steps": arguments.steps,
        "rows": rows,
    }
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
