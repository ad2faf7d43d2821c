"""Tells stories in another process, with another value of PYTHONHASHSEED."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ...core.errors import JackfieldError
from .replay import told_again
from .world import Operation, Subject, World

#: Values of PYTHONHASHSEED.
SEEDS = ("1", "2", "3")
# What a part prints when it is imported must not get into the answer.
_CHILD = """
import pickle, sys
answers, sys.stdout = sys.stdout.buffer, sys.stderr
sys.path[:] = pickle.load(sys.stdin.buffer)
from jackfield.conformance.scheduler.elsewhere import answer
answers.write(answer(sys.stdin.buffer))
"""
Story = tuple[Subject, World, Sequence[Operation]]
Log = list[Any]


def answer(source: Any) -> bytes:
    """In the other process: the log of each story."""
    stories: Sequence[Story] = pickle.load(source)
    return pickle.dumps([told_again(*story) for story in stories])


def told_in_process(stories: Sequence[Story], seed: str) -> list[Log]:
    """The logs of stories that a new process tells.

    Raises:
        JackfieldError: the process died; the message has the last line that it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps(sys.path) + pickle.dumps(list(stories)),
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
    told: list[Log] = pickle.loads(done.stdout)
    return told
