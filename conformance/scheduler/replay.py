"""Tells a story again from its operations: to compare with, or to see what came of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.scheduler import StepPlan
from .sight import Law
from .stage import plan_line
from .tale import Tale
from .telling import Telling
from .world import Operation, Subject, World


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings: tiny worlds have odd settings on purpose."""
    logger = logging.getLogger("jackfield")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class Diverged(Exception):  # noqa: N818 - says why a replay stopped, no error of ours
    """A story cannot be told on, because a law is broken."""


class Unjudged:
    """A checker that lets everything pass but what a story cannot go on without."""

    def check(self, law: Law, holds: bool, message: Callable[[], str]) -> bool:
        """Whatever holds, holds."""
        return holds

    def demand(self, law: Law, holds: bool, message: Callable[[], str]) -> None:
        """The story ends if it cannot go on."""
        if not holds:
            raise Diverged(f"{law.name}: {message()}")

    def covered(self, axis: str, value: str) -> None:
        """Nothing is counted."""

    def checked_failure(self) -> None:
        """Nothing is counted."""


class Watching(Unjudged):
    """Waits for one law to be broken.

    Attributes:
        seen: what broke it; "" if nothing did.
    """

    def __init__(self, law: str) -> None:
        self.seen = ""
        self._law = law

    def check(self, law: Law, holds: bool, message: Callable[[], str]) -> bool:
        """Note what breaks the law."""
        if not holds and law.name == self._law and not self.seen:
            self.seen = message()
        return holds

    def demand(self, law: Law, holds: bool, message: Callable[[], str]) -> None:
        """Note what breaks the law, and end the story."""
        if not self.check(law, holds, message):
            raise Diverged(f"{law.name}: {message()}")


def told_again(
    subject: Subject,
    world: World,
    operations: Sequence[Operation],
    telling: Telling | None = None,
) -> list[Any]:
    """The log of a story that is told again on new parts, and perhaps in another way."""
    telling = telling or Telling()
    log: list[Any] = []
    try:
        with quiet(), telling.clocks():
            tale = Tale(subject, world, Unjudged(), telling)
            log, tale.judged, tale.policy.compares = tale.log, False, False
            for operation in operations:
                tale.perform(operation)
    except Exception as error:
        log.append(f"{type(error).__name__}: {error}")
    return [telling.back(entry) for entry in log]


def difference(one: Sequence[Any], other: Sequence[Any]) -> str | None:
    """The first entry in which two logs differ, in words; None if they agree."""
    for first, second in zip(one, other, strict=False):
        if first != second:
            was, now = _entry(first), _entry(second)
            return f"{now} instead of {was}" if was != now else f"{second} instead of {first}"
    if len(one) != len(other):
        return f"there are {len(other)} entries instead of {len(one)}"
    return None


def _entry(entry: Any) -> str:
    """An entry of a log in words."""
    return f"the plan {plan_line(entry)}" if isinstance(entry, StepPlan) else str(entry)


def retold(
    subject: Subject, world: World, operations: Sequence[Operation]
) -> tuple[list[str], list[int]]:
    """For each operation that a story gets to: what came of it in words, and the log's length."""
    lengths: list[int] = []
    tale: Tale | None = None
    try:
        with quiet():
            tale = Tale(subject, world, Unjudged())
            for operation in operations:
                tale.perform(operation)
                lengths.append(len(tale.log))
    except Exception:
        lengths.append(len(tale.log) + 1 if tale is not None else 1)
    return ([] if tale is None else tale.lines), lengths


def stopped(error: Exception) -> str:
    """What to say of a story that an error ended which no call is expected to raise."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return (
        f"the story stopped with {type(error).__name__}: {error} ({where}); no method may raise "
        "what the contract does not name, or return what it does not allow"
    )
