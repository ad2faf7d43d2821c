"""The same calls in processes with other hash seeds."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.block_manager import BlockManagerConfig
from ..stateful.elsewhere import ask_process, has_a_module
from ..stateful.laws import LawBroken
from ..stateful.search import Failure, Found
from . import laws
from .calls import Made, Subject, replay
from .script import story_script, story_text

#: Values of PYTHONHASHSEED.
_SEEDS = ("1", "2")
Sample = tuple[Subject, BlockManagerConfig, Sequence[Made]]


def try_processes(samples: Sequence[Sample], found: Found) -> None:
    """Make the calls of some stories again in other processes, and add what comes of it.

    A class that another process cannot import, because it is defined in a function or typed in by
    hand, cannot be tried: then the law counts as not exercised.

    Raises:
        JackfieldError: a process died.
    """
    if not samples or not importable(samples[0][0]):
        return
    told = {seed: ask_process(_outcomes, list(samples), seed) for seed in _SEEDS}
    found.exercised[laws.Processes.name] += len(samples)
    differing = []
    for index, (subject, config, story) in enumerate(samples):
        here = [made.outcome.told() for made in story]
        for seed in _SEEDS:
            there = told[seed][index]
            first = next((at for at, one in enumerate(here) if one != there[at]), None)
            if first is not None:
                differing.append((first, index, seed, subject, config, story))
    if not differing:
        return
    first, index, seed, subject, config, story = min(differing, key=lambda one: one[:2])
    shown = list(story[: first + 1])
    message = (
        f"{shown[-1].call.code()} gave {shown[-1].outcome.told()}; in a process with "
        f"PYTHONHASHSEED={seed} the same calls give {told[seed][index][first]}"
    )
    broken = LawBroken(laws.Processes, message)
    found.failures[laws.Processes.name] = Failure(
        laws.Processes.name,
        message,
        story_text(config, shown),
        story_script(subject, config, shown, [], broken),
    )


def importable(subject: Subject) -> bool:
    """Whether a new process can find the class."""
    return has_a_module(subject.manager)


def _outcomes(samples: Sequence[Sample]) -> list[list[tuple[object, ...]]]:
    """In the other process: what each call of each story gives."""
    return [
        [outcome.told() for outcome in replay(subject.build(config), story)]
        for subject, config, story in samples
    ]
