"""Time the ``triton`` attention backend on a GPU, beside what the GPU can do at most.

    python benchmarks/attention_gpu.py --output benchmarks/results/attention_gpu.json
    python benchmarks/attention_gpu.py --sweep decode --cases "decode 64x4096 28/4/128"

One run measures the ceilings (a large copy, a large read, a large matrix product), then attention
through the contract: random keys in random blocks, checked against float64 before they are timed.
Bytes are those of the visible keys and values, the query and the output, each once; FLOPs are those
of the two matrix products over visible keys. Before each call the L2 cache is filled by reading
something else: a call finds none of its data there, and nobody else's writes are left for it to
write back. ``--sweep`` times other tiles instead; what to try is in the tables below, or one's own
as ``--prefill-config 128,64,8,2,128`` (rows, keys, warps, stages and, if wanted, registers) and
``--decode-config 64,4,2,256,4,4,1,128`` (keys, warps, stages, keys of a chunk, chunks of a group,
resident programs, rounds and, if wanted, registers), each several times.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jackfield.backends.triton_paged.backend import TritonBackend
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.core.attention import (
    AttentionBatch,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
    allocate_kv_cache,
)

CUDA = torch.device("cuda")
#: A result may be off by this much of its norm: rounding to bfloat16 explains 2e-3.
MAX_ERROR = 5e-3


@dataclass(frozen=True)
class Case:
    """A layer and a batch of equal sequences."""

    kind: str
    num_seqs: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def name(self) -> str:
        """Such as ``decode 64x4096 28/4/128``."""
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_size}"
        return f"{self.kind} {self.num_seqs}x{self.seq_len} {heads}"

    @property
    def query_len(self) -> int:
        """New tokens of each sequence."""
        return self.seq_len if self.kind == "prefill" else 1

    def num_bytes(self, itemsize: int) -> int:
        """Keys, values, query and output."""
        keys = self.num_seqs * self.seq_len * self.num_kv_heads
        rows = self.num_seqs * self.query_len * self.num_heads
        return 2 * (keys + rows) * self.head_size * itemsize

    def flops(self) -> int:
        """Multiplications and additions over the visible keys."""
        first = self.seq_len - self.query_len + 1
        visible = (first + self.seq_len) * self.query_len // 2
        return 4 * self.num_seqs * visible * self.num_heads * self.head_size


CASES = (
    Case("decode", 64, 4096, 28, 4, 128),
    Case("decode", 64, 4096, 32, 8, 128),
    Case("decode", 256, 1024, 28, 4, 128),
    Case("decode", 256, 1024, 32, 8, 128),
    Case("decode", 256, 1024, 14, 2, 64),
    Case("decode", 1, 4096, 28, 4, 128),
    Case("decode", 1, 32768, 28, 4, 128),
    Case("prefill", 1, 8192, 28, 4, 128),
    Case("prefill", 8, 1024, 28, 4, 128),
    Case("prefill", 1, 8192, 32, 8, 128),
    Case("prefill", 8, 1024, 14, 2, 64),
)
#: Rows, keys, warps, stages, registers.
PREFILL_SWEEP = (
    (128, 64, 8, 2, 128),
    (128, 64, 8, 3, 128),
    (64, 64, 4, 2, None),
    (64, 64, 4, 3, None),
    (64, 32, 4, 3, 168),
)
#: Keys, warps, stages, keys of a chunk, chunks of a group, resident programs, rounds, registers.
DECODE_SWEEP = (
    (64, 4, 2, 256, 4, 4, 1, 128),
    (64, 4, 2, 256, 4, 4, 64, 128),
    (64, 4, 2, 128, 8, 4, 1, 128),
    (64, 4, 3, 256, 4, 3, 1, 168),
    (64, 4, 3, 128, 8, 3, 1, 168),
    (32, 4, 3, 256, 4, 4, 1, 128),
    (32, 4, 3, 128, 8, 4, 1, 128),
)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", help="names of cases, or parts of names; all if none")
    parser.add_argument("--sweep", choices=("prefill", "decode"), help="time other tiles")
    parser.add_argument("--prefill-config", action="append", default=[], help="own tiles to sweep")
    parser.add_argument("--decode-config", action="append", default=[], help="own tiles to sweep")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--milliseconds", type=int, default=60, help="time for each number")
    parser.add_argument("--no-peers", action="store_true", help="skip torch's own attention")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def seconds(call: Callable[[], object], milliseconds: int) -> float:
    """Median time of a call that finds none of its data in the L2 cache."""
    call()
    repeats = max(10, min(300, int(milliseconds / max(elapsed_ms(call)(), 0.1))))
    times = [elapsed_ms(call) for _ in range(repeats)]
    return statistics.median(time() for time in times) / 1e3


def elapsed_ms(call: Callable[[], object]) -> Callable[[], float]:
    """Make the call; what is returned waits for it and tells how long it took."""
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    filler().sum()
    start.record()
    call()
    end.record()

    def milliseconds() -> float:
        end.synchronize()
        return float(start.elapsed_time(end))

    return milliseconds


@functools.cache
def filler() -> Tensor:
    """More bytes than the L2 cache has; to read them takes longer than to launch a kernel."""
    return torch.zeros(1 << 28, dtype=torch.float32, device=CUDA)


def graph_seconds(call: Callable[[], object], milliseconds: int) -> float:
    """Median time of a call replayed from a CUDA graph, which takes no time on the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay, milliseconds)


