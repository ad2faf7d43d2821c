"""Fills a GPU's KV cache to the last block and looks at the peak of memory.

    python benchmarks/gpu_full_load.py --output benchmarks/results/gpu_full_load.json

A model of the shape of Qwen2.5-0.5B with random weights is given so many long prompts that the
cache overflows and requests are preempted. Reported: blocks, the allowance
(``gpu_memory_utilization`` of the device), the peak of the device's memory beyond what was in use
before, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from shapes import SHAPES

import jackfield
from jackfield import LLM, SamplingParams


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=1300)
    parser.add_argument("--max-num-batched-tokens", type=int, default=32768)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=420, help="give up after this long")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def device_used() -> int:
    """Bytes in use on the device, by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    """Fill, measure, print."""
    arguments = parse_arguments()
    before = device_used()
    total = torch.cuda.get_device_properties(0).total_memory
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES["0.5B"]))
        started = time.perf_counter()
        llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            dtype=arguments.dtype,
            gpu_memory_utilization=arguments.utilization,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            attention_backend=arguments.attention_backend,
        )
    engine = llm.engine
    print(f"loaded in {time.perf_counter() - started:.1f} s: {engine.description.summary()}")
    prompt_len = arguments.max_model_len - arguments.output_len
    capacity = engine.description.num_blocks * engine.description.block_size
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        max_tokens=arguments.output_len,
        ignore_eos=True,
        detokenize=False,
    )
    for index in range(min(arguments.max_num_seqs, capacity // prompt_len + 8)):
        prompt = torch.randint(0, 150000, (prompt_len,), generator=generator).tolist()
        engine.add_request(str(index), prompt, params)
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    peak_used, steps, reached = 0, 0, 0.0
    while engine.has_unfinished_requests() and time.perf_counter() - started < arguments.seconds:
        engine.step()
        steps += 1
        peak_used = max(peak_used, device_used() - before)
        stats = engine.stats()
        if steps % 50 == 0:
            print(f"  step {steps}: blocks {stats.blocks.fraction:.1%}", flush=True)
        reached = max(reached, stats.peak_block_usage)
        if stats.scheduler.num_preemptions >= 8:
            break
    seconds = time.perf_counter() - started
    stats = engine.stats()
    allowance = int(arguments.utilization * total)
    report = {
        "command": "python " + " ".join(sys.argv),
        "arguments": {k: v for k, v in vars(arguments).items() if k != "output"},
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "jackfield": jackfield.__version__,
        },
        "attention_backend": engine.description.attention_backend,
        "num_blocks": engine.description.num_blocks,
        "kv_cache_bytes": engine.description.num_blocks * engine.description.bytes_per_block,
        "total_bytes": total,
        "used_before_bytes": before,
        "allowance_bytes": allowance,
        "peak_used_bytes": peak_used,
        "peak_reserved_by_torch_bytes": torch.cuda.max_memory_reserved(),
        "peak_of_allowance": peak_used / allowance,
        "peak_block_usage": reached,
        "num_preemptions": stats.scheduler.num_preemptions,
        "steps": steps,
        "computed_tokens": stats.num_computed_tokens,
        "seconds": seconds,
    }
    print(json.dumps(report, indent=2, default=str))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
