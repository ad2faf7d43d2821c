"""``jackfield generate`` and ``jackfield demo``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from ..core.memory import format_bytes
from ..core.request import RequestOutput
from ..core.sampling_params import SamplingParams
from .console import error_console, output_console
from .llm import LLM
from .llm_engine import LLMEngine

DEMO_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "What is photosynthesis?",
    "List three uses of a paper clip.",
    "Give me one tip for sleeping better.",
    "What does a computer's operating system do?",
)


def run_generate(
    flags: Mapping[str, Any],
    config: Path | None,
    prompts: Sequence[str],
    params: SamplingParams,
    chat: bool,
    json_lines: bool,
) -> int:
    """Complete the prompts and print them; the exit status is 1 if any was refused."""
    llm = _load(flags, config)
    started = time.monotonic()
    if chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    seconds = time.monotonic() - started
    for prompt, output in zip(prompts, outputs, strict=True):
        if json_lines:
            print(json.dumps(_as_dict(prompt, output), ensure_ascii=False))
        else:
            _print_output(output_console(soft_wrap=True), prompt, output)
    _print_summary(llm.engine, outputs, seconds)
    return 1 if any(output.error is not None for output in outputs) else 0


def run_demo(flags: Mapping[str, Any], config: Path | None) -> int:
    """Answer a few questions at once, and show that it was one batch on paged memory."""
    console = output_console(soft_wrap=True)
    llm = _load(flags, config)
    console.print(f"[bold]{escape(llm.engine.description.summary())}[/]")
    console.print(f"{len(DEMO_QUESTIONS)} prompts at once, greedy, up to 64 tokens each\n")
    params = SamplingParams(temperature=0.0, max_tokens=64)
    started = time.monotonic()
    outputs = llm.chat([[{"role": "user", "content": text}] for text in DEMO_QUESTIONS], params)
    seconds = time.monotonic() - started
    for question, output in zip(DEMO_QUESTIONS, outputs, strict=True):
        _print_output(console, question, output)
    _print_summary(llm.engine, outputs, seconds, console)
    return 0 if all(output.error is None for output in outputs) else 1


def _load(flags: Mapping[str, Any], config: Path | None) -> LLM:
    with error_console(soft_wrap=False).status("loading the model"):
        return LLM.from_engine(LLMEngine.from_flags(flags, config))


def _print_output(console: Console, prompt: str, output: RequestOutput) -> None:
    console.print(f"[bold cyan]>[/] [bold]{escape(prompt)}[/]")
    if output.error is not None:
        console.print(f"  [bold red]error:[/] {escape(str(output.error))}\n")
        return
    for completion in output.outputs:
        _print_text(console, completion.text.strip())
        which = f"completion {completion.index + 1}, " if len(output.outputs) > 1 else ""
        reason = completion.finish_reason
        if completion.stop_reason is not None:
            reason = f"{reason} at {completion.stop_reason!r}"
        console.print(f"  [dim]{which}{len(completion.token_ids)} tokens, {reason}[/]")
    console.print()


def _print_text(console: Console, text: str) -> None:
    """Indented; wrapped at the width of a terminal, and as it is for everything else."""
    if console.is_terminal:
        console.print(Padding(escape(text), (0, 0, 0, 2)), soft_wrap=False)
    else:
        console.print(indent(text, "  "), markup=False)


def _print_summary(
    engine: LLMEngine,
    outputs: Sequence[RequestOutput],
    seconds: float,
    console: Console | None = None,
) -> None:
    """How much, how fast, and how full the KV cache was; on standard error by default."""
    console = console if console is not None else error_console(soft_wrap=False)
    stats = engine.stats()
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs if not output.error)
    generated = sum(len(item.token_ids) for output in outputs for item in output.outputs)
    blocks = stats.blocks
    used = round(stats.peak_block_usage * blocks.total)
    console.print(
        f"[bold]{generated} tokens in {seconds:.2f} s: {generated / seconds:.1f} tokens/s[/] "
        f"({prompt_tokens} prompt tokens, {stats.num_steps} steps of "
        f"{stats.num_computed_tokens / max(1, stats.num_steps):.1f} tokens)"
    )
    console.print(
        f"KV cache: {used} of {blocks.total} blocks at the peak ({stats.peak_block_usage:.1%}; "
        f"{format_bytes(used * engine.description.bytes_per_block)} of "
        f"{format_bytes(blocks.total * engine.description.bytes_per_block)}), "
        f"{stats.scheduler.num_preemptions} preemptions, {blocks.used} blocks in use now"
    )


def _as_dict(prompt: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "error": None if output.error is None else str(output.error),
        "outputs": [
            {
                "text": item.text,
                "token_ids": list(item.token_ids),
                "finish_reason": item.finish_reason,
                "stop_reason": item.stop_reason,
            }
            for item in output.outputs
        ],
    }