def ceilings(milliseconds: int) -> dict[str, float]:
    """What the device does at most: bytes/s of copy and read, FLOP/s of a matrix product."""
    source = torch.empty(1 << 31, dtype=torch.bfloat16, device=CUDA).normal_()
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), milliseconds)
    read = seconds(lambda: source.sum(), milliseconds)
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    product = seconds(lambda: a @ b, milliseconds)
    return {
        "copy": 2 * source.nbytes / copied,
        "read": source.nbytes / read,
        "matmul": 2 * size**3 / product,
    }


@dataclass(frozen=True)
class Setup:
    """A case on the device."""

    case: Case
    spec: AttentionSpec
    cache_spec: KVCacheSpec
    batch: AttentionBatch
    cache: KVCache
    query: Tensor
    key: Tensor
    value: Tensor


def set_up(case: Case, block_size: int, dtype: torch.dtype) -> Setup:
    """Random data in random blocks."""
    generator = torch.Generator().manual_seed(0)
    width = -(-case.seq_len // block_size)
    num_blocks = case.num_seqs * width + 1
    table = torch.randperm(num_blocks - 1, generator=generator).view(case.num_seqs, width) + 1
    new = torch.arange(case.seq_len - case.query_len, case.seq_len)
    slots = table[:, new // block_size] * block_size + new % block_size
    batch = AttentionBatch.from_host(
        torch.arange(case.num_seqs + 1, dtype=torch.int32) * case.query_len,
        torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32),
        table.to(torch.int32),
        slots.view(-1),
        CUDA,
    )
    heads = (case.num_heads, case.num_kv_heads, case.head_size, case.head_size)
    spec = AttentionSpec(*heads, case.head_size**-0.5, dtype)
    cache_spec = KVCacheSpec(num_blocks, block_size, *heads[1:], dtype)
    cache = allocate_kv_cache(cache_spec, TritonBackend.capabilities(CUDA).kv_layout, CUDA)
    cache.k.normal_()
    cache.v.normal_()
    packed = torch.randn(
        batch.num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_size, device=CUDA
    ).to(dtype)
    query, key, value = torch.split(packed, [heads[0], heads[1], heads[1]], dim=1)
    return Setup(case, spec, cache_spec, batch, cache, query, key, value)


def error(setup: Setup, out: Tensor) -> float:
    """Relative error of some rows of the first and the last sequence, against float64."""
    case, size = setup.case, setup.cache_spec.block_size
    worst = 0.0
    for sequence in {0, case.num_seqs - 1}:
        blocks = setup.batch.block_table[sequence].long()
        keys = setup.cache.k[blocks].reshape(-1, *setup.cache.k.shape[2:]).double()
        values = setup.cache.v[blocks].reshape(-1, *setup.cache.v.shape[2:]).double()
        assert len(keys) == blocks.numel() * size
        for row in {0, case.query_len // 2, case.query_len - 1}:
            end = case.seq_len - case.query_len + row + 1
            index = sequence * case.query_len + row
            q = setup.query[index].double().view(case.num_kv_heads, -1, case.head_size)
            scores = torch.einsum("kgd,nkd->kgn", q, keys[:end]) * setup.spec.scale
            expected = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values[:end]).flatten(0, 1)
            difference = (out[index].double() - expected).norm() / expected.norm()
            worst = max(worst, float(difference))
    return worst


def measure(setup: Setup, options: TritonOptions, milliseconds: int) -> dict[str, Any]:
    """Check and time one case."""
    backend = TritonBackend(setup.spec, setup.cache_spec, CUDA, options)
    plan = backend.plan(setup.batch)
    out = torch.zeros(setup.query.shape, dtype=setup.spec.dtype, device=CUDA)

    def call() -> Tensor:
        return backend.forward(setup.query, setup.cache, plan, out)

    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first_call = time.perf_counter() - start
    wrong = error(setup, out)
    if not wrong < MAX_ERROR:
        raise RuntimeError(f"{setup.case.name}: relative error {wrong} is above {MAX_ERROR}")
    took = graph_seconds(call, milliseconds)
    return {
        "us": took * 1e6,
        "eager_us": seconds(call, milliseconds) * 1e6,
        "error": wrong,
        "first_call_s": first_call,
        **rates(setup, took),
    }


def rates(setup: Setup, took: float) -> dict[str, float]:
    """Bytes and FLOPs a second."""
    itemsize = setup.spec.dtype.itemsize
    return {
        "TB/s": setup.case.num_bytes(itemsize) / took / 1e12,
        "TFLOP/s": setup.case.flops() / took / 1e12,
    }


def host_times(setup: Setup) -> dict[str, float]:
    """Microseconds on the host of ``plan``, ``forward`` and ``write_kv``, the device idle."""
    backend = TritonBackend(setup.spec, setup.cache_spec, CUDA)
    plan = backend.plan(setup.batch)
    out = torch.zeros(setup.query.shape, dtype=setup.spec.dtype, device=CUDA)
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: backend.plan(setup.batch),
        "forward": lambda: backend.forward(setup.query, setup.cache, plan, out),
        "write_kv": lambda: backend.write_kv(
            setup.key, setup.value, setup.cache, setup.batch.slot_mapping
        ),
    }
    result = {}
    for name, call in calls.items():
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        result[f"{name}_host_us"] = sorted(times)[len(times) // 2] * 1e6
        result[f"{name}_device_us"] = (
            graph_seconds(call, 20) * 1e6 if name == "write_kv" else math.nan
        )
    return {name: value for name, value in result.items() if not math.isnan(value)}


def torch_prefill(setup: Setup, milliseconds: int) -> dict[str, Any]:
    """Torch's flash attention of the same prompts, unpaged and contiguous."""
    case = setup.case
    shape = (case.num_seqs, case.seq_len)
    q, k, v = (
        x.reshape(*shape, *x.shape[1:]).transpose(1, 2).contiguous()
        for x in (setup.query, setup.key, setup.value)
    )
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        took = graph_seconds(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            milliseconds,
        )
    return {"us": took * 1e6, **rates(setup, took)}


def chosen_options(arguments: argparse.Namespace) -> list[tuple[str, TritonOptions]]:
    """Tiles to time, with a name."""
    prefill = [_numbers(text, 4) for text in arguments.prefill_config]
    decode = [_numbers(text, 7) for text in arguments.decode_config]
    if arguments.sweep == "prefill":
        prefill = prefill or list(PREFILL_SWEEP)
    if arguments.sweep == "decode":
        decode = decode or list(DECODE_SWEEP)
    chosen = []
    shape = ("keys", "num_warps", "num_stages")
    spread = ("chunk_keys", "group_chunks", "resident", "rounds")
    kinds = (
        ("prefill", prefill, ("rows", *shape, "max_registers")),
        ("decode", decode, (*shape, *spread, "max_registers")),
    )
    for kind, configs, names in kinds:
        for numbers in configs:
            tiles = dict(zip(names, numbers, strict=True))
            label = ",".join("-" if number is None else str(number) for number in numbers)
            chosen.append((label, TritonOptions.model_validate({kind: tiles})))
    return chosen or [("default", TritonOptions())]


def _numbers(text: str, least: int) -> tuple[int | None, ...]:
    numbers: list[int | None] = [int(part) for part in text.split(",")]
    if len(numbers) not in (least, least + 1):
        raise SystemExit(f"{text!r} has {len(numbers)} numbers, not {least} or {least + 1}")
    return tuple(numbers + [None] * (least + 1 - len(numbers)))


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Cases that are asked for."""
    wanted: Iterable[str] = arguments.cases or [arguments.sweep or ""]
    return [case for case in CASES if any(part in case.name for part in wanted)]


def show(columns: Sequence[object]) -> None:
    """One line of the table."""
    name, *numbers = columns
    print(f"{name!s:<62}" + "".join(f"{number!s:>11}" for number in numbers), flush=True)


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    started = time.perf_counter()
    dtype = getattr(torch, arguments.dtype)
    options = chosen_options(arguments)
    tuning = options[0][0] != "default"
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "block_size": arguments.block_size,
        "dtype": arguments.dtype,
        "results": [],
    }
    limits = {"read": 4.16e12, "matmul": 7e14} if tuning else ceilings(arguments.milliseconds)
    if not tuning:
        report["ceilings"] = limits
        print(
            f"copy {limits['copy'] / 1e12:.2f} TB/s, read {limits['read'] / 1e12:.2f} TB/s, "
            f"matmul {limits['matmul'] / 1e12:.0f} TFLOP/s"
        )
    show(("case", "us", "eager us", "TB/s", "TFLOP/s", "of limit", "error"))
    for case in chosen_cases(arguments):
        setup = set_up(case, arguments.block_size, dtype)
        rows: list[tuple[str, dict[str, Any]]] = []
        for name, option in options:
            try:
                rows.append((name, measure(setup, option, arguments.milliseconds)))
            except Exception as failure:
                if not tuning:
                    raise
                print(f"{case.name} {name}: {type(failure).__name__}: {str(failure)[:160]}")
        if case.kind == "prefill" and not tuning and not arguments.no_peers:
            rows.append(("torch flash, dense", torch_prefill(setup, arguments.milliseconds)))
        for name, row in sorted(rows, key=lambda entry: entry[1]["us"]) if tuning else rows:
            prefill = case.kind == "prefill"
            rate = row["TFLOP/s"] * 1e12 / limits["matmul"] if prefill else 0.0
            share = rate if prefill else row["TB/s"] * 1e12 / limits["read"]
            show(
                (
                    f"{case.name} {name}",
                    f"{row['us']:.1f}",
                    f"{row.get('eager_us', math.nan):.1f}",
                    f"{row['TB/s']:.2f}",
                    f"{row['TFLOP/s']:.0f}",
                    f"{share:.0%}",
                    f"{row.get('error', math.nan):.1e}",
                )
            )
            report["results"].append({"case": case.name, "what": name, **row, "share": share})
        if not tuning and case.query_len == 1:
            times = host_times(setup)
            report["results"].append({"case": case.name, "what": "host", **times})
            print("    " + ", ".join(f"{name} {value:.1f}" for name, value in times.items()))
        del setup
    report["seconds"] = time.perf_counter() - started
    print(f"{report['seconds']:.0f} s")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
