"""Speed of swapping KV blocks between a GPU and host memory, against plain pinned copies.

    python benchmarks/swap_gpu.py --output benchmarks/results/swap_gpu.json

Some GiB of KV blocks of a model's shape go to host memory and come back to other blocks, all at
once and in portions of one request, from neighbouring blocks and from scattered ones. Beside each:
plain copies of as many bytes between one pinned buffer and one device buffer. The contents are
compared afterwards, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jackfield
from jackfield.core.attention import KVCache, KVCacheSpec, allocate_kv_cache
from jackfield.core.block_manager import BlockCopy
from jackfield.core.kv_movement import KVMover, block_rows, host_block_bytes
from jackfield.core.scheduler import KVMove, MoveKind

GIB = 2**30
DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="KV that is moved")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layouts", nargs="+", default=["NHD", "HND"], choices=["NHD", "HND"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--portion", type=int, default=64, help="blocks of one request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of some runs, each from idle to idle."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def plain_copies(num_bytes: int, repeats: int) -> dict[str, float]:
    """GB/s of one copy in each direction, 1 GiB at a time."""
    size = min(num_bytes, GIB)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    out = best_seconds(lambda: host.copy_(device, non_blocking=True), repeats)
    back = best_seconds(lambda: device.copy_(host, non_blocking=True), repeats)
    return {"plain_out": size / out / 1e9, "plain_in": size / back / 1e9}


def make_caches(
    arguments: argparse.Namespace, layout: Any, dtype: torch.dtype
) -> tuple[list[KVCache], int, int]:
    """Caches of all layers with random bytes; twice as many blocks as are moved, their number, and
    the bytes of one block."""
    heads, size = arguments.kv_heads, arguments.head_size
    one = KVCacheSpec(1, arguments.block_size, heads, size, size, dtype)
    host_block = host_block_bytes([one] * arguments.layers)
    num_blocks = int(arguments.gib * GIB) // host_block
    spec = replace(one, num_blocks=2 * num_blocks)
    caches = [
        allocate_kv_cache(spec, layout, torch.device("cuda")) for _ in range(arguments.layers)
    ]
    for tensor in tensors(caches):
        tensor.view(torch.uint8).random_(0, 256)
    return caches, num_blocks, host_block


def tensors(caches: list[KVCache]) -> list[Tensor]:
    """Each cache tensor as rows of blocks."""
    return [block_rows(tensor) for cache in caches for tensor in (cache.k, cache.v)]


def portions(kind: MoveKind, sources: list[int], targets: list[int], size: int) -> list[KVMove]:
    """Moves of ``size`` blocks each."""
    pairs = [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
    return [KVMove(kind, tuple(pairs[i : i + size])) for i in range(0, len(pairs), size)]


def measure(
    mover: KVMover,
    caches: list[KVCache],
    num_blocks: int,
    num_bytes: int,
    scattered: bool,
    together: bool,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """GB/s out and in, and the time until the host may go on."""
    order = list(range(num_blocks))
    host = list(range(num_blocks))
    if scattered:
        random.Random(0).shuffle(order)
        random.Random(1).shuffle(host)
    back = [num_blocks + block for block in order]
    size = num_blocks if together else arguments.portion
    outs = portions(MoveKind.SWAP_OUT, order, host, size)
    ins = portions(MoveKind.SWAP_IN, host, back, size)

    def run(moves: list[KVMove]) -> None:
        for move in moves:  # one step each
            mover.execute([move])

    for tensor in tensors(caches):
        tensor[num_blocks:].zero_()
    out_seconds = best_seconds(lambda: run(outs), arguments.repeats)
    in_seconds = best_seconds(lambda: run(ins), arguments.repeats)
    equal = all(bool(torch.equal(t[:num_blocks], t[num_blocks:])) for t in tensors(caches))
    started = time.perf_counter()
    mover.execute([outs[0]])
    enqueued = time.perf_counter() - started
    return {
        "blocks": "scattered" if scattered else "neighbours",
        "portion": size,
        "out": num_bytes / out_seconds / 1e9,
        "in": num_bytes / in_seconds / 1e9,
        "enqueue_ms": enqueued * 1e3,
        "contents_equal": equal,
    }


def main() -> int:
    """Measure, print, write down; 1 if contents differ."""
    arguments = parse_arguments()
    rows: list[dict[str, Any]] = []
    for name in arguments.dtypes:
        for layout in arguments.layouts:
            caches, num_blocks, host_block = make_caches(arguments, layout, DTYPES[name])
            mover = KVMover(caches, num_blocks)
            num_bytes = num_blocks * host_block
            plain = plain_copies(num_bytes, arguments.repeats)
            for scattered in (False, True):
                for together in (True, False):
                    row = {"dtype": name, "layout": layout, "gib": num_bytes / GIB}
                    row |= measure(
                        mover, caches, num_blocks, num_bytes, scattered, together, arguments
                    )
                    rows.append(row | plain)
                    print(
                        f"{name} {layout} {row['blocks']:>10}, {row['portion']:5} blocks a step: "
                        f"out {row['out']:5.1f} GB/s (plain {plain['plain_out']:5.1f}), "
                        f"in {row['in']:5.1f} GB/s (plain {plain['plain_in']:5.1f}), "
                        f"enqueued in {row['enqueue_ms']:.2f} ms, "
                        f"contents {'equal' if row['contents_equal'] else 'DIFFER'}",
                        flush=True,
                    )
            del mover, caches
            torch.cuda.empty_cache()
    if arguments.output is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "jackfield": jackfield.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(),
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["contents_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
