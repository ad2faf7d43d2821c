"""Offline throughput: Jackfield against Hugging Face transformers, in one process.

    python benchmarks/offline.py --output benchmarks/results/offline.json

The same prompts, the same numbers of new tokens, the same thread settings and greedy sampling for

- ``jackfield``: this engine, through ``LLM.generate``;
- ``generate``: transformers' ``generate`` on one padded batch;
- ``generate_batch``: transformers' own continuous batching.

Each is loaded, warmed up, timed ``--repeats`` times and freed before the next one is loaded; the
median counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

import jackfield
from jackfield import LLM, SamplingParams
from jackfield.models.locate import locate

Runner = Callable[[list[list[int]], int], list[list[int]]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="as for jackfield --model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--output-len", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["jackfield", "generate", "generate_batch"],
        choices=["jackfield", "generate", "generate_batch"],
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def make_prompts(num_prompts: int, prompt_len: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_prompts, prompt_len)
    # The lowest ids are special tokens in many vocabularies.
    rows: list[list[int]] = torch.randint(100, vocab_size, shape, generator=generator).tolist()
    return rows


def jackfield_runner(arguments: argparse.Namespace, dtype: str) -> Runner:
    """Jackfield, loaded and ready."""
    llm = LLM(arguments.model, dtype=dtype, device=arguments.device)

    def run(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def transformers_model(arguments: argparse.Namespace, dtype: str) -> Any:
    """The same checkpoint in transformers."""
    files = locate(arguments.model)
    options = {"dtype": getattr(torch, dtype)}
    if files.kind == "gguf":
        directory, name = str(files.path.parent), files.path.name
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(files.path, **options)
    return model.to(arguments.device).eval()


def generate_runner(model: Any) -> Runner:
    """transformers' ``generate``: one padded batch, a dynamic cache."""

    def run(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        settings = GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask.to(model.device), generation_config=settings
            )
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows

    return run


def generate_batch_runner(model: Any) -> Runner:
    """transformers' ``generate_batch``: paged attention and continuous batching."""

    def run(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        settings = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1)
        with torch.inference_mode():
            results = model.generate_batch(inputs=prompts, generation_config=settings)
        return [list(result.generated_tokens) for result in results.values()]

    return run


def make_runner(name: str, arguments: argparse.Namespace, dtype: str) -> Runner:
    """A system, loaded and ready."""
    if name == "jackfield":
        return jackfield_runner(arguments, dtype)
    model = transformers_model(arguments, dtype)
    return generate_runner(model) if name == "generate" else generate_batch_runner(model)


def measure(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Seconds of each system, and what follows from them."""
    vocab_size = 49152 if arguments.model == "demo" else 30000
    prompts = make_prompts(arguments.num_prompts, arguments.prompt_len, vocab_size)
    expected = arguments.num_prompts * arguments.output_len
    seconds: dict[str, list[float]] = {}
    for name in arguments.systems:
        run = make_runner(name, arguments, dtype)
        run(prompts, 8)
        seconds[name] = []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            rows = run(prompts, arguments.output_len)
            seconds[name].append(time.perf_counter() - started)
            produced = sum(map(len, rows))
            if produced != expected:
                raise RuntimeError(f"{name} produced {produced} tokens instead of {expected}")
            print(f"  {dtype} {name}: {seconds[name][-1]:.2f} s", flush=True)
        del run
        gc.collect()
    return summarise(arguments, seconds)


def summarise(arguments: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Rates from the medians; the ratio is to the faster peer."""
    generated = arguments.num_prompts * arguments.output_len
    total = generated + arguments.num_prompts * arguments.prompt_len
    systems = {
        name: {
            "seconds": times,
            "output_tokens_per_s": generated / statistics.median(times),
            "total_tokens_per_s": total / statistics.median(times),
        }
        for name, times in seconds.items()
    }
    result: dict[str, Any] = {"systems": systems}
    peers = [statistics.median(times) for name, times in seconds.items() if name != "jackfield"]
    if peers and "jackfield" in seconds:
        result["ratio_to_better_peer"] = min(peers) / statistics.median(seconds["jackfield"])
    return result


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    return {
        "device": name or f"cpu, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "jackfield": jackfield.__version__,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    workload = {
        key: getattr(arguments, key)
        for key in ("model", "num_prompts", "prompt_len", "output_len", "repeats", "device")
    }
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "workload": workload,
        "machine": machine(arguments.device),
        "dtypes": {},
    }
    for dtype in arguments.dtypes:
        report["dtypes"][dtype] = measure(arguments, dtype)
    print(f"\n{'dtype':<10}{'system':<18}{'output tok/s':>14}{'total tok/s':>14}{'median s':>10}")
    for dtype, result in report["dtypes"].items():
        for name, row in result["systems"].items():
            median = statistics.median(row["seconds"])
            print(
                f"{dtype:<10}{name:<18}{row['output_tokens_per_s']:>14.1f}"
                f"{row['total_tokens_per_s']:>14.1f}{median:>10.2f}"
            )
        if "ratio_to_better_peer" in result:
            print(f"{dtype:<10}ratio to the better peer: {result['ratio_to_better_peer']:.2f}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
