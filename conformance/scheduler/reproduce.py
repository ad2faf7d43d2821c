"""What a reproducer script calls: tells its story, and says whether the law is kept."""

from __future__ import annotations

from collections.abc import Sequence

from . import laws
from .elsewhere import SEEDS, told_in_process
from .replay import Diverged, Watching, difference, quiet, stopped, told_again
from .script import story_lines
from .tale import Tale
from .telling import TELLINGS
from .world import Operation, Subject, World


def show(subject: Subject, world: World, operations: Sequence[Operation], law: str) -> int:
    """Tell a story and print it, and what becomes of a law.

    Args:
        subject, world, operations: the story.
        law: name of the law to look at.

    Returns:
        The exit status: 0 if the law is kept, 1 if this law is broken, or another one without
        which the story cannot go on.
    """
    watching = Watching(law)
    tale: Tale | None = None
    other = ""
    try:
        with quiet():
            tale = Tale(subject, world, watching)
            for operation in operations:
                tale.perform(operation)
                if watching.seen:
                    break
            else:
                tale.end()
    except Diverged as broken:
        other = str(broken)
    except Exception as error:
        other = f"{laws.Errors.name}: {stopped(error)}"
        if law == laws.Errors.name:
            watching.seen = watching.seen or stopped(error)
    done = tale.operations if tale is not None else []
    print("\n".join(story_lines(world, done, tale.lines if tale is not None else [])))
    seen = watching.seen or (_retold(subject, world, tale, law) if tale and not other else "")
    if seen:
        print(f"\nlaw {law} is broken: {seen}")
    elif other:
        print(f"\nthe story cannot be told to its end, because another law is broken: {other}")
    else:
        print(f"\nlaw {law} is kept")
    return 1 if seen or other else 0


def _retold(subject: Subject, world: World, tale: Tale, law: str) -> str:
    """How the story differs when it is told again, if that is what the law is about."""
    for other, telling in TELLINGS.items():
        if other.name == law:
            seen = difference(tale.log, told_again(subject, world, tale.operations, telling))
            return f"told again, {seen}" if seen else ""
    if law != laws.Processes.name:
        return ""
    for seed in SEEDS:
        (log,) = told_in_process([(subject, world, tale.operations)], seed)
        differs = difference(tale.log, log)
        if differs is not None:
            return f"in a process with PYTHONHASHSEED={seed} there is {differs}"
    return ""
