"""Asks another process, with another value of PYTHONHASHSEED."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ...core.errors import JackfieldError

Question = TypeVar("Question")
Answer = TypeVar("Answer")

# What a part prints when it is imported must not get into the answer.
_CHILD = """
import pickle, sys
answers, sys.stdout = sys.stdout.buffer, sys.stderr
sys.path[:] = pickle.load(sys.stdin.buffer)
answer, question = pickle.load(sys.stdin.buffer)
answers.write(pickle.dumps(answer(question)))
"""


def ask_process(answer: Callable[[Question], Answer], question: Question, seed: str) -> Answer:
    """What a function returns in a new process.

    Args:
        answer: a function that a module has under its name.
        question: its argument; can be pickled, as what the function returns.
        seed: value of PYTHONHASHSEED.

    Raises:
        JackfieldError: the process died; the message has the last line that it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps(sys.path) + pickle.dumps((answer, question)),
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=False,
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise JackfieldError(
            f"a process with PYTHONHASHSEED={seed} that told the stories again died with status "
            f"{done.returncode}; the last line that it wrote: {said[-1]}"
        )
    told: Answer = pickle.loads(done.stdout)
    return told


def has_a_module(part: type[Any]) -> bool:
    """Whether a new process can import a class: it cannot if a function or a script defines it."""
    return part.__module__ != "__main__" and "<locals>" not in part.__qualname__
