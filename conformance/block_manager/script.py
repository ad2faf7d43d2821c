"""A story as text, and as a Python file that needs the manager and nothing of the suite."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ...core.block_manager import BlockManagerConfig
from ..stateful.laws import LawBroken
from . import laws
from .calls import Made, Outcome, Subject
from .script_parts import FILL, HEAD, MEMORY, STATE
from .world import describe

#: A proof that the last call has changed nothing.
UNCHANGED = "assert state(manager) == before, (before, state(manager))"
_TWICE = {
    laws.AllOrNothing: ("with the calls that are refused", "without them"),
    laws.Probes: ("with questions in between", "without them"),
    laws.Determinism: ("once", "again"),
    laws.Processes: ("here", "in another process"),
}


def story_text(config: BlockManagerConfig, story: Sequence[Made]) -> str:
    """The calls, one per line, with what came of each."""
    lines = [f"manager = {{}}({describe(config)})".replace("{}", "Manager")]
    for index, made in enumerate(story):
        # Questions are of interest only where the law is broken.
        if made.call.method == "note" or (made.call.is_probe and index < len(story) - 2):
            continue
        lines.append(f"{made.call.code()}  # {said(made.outcome)}")
    return "\n".join(lines)


def said(outcome: Outcome) -> str:
    """What came of a call, short."""
    if outcome.error is not None:
        return type(outcome.error).__name__
    value = outcome.value
    text = {None: "None", (): "no copies"}.get(value) if value in (None, ()) else str(value)
    copies = value if isinstance(value, tuple) else getattr(value, "copies", ())
    if copies:
        text = "copies " + ", ".join(f"{one.source} to {one.destination}" for one in copies)
    if hasattr(value, "num_cached_tokens"):
        text = f"{value.num_cached_tokens} cached" + (f", {text}" if copies else "")
    if outcome.table is not None:
        text = f"{text}, " * (text not in ("None", None)) + f"table {list(outcome.table)}"
    return str(text)


def story_script(
    subject: Subject,
    config: BlockManagerConfig,
    story: Sequence[Made],
    prompts: Sequence[tuple[tuple[int, ...], str]],
    broken: LawBroken,
) -> str:
    """The calls as a file whose exit status is 1 as long as the law is broken."""
    manager = subject.manager
    imports = ["from jackfield.core.block_manager import BlockManagerConfig"]
    imports.append(f"from {manager.__module__} import {manager.__qualname__.partition('.')[0]}")
    build = f"{manager.__qualname__}(CONFIG)"
    if subject.options is not None and subject.options.model_dump():
        options = type(subject.options)
        imports.append(f"from {options.__module__} import {options.__qualname__}")
        values = subject.options.model_dump(mode="json")
        build = f"{manager.__qualname__}(CONFIG, {options.__qualname__}.model_validate({values!r}))"
    twice = broken.law in _TWICE and not broken.proof
    if broken.law is laws.Processes:
        imports = ["import os", "import subprocess", "import sys", "", *imports]
    head = HEAD.format(
        title=f"Block manager {getattr(manager, 'name', manager.__qualname__)!r} breaks a law.",
        law=broken.law.name,
        law_title="\n".join(textwrap.wrap(broken.law.title(), 95)),
        message="\n".join(textwrap.wrap(broken.message, 95, break_long_words=False)),
        imports="\n".join(imports),
        config=describe(config),
        build=build,
    ).replace("\\", "\\\\")
    if twice:
        return head + _played_twice(story, prompts, broken)
    proof = list(broken.proof)
    memory = any("wrong(" in line for line in proof)
    parts = [MEMORY] if memory else []
    if any("state(" in line for line in proof):
        parts.append(_state_function(story, prompts))
    if any("fill(" in line for line in proof):
        parts.append(FILL)
    told = list(story)
    # A proof that makes the last calls itself takes their place.
    while told and any(told[-1].call.code() in line for line in proof):
        told.pop()
    if not proof and told:
        proof = _same_again(told.pop())
    lines = [*parts, "", "manager = build()"]
    for index, made in enumerate(told):
        if UNCHANGED in proof and index == len(told) - 1:
            lines.append("before = state(manager)")
        lines += _statements(made, memory)
    lines += ["", *proof, 'print("the law holds")']
    return head + "\n".join(lines) + "\n"


def _state_function(story: Sequence[Made], prompts: Sequence[tuple[tuple[int, ...], str]]) -> str:
    names = sorted({one for made in story for one in made.call.arguments if isinstance(one, str)})
    return STATE.format(prompts=[(list(one), salt) for one, salt in prompts], names=names)


def _statements(made: Made, memory: bool) -> list[str]:
    """A call as statements; with what the engine does to its caches, if that is to be shown."""
    call, outcome = made.call, made.outcome
    code = call.code()
    if call.method == "note":
        what, *arguments = call.arguments
        return [f"{what}({', '.join(map(repr, arguments))})"] if memory else []
    comment = f"  # {said(outcome)}"
    if outcome.error is not None:
        error = type(outcome.error).__name__
        return ["try:", f"    {code}", f"except {error}:", "    pass  # as it must be"]
    if not memory or outcome.value in (None, ()):
        if memory and call.method == "fork":
            parent, child = call.arguments
            return [code, f"requests[{child!r}] = list(requests[{parent!r}])"]
        return [code + comment]
    if call.method == "allocate":
        name, tokens, _ = call.arguments
        salt = call.keywords.get("salt", "")
        return [f"admit({name!r}, {list(tokens)}, {salt!r}, {code}){comment}"]
    if call.method == "append":
        return [f"copy({code}){comment}"]
    if call.method == "swap_out":
        return [f"copy({code}, device, host){comment}"]
    if call.method == "swap_in":
        return [f"copy({code}, host, device){comment}"]
    return [code + comment]


def _same_again(last: Made) -> list[str]:
    """A proof for want of a better one: the last call gives what it gave, which was wrong."""
    call, outcome = last.call, last.outcome
    if outcome.error is not None:
        return [call.code()]
    if outcome.table is None:
        return [f"got = {call.code()}", f"assert str(got) != {str(outcome.value)!r}, got"]
    wrong = f"({str(outcome.value)!r}, {list(outcome.table)})"
    return [
        f"got = {call.code()}",
        f"table = manager.block_table({call.subject!r}).tolist()",
        f"assert (str(got), table) != {wrong}, (got, table)",
    ]


def _played_twice(
    story: Sequence[Made], prompts: Sequence[tuple[tuple[int, ...], str]], broken: LawBroken
) -> str:
    """The story on two managers, with and without something that must not matter."""
    first, second = _TWICE[broken.law]
    lines = [_state_function(story, prompts)] if broken.law is laws.Probes else [""]
    lines += ["def play(manager, extra):", '    """What each call gives."""', "    given = []"]
    for made in story:
        call = made.call
        if call.method == "note":
            continue
        code = f"given.append({call.code()})"
        if made.outcome.error is not None:
            error = type(made.outcome.error).__name__
            body = ["try:", f"    {call.code()}", f"except {error}:", "    pass"]
        elif made.idle:
            body = [call.code()]
        else:
            body = [code]
            if made.outcome.table is not None:
                body.append(f"given.append(manager.block_table({call.subject!r}).tolist())")
        extra = made.idle and (
            broken.law is laws.AllOrNothing or (broken.law is laws.Probes and call.is_probe)
        )
        if extra:
            body = ["if extra:", *("    " + line for line in body)]
        if broken.law is laws.Probes:
            body += ["if extra:", "    state(manager)"]
        lines += ["    " + line for line in body]
    lines += ["    return given", "", ""]
    if broken.law is laws.Processes:
        lines += [
            'if "--child" in sys.argv:',
            "    print(play(build(), True))",
            "    sys.exit()",
            "",
            "given = {}",
            'for seed in ("1", "2", "3"):',
            '    environment = {**os.environ, "PYTHONHASHSEED": seed}',
            '    command = [sys.executable, __file__, "--child"]',
            "    given[seed] = subprocess.run(",
            "        command, env=environment, check=True, capture_output=True, text=True",
            "    ).stdout",
            "assert len(set(given.values())) == 1, given",
        ]
    else:
        lines += [
            f"first, second = play(build(), True), play(build(), False)  # {first}, {second}",
            "for one, other in zip(first, second):",
            "    assert one == other, (one, other)",
        ]
    return "\n".join([*lines, 'print("the law holds")']) + "\n"
