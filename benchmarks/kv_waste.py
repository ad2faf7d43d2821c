"""How much of the reserved KV cache holds no token, for each block manager.

    python benchmarks/kv_waste.py --output benchmarks/results/kv_waste.json

The lengths of a trace's requests are replayed through the built-in scheduler (policy ``fcfs``) and
the block managers, without a model: sampled tokens are made up, and a request ends when it has as
many as in the trace. All requests are there from the first step, in the order of the trace, so the
pool is full until the last ones run. The pool is what a GPU of 80 GB has beside a model of 13
billion parameters. Prefix caching is off: the trace does not say which prompts have a common
beginning.

What is counted, in every step, when its tokens are computed and before requests that end give
their blocks back:

- *reserved*: the slots of all blocks that requests hold;
- *empty*: those of them that hold no token. Of these, *later* ones get a token of the same request
  before it ends; *never* ones stay empty until it is given back.

The share of empty slots is empty / reserved, averaged over the steps, each step counted once. The
very last token of a request is sampled and never computed, so it needs no slot.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reporting import write_report

from jackfield import SamplingParams
from jackfield.core.block_manager import BlockManager, BlockManagerConfig
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.errors import RequestError
from jackfield.core.request import Request
from jackfield.core.scheduler import SchedulerConfig
from jackfield.schedulers.fcfs import FcfsPolicy
from jackfield.schedulers.queue_scheduler import QueueScheduler

TRACE = Path(__file__).parent / "data" / "azure_llm_2023_conv_lengths.csv.gz"
MANAGERS: dict[str, type[BlockManager]] = {
    "paged": PagedBlockManager,
    "radix": RadixBlockManager,
    "contiguous": ContiguousBlockManager,
}
#: A model of 13 billion parameters in 16 bits, without grouped heads, on a GPU of 80 GB.
LAYERS, KV_HEADS, HEAD_SIZE, WEIGHTS = 40, 40, 128, 13.0e9
GPU_BYTES, UTILIZATION, BYTES_PER_NUMBER = 80e9, 0.9, 2
TOKEN = 7


@dataclass(frozen=True)
class Case:
    """One replay: a block manager, its block size in tokens, and the most tokens of a request."""

    manager: str
    block_size: int
    max_model_len: int


#: 8192 holds all requests of the trace but one; 4096 and 2048 favour the manager that reserves it.
CASES = (
    *(Case("paged", block_size, 8192) for block_size in (8, 16, 32)),
    Case("radix", 16, 8192),
    Case("contiguous", 16, 8192),
    Case("paged", 16, 4096),
    Case("contiguous", 16, 4096),
    Case("paged", 16, 2048),
    Case("contiguous", 16, 2048),
)


@dataclass(frozen=True)
class Limits:
    """What all replays have in common: slots of the pool, most tokens of a step, most requests
    that hold blocks at a time."""

    pool_slots: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True)
class Slots:
    """Slots of one step: those of all blocks in use, those that hold a token, and those that will
    never hold one."""

    reserved: int
    held: int
    never: int

    @property
    def empty(self) -> float:
        """Share of the reserved slots that hold no token."""
        return 1 - self.held / self.reserved


def pool_slots() -> int:
    """Slots of the pool: tokens whose keys and values fit beside the weights."""
    free = GPU_BYTES * UTILIZATION - WEIGHTS * BYTES_PER_NUMBER
    return int(free // (2 * LAYERS * KV_HEADS * HEAD_SIZE * BYTES_PER_NUMBER))


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Prompt and completion lengths of a trace: a CSV file, compressed or not, with the columns
    ``ContextTokens`` and ``GeneratedTokens``; others are left alone."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    rows = csv.DictReader(io.StringIO(text))
    return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]


def count_slots(held: Mapping[str, int], finals: Mapping[str, int], manager: BlockManager) -> Slots:
    """The slots of a step.

    Args:
        held: tokens in the cache of each request that holds blocks.
        finals: tokens of each request that will have been in the cache when it ends.
        manager: whose blocks they are; no two requests share one.
    """
    size, reserved, never = manager.config.block_size, 0, 0
    for name in held:
        slots = len(manager.block_table(name)) * size
        reserved += slots
        never += max(0, slots - finals[name])
    used = manager.usage().used * size
    if reserved != used:
        raise RuntimeError(f"block tables have {reserved} slots, and {used} are in use")
    return Slots(reserved, sum(held.values()), never)


class Replay:
    """All requests of a trace in one scheduler.

    Attributes:
        refused: requests that the scheduler refused because they can never fit.
        preemptions: how often a request lost its blocks.
    """

    def __init__(self, case: Case, lengths: Sequence[tuple[int, int]], limits: Limits) -> None:
        config = BlockManagerConfig(
            limits.pool_slots // case.block_size, case.block_size, case.max_model_len
        )
        self._manager = MANAGERS[case.manager](config)
        self._scheduler = QueueScheduler(
            SchedulerConfig(limits.max_num_batched_tokens, limits.max_num_seqs, case.max_model_len),
            self._manager,
            FcfsPolicy(),
        )
        self._finals: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self.refused = 0
        self.preemptions = 0
        for index, (prompt, completion) in enumerate(lengths):
            self._add(index, prompt, prompt + completion)

    @property
    def num_left(self) -> int:
        """Requests that have not ended."""
        return len(self._finals)

    def step(self) -> tuple[int, Slots]:
        """Carry out a step; requests that held blocks in it, and the slots."""
        plan = self._scheduler.schedule(0.0)
        for name in plan.preempted:
            self._held.pop(name, None)
        self.preemptions += len(plan.preempted)
        sampled: dict[str, int] = {}
        for item in plan.scheduled:
            self._held[item.request_id] = item.num_computed_tokens + item.num_new_tokens
            if item.samples:
                sampled[item.request_id] = TOKEN
        result = len(self._held), count_slots(self._held, self._finals, self._manager)
        for name in self._scheduler.update(plan, sampled, 0.0):
            if self._held.pop(name) != self._finals.pop(name):
                raise RuntimeError(f"request {name} ended with another length than in the trace")
        return result

    def _add(self, index: int, prompt: int, total: int) -> None:
        name = str(index)
        request = Request(name, range(prompt), SamplingParams(), 0.0, index, total)
        try:
            self._scheduler.add(request, 0.0)
        except RequestError:
            self.refused += 1
        else:
            self._finals[name] = total - 1


def summarise(steps: Iterable[tuple[int, Slots]], pool: int) -> dict[str, float]:
    """Averages over steps, each counted once; ``pool`` is the slots of the pool."""
    rows = list(steps)
    mean = statistics.fmean
    never = mean(slots.never / slots.reserved for _, slots in rows)
    empty = mean(slots.empty for _, slots in rows)
    return {
        "steps": len(rows),
        "mean_running": mean(running for running, _ in rows),
        "empty": empty,
        "empty_later": empty - never,
        "empty_never": never,
        "pool_reserved": mean(slots.reserved / pool for _, slots in rows),
        "pool_held": mean(slots.held / pool for _, slots in rows),
    }


def run(case: Case, lengths: Sequence[tuple[int, int]], limits: Limits) -> dict[str, object]:
    """Replay one case to its end, with progress on the terminal."""
    replay = Replay(case, lengths, limits)
    served = replay.num_left
    steps: list[tuple[int, Slots]] = []
    next_report = time.monotonic() + 5
    while replay.num_left:
        steps.append(replay.step())
        if time.monotonic() > next_report:
            next_report += 5
            print(f"  {case}: {served - replay.num_left}/{served} requests", flush=True)
    averages = summarise(steps, limits.pool_slots)
    return {
        **asdict(case),
        "served": served,
        "refused": replay.refused,
        "preemptions": replay.preemptions,
        **averages,
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE, help="CSV, as benchmarks/data has it")
    parser.add_argument("--requests", type=int, help="only the first ones of the trace")
    parser.add_argument("--pool-slots", type=int, default=pool_slots(), help="tokens that fit")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--managers", nargs="+", default=list(MANAGERS), choices=list(MANAGERS))
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Replay, print a table, write it down."""
    arguments = parse_arguments()
    lengths = read_lengths(arguments.trace)[: arguments.requests]
    limits = Limits(arguments.pool_slots, arguments.max_num_batched_tokens, arguments.max_num_seqs)
    cases = [case for case in CASES if case.manager in arguments.managers]
    rows = []
    for case in cases:
        row = run(case, lengths, limits)
        rows.append(row)
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            ),
            flush=True,
        )
    report = {
        "trace": arguments.trace.name,
        "requests": len(lengths),
        "prompt_tokens": sum(prompt for prompt, _ in lengths),
        "generated_tokens": sum(completion for _, completion in lengths),
        "longest_request": max(map(sum, lengths)),
        "limits": asdict(limits),
        "rows": rows,
    }
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
