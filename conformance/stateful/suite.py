"""From a finished search to a report: what suites of stateful parts have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..environment import origin_of, versions
from ..results import PropertyResult, Report, Status
from .laws import StatefulLaw
from .search import Budget, Found

Law = type[StatefulLaw]
#: Most processes that a run takes unasked.
MAX_JOBS = 4


@dataclass(frozen=True)
class StatefulOptions:
    """What to run.

    Attributes:
        profile: one of the suite's profiles.
        seed: of all stories.
        jobs: processes that stories are shared among; 0 takes as many as there are cores, at most
            ``MAX_JOBS``.
        reproducers: directory for the files that show failures; None writes none.
        command: what the user typed, for the report.
    """

    profile: str = "quick"
    seed: int = 0
    jobs: int = 1
    reproducers: Path | None = None
    command: str = ""

    @property
    def processes(self) -> int:
        """``jobs``, with 0 resolved."""
        return self.jobs or min(MAX_JOBS, os.cpu_count() or 1)


class StatefulObserver(Protocol):
    """Is told how a run goes on."""

    def started(self, law: str, variant: str, planned: int) -> None:
        """A search for ``planned`` stories begins."""

    def progressed(self, law: str, variant: str, examples: int) -> None:
        """So many stories have been told."""

    def finished(self, result: PropertyResult) -> None:
        """What became of a law."""


class SilentObserver:
    """Does nothing."""

    def started(self, law: str, variant: str, planned: int) -> None:
        """Nothing."""

    def progressed(self, law: str, variant: str, examples: int) -> None:
        """Nothing."""

    def finished(self, result: PropertyResult) -> None:
        """Nothing."""


def results_of(
    laws: Sequence[Law],
    found: Found,
    powers: frozenset[str],
    part: str,
    reproducers: Path | None,
) -> list[PropertyResult]:
    """One result for each law.

    ``examples`` is the number of stories that checked the law. All laws are checked in the same
    stories, so each has an equal share of the time. A law that is claimed and that no story
    checked fails, unless stories ended early because another one is broken.
    """
    seconds = found.seconds / len(laws)
    results = []
    for law in laws:
        status, reason, case, reproducer = Status.PASSED, "", "", ""
        failure = found.failures.get(law.name)
        if failure is not None:
            status, reason, case = Status.FAILED, failure.message, failure.story
            reproducer = _written(reproducers, f"{part}-{law.name}.py", failure.script)
        elif law.power and law.power not in powers:
            status, reason = Status.NOT_CLAIMED, f"the power {law.power!r} is not declared"
        elif not found.exercised[law.name] and found.failures:
            first = min(found.failures.values(), key=lambda one: len(one.story))
            status = Status.NOT_CLAIMED
            reason = f"not reached: stories end where {first.law} is broken"
        elif not found.exercised[law.name]:
            status, reason = Status.FAILED, "no story came to the point where it is checked"
        results.append(
            PropertyResult(
                law=law.name,
                title=law.title().replace("``", "`"),
                variant="",
                status=status,
                examples=found.exercised[law.name],
                seconds=0.0 if status is Status.NOT_CLAIMED else seconds,
                reason=reason,
                case=case,
                reproducer=reproducer,
            )
        )
    return results


def report_of(
    suite: str,
    part: type,
    results: Sequence[PropertyResult],
    stories: int,
    budget: Budget,
    options: StatefulOptions,
    coverage: Mapping[str, Mapping[str, int]],
    declared: Mapping[str, str],
) -> Report:
    """All results, with what they depend on.

    A run that told fewer stories than its profile has, for its time was up, says so.

    Args:
        suite: its name.
        part: the class that was tried.
        results: one for each law.
        stories: how many were told, which the time may have kept below the number of the profile.
        budget, options: of the run.
        coverage: axis, then value, then how often it occurred.
        declared: what the part says of itself, by name.
    """
    told = f"{stories}" if stories == budget.stories else f"{stories} of {budget.stories}"
    return Report(
        suite=suite,
        part=str(getattr(part, "name", part.__name__)),
        origin=origin_of(part),
        profile=f"{options.profile}, {told} stories of {budget.steps} steps",
        device="the host",
        seed=options.seed,
        only={},
        command=options.command,
        versions=versions(),
        results=tuple(results),
        coverage=coverage,
        capabilities=declared,
    )


def _written(directory: Path | None, name: str, text: str) -> str:
    if directory is None:
        return ""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def failure_text(result: PropertyResult) -> str:
    """A failed law with its shortest story, in words."""
    parts = [f"{result.law}: {result.title}", result.reason, result.case]
    if result.reproducer:
        parts.append(f"reproducer: {result.reproducer}")
    return "\n".join(part for part in parts if part)
