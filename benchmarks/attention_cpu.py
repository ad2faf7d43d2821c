"""Time the attention of one layer on this CPU, at the shapes of a 135M model with 16 sequences.

Run ``python benchmarks/attention_cpu.py``; it prints one JSON line per case, times in microseconds
per layer (``plan``: per step). Layers take turns, so that the cache is read from memory and not
from the processor's own caches. Times are the fastest tenth: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch

from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.core.attention import (
    AttentionBatch,
    AttentionSpec,
    KVCacheSpec,
    allocate_kv_cache,
)

NUM_LAYERS, BLOCK_SIZE = 30, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64
CPU = torch.device("cpu")
RAGGED = [128 + 128 * index // 15 for index in range(16)]
CASES = {
    "decode 16 x 128..256": (RAGGED, [1] * 16),
    "decode 16 x 192": ([192] * 16, [1] * 16),
    "prefill 16 x 128": ([128] * 16, [128] * 16),
    "prefill 16 x 100..145": ([100 + 3 * i for i in range(16)], [100 + 3 * i for i in range(16)]),
    "chunk of 256 beside 8 decodes": ([*RAGGED[:8], 512], [1] * 8 + [256]),
}


def make_batch(seq_lens: Sequence[int], query_lens: Sequence[int]) -> AttentionBatch:
    """A batch whose blocks lie anywhere in the cache."""
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    parts = list(torch.split(blocks, counts))
    table = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    slots = [
        int(table[index, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for index, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True))
        for position in range(length - new, length)
    ]
    return AttentionBatch.from_host(
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        table.to(torch.int32),
        torch.tensor(slots),
    )


def microseconds(call: Callable[[int], object], seconds: float) -> float:
    """Time of a call, which is given the number of a layer."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        call(len(times) % NUM_LAYERS)
        times.append(time.perf_counter() - start)
    return round(sorted(times)[len(times) // 10] * 1e6, 1)


def measure(
    seq_lens: Sequence[int], query_lens: Sequence[int], dtype: torch.dtype, seconds: float
) -> dict[str, float]:
    """Times of ``plan``, ``write_kv`` and ``forward``."""
    batch = make_batch(seq_lens, query_lens)
    spec = AttentionSpec(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE, HEAD_SIZE**-0.5, dtype)
    num_blocks = int(batch.block_table.max()) + 1
    cache_spec = KVCacheSpec(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE, dtype)
    caches = [allocate_kv_cache(cache_spec, "NHD", CPU) for _ in range(NUM_LAYERS)]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    packed = torch.randn(batch.num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE).to(dtype)
    query = packed[:, :NUM_HEADS]
    key = packed[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]
    value = packed[:, NUM_HEADS + NUM_KV_HEADS :]
    backend = TorchSdpaBackend(spec, cache_spec, CPU)
    plan = backend.plan(batch)
    out = torch.empty(query.shape, dtype=dtype)
    return {
        "plan": microseconds(lambda _: backend.plan(batch), seconds),
        "write_kv": microseconds(
            lambda layer: backend.write_kv(key, value, caches[layer], batch.slot_mapping), seconds
        ),
        "forward": microseconds(
            lambda layer: backend.forward(query, caches[layer], plan, out), seconds
        ),
    }


def main() -> None:
    """Measure every case in every dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each number")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], help="such as float32 bfloat16"
    )
    arguments = parser.parse_args()
    with torch.inference_mode():
        for dtype in arguments.dtypes:
            for name, (seq_lens, query_lens) in CASES.items():
                times = measure(seq_lens, query_lens, getattr(torch, dtype), arguments.seconds)
                print(json.dumps({"case": name, "dtype": dtype, **times}))


if __name__ == "__main__":
    main()
