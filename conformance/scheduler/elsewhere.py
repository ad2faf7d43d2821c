"""Tells stories in another process, with another value of PYTHONHASHSEED."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..stateful.elsewhere import ask_process
from .replay import told_again
from .world import Operation, Subject, World

#: Values of PYTHONHASHSEED.
SEEDS = ("1", "2", "3")
Story = tuple[Subject, World, Sequence[Operation]]
Log = list[Any]


def told_in_process(stories: Sequence[Story], seed: str) -> list[Log]:
    """The logs of stories that a new process tells.

    Raises:
        JackfieldError: the process died; the message has the last line that it wrote.
    """
    return ask_process(_logs, list(stories), seed)


def _logs(stories: Sequence[Story]) -> list[Log]:
    """In the other process: the log of each story."""
    return [told_again(*story) for story in stories]
