"""What a run of a conformance suite found, as plain data; the JSON report holds exactly this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """What became of a law."""

    PASSED = "pass"
    FAILED = "fail"
    NOT_CLAIMED = "not claimed"


@dataclass(frozen=True)
class PropertyResult:
    """One law tried on one variant of a part (for attention: one dtype).

    Attributes:
        law: name of the law.
        title: the law in a sentence.
        variant: what varies between runs of the law, such as a dtype; "" if nothing does.
        status: what became of it.
        examples: cases tried, shrinking not counted.
        max_error: largest error seen, as a share of its bound; None where no errors are measured.
        seconds: time taken.
        worst_case: the case with that error, in words; "" if there is none.
        reason: why it failed or is not claimed; "" if it passed.
        case: the smallest failing case, in words; "" if it did not fail.
        reproducer: path of the file that shows the failure; "" if there is none.
    """

    law: str
    title: str
    variant: str
    status: Status
    examples: int = 0
    max_error: float | None = None
    seconds: float = 0.0
    worst_case: str = ""
    reason: str = ""
    case: str = ""
    reproducer: str = ""


@dataclass(frozen=True)
class Report:
    """One run of a suite on one part.

    Attributes:
        suite: what kind of part, such as ``attention``.
        part: name of the part.
        origin: the distribution that provides it, or "".
        profile: size of the run.
        device: where it ran, with the device's name.
        seed: of the run.
        only: axes that were narrowed, as on the command line.
        command: what was run.
        versions: of Python, torch, Jackfield and the libraries that matter.
        results: one for each law and variant.
        coverage: axis, then value, then number of examples that had it.
        capabilities: what the part declares, in words.
    """

    suite: str
    part: str
    origin: str
    profile: str
    device: str
    seed: int
    only: Mapping[str, tuple[str, ...]]
    command: str
    versions: Mapping[str, str]
    results: tuple[PropertyResult, ...]
    coverage: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    capabilities: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything that is claimed holds, and everything declared was exercised."""
        failed = any(result.status is Status.FAILED for result in self.results)
        return not failed and not self.uncovered

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Declared values that no example had, as ``axis=value``."""
        return uncovered(self.coverage)


def uncovered(coverage: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Values of a coverage table that no example had, as ``axis=value``."""
    return tuple(
        f"{axis}={value}"
        for axis, counts in coverage.items()
        for value, count in counts.items()
        if not count
    )
