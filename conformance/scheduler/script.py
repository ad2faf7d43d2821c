"""A story as text, and as a Python file that tells it again."""

from __future__ import annotations

import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from ..stateful.elsewhere import has_a_module
from ..stateful.laws import LawBroken
from .world import Operation, Subject, Wish, World, code

_HEAD = '''"""Scheduler {name!r} breaks a law.

Law {law}: {title}

Seen: {message}

Run it: the exit status is 1 as long as the fault shows.
"""
'''
_BODY = """
from jackfield.conformance.scheduler.reproduce import show
from jackfield.conformance.scheduler.world import {kinds}
{imports}

SUBJECT = {subject}
WORLD = {world}
OPERATIONS = [
{operations}
]

sys.exit(show(SUBJECT, WORLD, OPERATIONS, "{law}"))
"""
_WIDTH = 100
#: Equal lines that are shown one by one; more are counted.
_FEW = 3


def story_lines(
    world: World, operations: Sequence[Operation], lines: Sequence[str]
) -> Iterator[str]:
    """The world, then each operation with what came of it; many equal ones in one line.

    Args:
        world, operations: the story.
        lines: what came of the operations; of the last ones it may be missing.
    """
    yield code(world)
    comments = [*lines, *[""] * (len(operations) - len(lines))]
    told = [
        f"{code(one)}  # {line}" if line else code(one)
        for one, line in zip(operations, comments, strict=True)
    ]
    for line, times in _counted(told):
        yield from [line] * times if times <= _FEW else [f"{line} ({times} times)"]


def story_text(world: World, operations: Sequence[Operation], lines: Sequence[str]) -> str:
    """``story_lines`` as one text."""
    return "\n".join(story_lines(world, operations, lines))


def story_script(
    subject: Subject, world: World, operations: Sequence[Operation], broken: LawBroken
) -> str:
    """The story as a file whose exit status is 1 as long as the law is broken."""
    parts, imports = _parts(subject)
    kinds = {type(one).__name__ for one in operations} | {"Subject", "World"}
    if any("Wish(" in code(one) for one in operations):
        kinds.add("Wish")
    head = _HEAD.format(
        name=getattr(subject.scheduler, "name", subject.scheduler.__qualname__),
        law=broken.law.name,
        title="\n".join(textwrap.wrap(broken.law.title(), 95)),
        message="\n".join(textwrap.wrap(broken.message, 95, break_long_words=False)),
    )
    body = _BODY.format(
        kinds=", ".join(sorted(kinds)),
        imports="\n".join(imports),
        subject=_fitted("Subject", parts),
        world=_fitted("World", _arguments(world)),
        operations="\n".join(_operation_lines(operations)),
        law=broken.law.name,
    )
    # The first and the last three quotes of the head are its own.
    inner = head[3:].rstrip()[:-3].replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{inner}"""\n\n{_preamble(subject)}{body}'


def _operation_lines(operations: Sequence[Operation]) -> Iterator[str]:
    for call, times in _counted(_call(one) for one in operations):
        text = call if times <= _FEW else f"*[{call}] * {times}"
        yield from [textwrap.indent(f"{text},", "    ")] * (times if times <= _FEW else 1)


def _call(operation: Operation) -> str:
    return _fitted(type(operation).__name__, _arguments(operation))


def _arguments(value: Any) -> list[str]:
    """The arguments of a world or an operation, defaults left out."""
    given = [(one.name, getattr(value, one.name), one.default) for one in fields(value)]
    return [
        f"{name}={code(here) if isinstance(here, Wish) else repr(here)}"
        for name, here, default in given
        if here != default
    ]


def _fitted(name: str, arguments: Sequence[str]) -> str:
    """A call, over several lines if one is too narrow."""
    short = _quoted(f"{name}({', '.join(arguments)})")
    if len(short) + len("OPERATIONS = ") <= _WIDTH:
        return short
    return "\n".join([f"{name}(", *(f"    {_quoted(one)}," for one in arguments), ")"])


def _quoted(text: str) -> str:
    """With the quotes that formatters prefer, if nothing in them stands against it."""
    return text if '"' in text else text.replace("'", '"')


def _counted(lines: Iterable[str]) -> list[tuple[str, int]]:
    return [(line, len(list(equal))) for line, equal in groupby(lines)]


def _preamble(subject: Subject) -> str:
    """``import sys``, and what Python needs to find the classes that are not installed."""
    lines = ["import sys"]
    local = [one for one in _classes(subject) if not has_a_module(one)]
    lines += [
        f'sys.exit("{one.__name__} is defined in a function or a script, where nothing can import '
        'it: write it here in place of this line")'
        for one in local
    ]
    folders = dict.fromkeys(_folder(one) for one in _classes(subject) if one not in local)
    found = [f"sys.path.append({folder!r})" for folder in folders if folder]
    return "\n".join([*lines, *([""] if found or local else []), *found]) + "\n"


def _folder(part: type[Any]) -> str:
    """The folder that Python needs in its path to import a class; "" if it is installed."""
    file = getattr(sys.modules.get(part.__module__), "__file__", None)
    names = part.__module__.split(".")
    if names[0] == "jackfield" or file is None:
        return ""
    path = Path(file).resolve()
    folder = path.parents[len(names) - (path.name != "__init__.py")]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return "" if folder in installed else str(folder)


def _classes(subject: Subject) -> tuple[type[Any], ...]:
    return subject.scheduler, subject.manager, subject.policy


def _parts(subject: Subject) -> tuple[list[str], list[str]]:
    """The arguments of ``Subject`` as Python, and the imports that they need."""
    given: list[Any] = [subject.options, subject.manager_options, subject.policy_options]
    names: list[str] = []
    imports: set[str] = set()

    def named(kind: type[Any]) -> str:
        if not has_a_module(kind):
            return kind.__name__
        imports.add(f"from {kind.__module__} import {kind.__qualname__.partition('.')[0]}")
        return kind.__qualname__

    names += [named(one) for one in _classes(subject)]
    settings = ("options", "manager_options", "policy_options")
    for setting, value in zip(settings, given, strict=True):
        dumped = {} if value is None else value.model_dump(mode="json", exclude_unset=True)
        if dumped:
            kind = named(type(value))
            names.append(f"{setting}={kind}.model_validate({dumped!r})")
    return names, sorted(imports)
