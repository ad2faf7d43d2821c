"""Throughput of the engine on a GPU, and where a decoding step's time goes.

    python benchmarks/engine_gpu.py --output benchmarks/results/engine_gpu.json

256 requests with 100 to 1024 random prompt tokens and as many new ones, all there from the start,
at temperature 0.6, on models of published shapes with random weights. After the timed run, some
steps in which every request decodes are timed part by part on the host and profiled on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

import jackfield
from jackfield import LLM, RequestOutputKind, SamplingParams

PROFILED_STEPS = 10


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--backends", nargs="+", default=["auto"])
    parser.add_argument("--eager", action="store_true", help="also without CUDA graphs")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def workload(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and settings of all requests."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=0.6, ignore_eos=True, detokenize=False, max_tokens=rng.randint(100, 1024)
        )
        for _ in range(count)
    ]
    return prompts, params


def build(shape: str, backend: str, eager: bool, arguments: argparse.Namespace) -> LLM:
    """An engine with random weights."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[shape]))
        return LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            attention_backend=backend,
            enforce_eager=eager,
            max_model_len=4096,
            max_num_seqs=arguments.requests,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
        )


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    """The timed run."""
    steps = llm.engine.stats().num_steps
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    new = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": new,
        "output_tokens_per_second": round(new / seconds),
        "steps": llm.engine.stats().num_steps - steps,
    }


class Stopwatch:
    """Seconds that some methods of an object take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method from now on."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - started

        setattr(owner, method, timed)


def decoding_steps(llm: LLM, count: int) -> dict[str, Any]:
    """Where the time of steps goes in which ``count`` requests of 600 tokens decode."""
    engine = llm.engine
    params = SamplingParams(
        temperature=0.6,
        ignore_eos=True,
        detokenize=False,
        max_tokens=200,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for index in range(count):
        engine.add_request(f"p{index}", [index % 1000] * 600, params)
    while engine.stats().scheduler.waiting or engine.stats().num_computed_tokens < 600:
        engine.step()
    for _ in range(3):
        engine.step()
    stopwatch = Stopwatch()
    runner = engine.model_runner
    for owner, method, name in (
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "update", "scheduler update"),
        (engine._assembler, "assemble", "assemble"),
        (engine._outputs, "process", "outputs"),
        (runner, "execute", "execute"),
        (runner, "_hidden_states", "execute: plan and launch"),
        (runner.model, "compute_logits", "execute: launch logits"),
        (engine, "step", "step"),
    ):
        stopwatch.watch(owner, method, name)
    torch.cuda.synchronize()
    for _ in range(PROFILED_STEPS):
        engine.step()
    host = {name: round(s / PROFILED_STEPS * 1e6) for name, s in stopwatch.seconds.items()}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
    for request_id in engine.unfinished_request_ids():
        engine.abort_request(request_id)
    return {
        "requests": count,
        "host_us_per_step": dict(sorted(host.items(), key=lambda item: -item[1])),
        "device_us_per_step": round(
            sum(one.self_device_time_total for one in kernels) / PROFILED_STEPS
        ),
        "kernels": [
            {
                "name": one.key[:80],
                "us_per_step": round(one.self_device_time_total / PROFILED_STEPS, 1),
                "calls_per_step": round(one.count / PROFILED_STEPS, 1),
            }
            for one in kernels[:14]
        ],
    }


def measure(shape: str, backend: str, eager: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine: warm up, run, look into its steps."""
    started = time.perf_counter()
    llm = build(shape, backend, eager, arguments)
    description = llm.engine.description
    warm_prompts, warm_params = workload(4, arguments.seed + 1)
    llm.generate(warm_prompts, warm_params, use_tqdm=False)
    startup = time.perf_counter() - started
    result = {
        "model": f"Qwen2.5-{shape} shape",
        "backend": description.attention_backend,
        "block_size": description.block_size,
        "num_blocks": description.num_blocks,
        "mode": "eager" if eager else "CUDA graphs",
        "startup_seconds": round(startup, 1),
        **run(llm, *workload(arguments.requests, arguments.seed)),
        "decoding": decoding_steps(llm, arguments.requests),
    }
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "jackfield": jackfield.__version__,
        },
        "results": [],
    }
    for shape in arguments.shapes:
        for backend in arguments.backends:
            for eager in (False, True) if arguments.eager else (False,):
                result = measure(shape, backend, eager, arguments)
                report["results"].append(result)
                print(json.dumps(result, indent=1), flush=True)
                if arguments.output is not None:
                    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for result in report["results"]:
        print(
            f"{result['model']:20} {result['backend']:12} {result['mode']:12} "
            f"{result['seconds']:8.2f} s {result['output_tokens_per_second']:8} tokens/s"
        )


if __name__ == "__main__":
    main()
