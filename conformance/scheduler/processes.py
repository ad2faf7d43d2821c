"""The same stories in processes with other hash seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..stateful import search
from ..stateful.elsewhere import has_a_module
from ..stateful.laws import LawBroken
from ..stateful.search import Failure, Found
from . import laws
from .elsewhere import SEEDS, Story, told_in_process
from .replay import difference, retold, told_again
from .script import story_script, story_text
from .world import Operation, Subject, World

Sample = tuple[Subject, World, Sequence[Operation], Sequence[Any]]


@dataclass(frozen=True)
class _Differing:
    """A story that another process tells otherwise.

    Attributes:
        story: up to the operation that shows it.
        seed: of the other process.
        differs: what it has instead.
    """

    story: Story
    seed: str
    differs: str


def try_processes(samples: Sequence[Sample], found: Found) -> None:
    """Tell some stories again in other processes, and add what comes of it.

    Classes that another process cannot import cannot be tried: then the law counts as not
    exercised.

    Raises:
        JackfieldError: a process died.
    """
    if not samples or not importable(samples[0][0]):
        return
    found.exercised[laws.Processes.name] += len(samples)
    differing = list(_differing(samples))
    if not differing:
        return
    least = _made_small(min(differing, key=_size))
    subject, world, operations = least.story
    message = f"in a process with PYTHONHASHSEED={least.seed} there is {least.differs}"
    broken = LawBroken(laws.Processes, message)
    lines, _ = retold(*least.story)
    found.failures[laws.Processes.name] = Failure(
        laws.Processes.name,
        message,
        story_text(world, operations, lines),
        story_script(subject, world, operations, broken),
    )


def importable(subject: Subject) -> bool:
    """Whether a new process can find the classes."""
    return all(map(has_a_module, (subject.scheduler, subject.manager, subject.policy)))


def _differing(samples: Sequence[Sample]) -> Iterator[_Differing]:
    stories: list[Story] = [(subject, world, told) for subject, world, told, _ in samples]
    for seed in SEEDS:
        logs = told_in_process(stories, seed)
        for story, (*_, here), there in zip(stories, samples, logs, strict=True):
            differs = difference(here, there)
            if differs is not None:
                subject, world, operations = story
                at = _first(here, there)
                _, lengths = retold(*story)
                end = 1 + sum(length <= at for length in lengths)
                yield _Differing((subject, world, operations[:end]), seed, differs)


def _first(here: Sequence[Any], there: Sequence[Any]) -> int:
    """Index of the first entry in which logs differ."""
    pairs = zip(here, there, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(here))


def _size(one: _Differing) -> tuple[int, int]:
    _, world, operations = one.story
    return len(operations), len(story_text(world, operations, []))


def _made_small(least: _Differing) -> _Differing:
    """Leave out operations as long as the story still differs; all at once are tried in a round."""
    deadline = time.monotonic() + search.SHRINK_SECONDS
    while time.monotonic() < deadline:
        subject, world, operations = least.story
        shorter: list[Story] = [
            (subject, world, [*operations[:at], *operations[at + count :]])
            for count in (1, 2, 4, 8)
            for at in range(len(operations) - count)
        ]
        samples: list[Sample] = [(*story, told_again(*story)) for story in shorter]
        smaller = [
            _Differing(story, least.seed, differs)
            for story, (*_, here), there in zip(
                shorter, samples, told_in_process(shorter, least.seed), strict=True
            )
            if (differs := difference(here, there)) is not None
        ]
        if not smaller:
            break
        least = min(smaller, key=_size)
    return least
