"""Runs the laws on deliberately broken backends: every one of them has to be caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...core.attention import dtype_name
from .axes import Axes
from .laws import Law
from .mutants import MUTANTS, Mutant
from .search import Search, search
from .strategies import directed_cases, plain_case
from .subject import Subject
from .suite import ALL_LAWS, DIRECTED, ONCE, PROFILES, SuiteOptions, SuiteRun, few_threads

CPU = torch.device("cpu")
#: Most faults show in any dtype; the others need the narrow ones.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Kill:
    """How a mutant fared.

    Attributes:
        mutant: who.
        caught_by: laws that it broke, as ``law (dtype)``; the first one only,
            unless all were tried.
        examples: cases tried up to the first kill.
        seconds: time up to the first kill.
        message: what the first law said.
    """

    mutant: Mutant
    caught_by: tuple[str, ...]
    examples: int
    seconds: float
    message: str

    @property
    def killed(self) -> bool:
        """Whether any law noticed."""
        return bool(self.caught_by)


def hunt(
    mutants: Sequence[Mutant] = MUTANTS,
    *,
    all_laws: bool = False,
    seed: int = 0,
    report: Callable[[Kill], None] = lambda kill: None,
) -> list[Kill]:
    """Try the laws on mutants, in the budget of the quick profile.

    Args:
        mutants: who is hunted.
        all_laws: go on after the first law that notices, so that the table is complete.
        seed: of the random cases.
        report: called after each.
    """
    kills = []
    for mutant in mutants:
        kill = _hunt_one(mutant, all_laws, seed)
        report(kill)
        kills.append(kill)
    return kills


def _hunt_one(mutant: Mutant, all_laws: bool, seed: int) -> Kill:
    subject = Subject(mutant.backend, CPU)
    run = SuiteRun.prepare(subject, SuiteOptions(scale=PROFILES["quick"].scale))
    started = time.perf_counter()
    caught: dict[str, str] = {}
    examples, seconds = 0, 0.0
    for law, dtype in _properties(run):
        if law.name in caught or law.not_claimed(subject.capabilities, dtype) is not None:
            continue
        found = _try(law, subject, replace(run.axes, dtype=(dtype,)), seed)
        if not caught:
            examples += found.examples
            seconds = time.perf_counter() - started
        if found.failed:
            caught.setdefault(law.name, f"{law.name} ({dtype_name(dtype)}): {found.violation}")
            if not all_laws:
                break
    names = tuple(text.split(":")[0] for text in caught.values())
    message = next(iter(caught.values()), "").partition(": ")[2]
    return Kill(mutant, names, examples, seconds, message)


def _properties(run: SuiteRun) -> Iterator[tuple[Law, torch.dtype]]:
    """All laws in one dtype, then in the next."""
    dtypes = [dtype for dtype in _DTYPES if dtype in run.axes.dtype]
    for dtype in dtypes or run.axes.dtype:
        for law in ALL_LAWS:
            yield law, dtype


def _try(law: Law, subject: Subject, axes: Axes, seed: int) -> Search:
    profile = PROFILES["quick"]
    once = law.name in ONCE
    first = [plain_case(axes)] if once else directed_cases(axes) if law.name in DIRECTED else []
    with few_threads(axes):
        return search(
            law,
            subject,
            axes,
            examples=0 if once else profile.examples * law.weight,
            seconds=profile.seconds * law.weight,
            seed=seed,
            first=first,
            shrink=False,
        )


def to_markdown(kills: Sequence[Kill], command: str) -> str:
    """The table of mutants, and how many the suite caught."""
    killed = sum(kill.killed for kill in kills)
    lines = [
        "# Mutants of the attention suite",
        "",
        f"{killed} of {len(kills)} deliberately broken backends are caught. Written by "
        f"`{command}`; laws are tried in the order of the suite, in float32 first, within the "
        "budget of the quick profile.",
        "",
        "| mutant | fault | published as | caught by | cases before |",
        "|---|---|---|---|---:|",
    ]
    for kill in kills:
        published = ", ".join(kill.mutant.published) or ""
        caught = ", ".join(kill.caught_by) or "**nothing**"
        lines.append(
            f"| `{kill.mutant.name}` | {kill.mutant.fault} | {published} | {caught} | "
            f"{kill.examples} |"
        )
    return "\n".join(lines) + "\n"
