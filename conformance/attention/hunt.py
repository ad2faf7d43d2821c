"""Runs the laws on deliberately broken backends: every one of them has to be caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace

import torch

from ...core.attention import dtype_name
from ...core.errors import ConfigError
from ...plugins.validation import did_you_mean
from .axes import Axes
from .laws import Law
from .mutants import MUTANTS, Mutant
from .parallel import workers
from .search import Search, search
from .subject import Subject
from .suite import ALL_LAWS, PROFILES, SuiteOptions, SuiteRun, first_cases

CPU = torch.device("cpu")
#: Random cases of each law and dtype in the attempts that follow each other.
_BUDGETS = (3, 15, PROFILES["quick"].examples)
#: Most faults show in any dtype; the others need the narrow ones.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Kill:
    """How a mutant fared.

    Attributes:
        mutant: name of who it is.
        caught_by: laws that it broke, as ``law (dtype)``; the first one only,
            unless all were tried.
        examples: cases tried up to the first kill.
        seconds: time up to the first kill.
        message: what the first law said.
    """

    mutant: str
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
    jobs: int = 1,
    seed: int = 0,
    hints: Mapping[str, str] | None = None,
    report: Callable[[Kill], None] = lambda kill: None,
) -> list[Kill]:
    """Try the laws on mutants, in the budget of the quick profile.

    All laws get a few cases each, then more, then all that the profile gives them: most faults show
    at once in some law, and need not wait until the laws before it have used up their budget.

    Args:
        mutants: who is hunted.
        all_laws: go on after the first law that notices, so that the table is complete.
        jobs: processes that mutants are shared among.
        seed: of the random cases.
        hints: mutant to the law that is tried on it first, as ``law (dtype)``.
        report: called after each mutant.

    Returns:
        One entry for each mutant, in their order.
    """
    hints = hints or {}
    if jobs == 1:
        kills = []
        for mutant in mutants:
            kills.append(_hunt_one(mutant.name, all_laws, seed, hints.get(mutant.name)))
            report(kills[-1])
        return kills
    found: dict[str, Kill] = {}
    with workers(jobs) as pool:
        pending = [
            pool.submit(_hunt_one, one.name, all_laws, seed, hints.get(one.name)) for one in mutants
        ]
        for done in as_completed(pending):
            kill = done.result()
            found[kill.mutant] = kill
            report(kill)
    return [found[mutant.name] for mutant in mutants]


def mutants_named(names: Sequence[str]) -> list[Mutant]:
    """The mutants of these names; all if there are none.

    Raises:
        ConfigError: a name is unknown.
    """
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"no mutant is called {name!r}{did_you_mean(name, by_name)}")
    return [by_name[name] for name in names] or list(MUTANTS)


def _hunt_one(name: str, all_laws: bool, seed: int, hint: str | None) -> Kill:
    (mutant,) = mutants_named([name])
    subject = Subject(mutant.backend, CPU)
    run = SuiteRun.prepare(subject, SuiteOptions(scale=PROFILES["quick"].scale))
    started = time.perf_counter()
    caught: dict[str, str] = {}
    examples, seconds = 0, 0.0
    rounds = [(number, budget, None) for number, budget in enumerate(_BUDGETS)]
    hinted = [(number, budget, hint) for number, budget, _ in rounds if hint is not None]
    for attempt, budget, wanted in [*hinted, *rounds]:
        for law, dtype in _properties(run):
            if wanted not in (None, f"{law.name} ({dtype_name(dtype)})"):
                continue
            if law.name in caught or law.not_claimed(subject.capabilities, dtype) is not None:
                continue
            axes = replace(run.axes, dtype=(dtype,))
            found = _try(law, subject, axes, budget, attempt, seed)
            if not caught:
                examples += found.examples
                seconds = time.perf_counter() - started
            if found.failed:
                caught[law.name] = f"{law.name} ({dtype_name(dtype)}): {found.violation}"
                if not all_laws:
                    break
        if caught and not all_laws:
            break
    names = tuple(text.partition(":")[0] for text in caught.values())
    message = next(iter(caught.values()), "").partition(": ")[2]
    return Kill(name, names, examples, seconds, message)


def _properties(run: SuiteRun) -> Iterator[tuple[Law, torch.dtype]]:
    """All laws in one dtype, then in the next."""
    dtypes = [dtype for dtype in _DTYPES if dtype in run.axes.dtype]
    for dtype in dtypes or run.axes.dtype:
        for law in ALL_LAWS:
            yield law, dtype


def _try(law: Law, subject: Subject, axes: Axes, budget: int, attempt: int, seed: int) -> Search:
    """Try a law with this many random cases; in the first attempt on its fixed cases too."""
    first = first_cases(law, axes) if attempt == 0 else []
    return search(
        law,
        subject,
        axes,
        examples=0 if law.once else budget * law.weight,
        seconds=PROFILES["quick"].seconds * law.weight,
        seed=seed + attempt,
        first=first,
        shrink=False,
    )


def to_markdown(kills: Sequence[Kill], command: str) -> str:
    """The table of mutants, and how many the suite caught."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    killed = sum(kill.killed for kill in kills)
    lines = [
        "# Mutants of the attention suite",
        "",
        f"{killed} of {len(kills)} deliberately broken backends are caught. Written by "
        f"`{command}`; a mutant is tried in the budget of the quick profile, with few cases of "
        "each law and dtype first, float32 before the others.",
        "",
        "| mutant | fault | published as | caught by | cases before |",
        "|---|---|---|---|---:|",
    ]
    for kill in kills:
        mutant = by_name[kill.mutant]
        caught = ", ".join(kill.caught_by) or "**nothing**"
        lines.append(
            f"| `{mutant.name}` | {mutant.fault} | {', '.join(mutant.published)} | {caught} | "
            f"{kill.examples} |"
        )
    return "\n".join(lines) + "\n"


def hints_of(table: str) -> dict[str, str]:
    """From a table of ``to_markdown``: mutant to the first law that caught it."""
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("| `"): row[3].partition(", ")[0] for row in rows}
