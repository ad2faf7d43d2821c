"""``jackfield chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..core.errors import RequestError
from ..core.request import RequestOutput
from ..core.sampling_params import RequestOutputKind, SamplingParams
from .console import error_console
from .interrupts import deferred_interrupt
from .llm_engine import LLMEngine

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def run_chat(
    flags: Mapping[str, Any], config: Path | None, system: str | None, sampling: Mapping[str, Any]
) -> int:
    """Read messages from standard input and stream answers until the end of input."""
    console = error_console(soft_wrap=False)
    params = SamplingParams(
        **{"temperature": 0.7, "top_p": 0.9, "max_tokens": None, **sampling},
        output_kind=RequestOutputKind.DELTA,
    )
    with console.status("loading the model"):
        engine = LLMEngine.from_flags(flags, config)
    console.print(f"[bold]{escape(engine.description.summary())}[/]\n[dim]{_HELP}[/]")
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while (text := _read(console)) is not None:
        if text == "/exit":
            break
        if text == "/reset":
            messages = list(beginning)
            console.print("[dim]the conversation is forgotten[/]")
        elif text.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif text:
            answer = _answer(
                engine, [*messages, {"role": "user", "content": text}], params, console
            )
            if answer is not None:
                messages += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": answer},
                ]
    return 0


def _read(console: Console) -> str | None:
    """The next message; None at the end of input or after Ctrl-C at the prompt."""
    try:
        if sys.stdin.isatty():
            return input("\n> ").strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _answer(
    engine: LLMEngine, messages: list[dict[str, str]], params: SamplingParams, console: Console
) -> str | None:
    """Stream one answer to standard output; None if the request was refused."""
    try:
        if engine.tokenizer is None:
            raise RequestError("chat needs a tokenizer: set skip_tokenizer_init to false")
        engine.add_request("chat", engine.tokenizer.apply_chat_template(messages), params)
    except RequestError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}; /reset forgets the conversation")
        return None
    pieces = []
    with deferred_interrupt() as interrupt:
        while engine.has_unfinished_requests():
            outputs: list[RequestOutput] = engine.step()
            if interrupt.pressed and (aborted := engine.abort_request("chat")) is not None:
                outputs = [*outputs, aborted]
            for output in outputs:
                piece = output.outputs[0].text
                pieces.append(piece)
                print(piece, end="", flush=True)
    print(flush=True)
    return "".join(pieces)
