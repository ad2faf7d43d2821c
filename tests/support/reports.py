"""Hand-made conformance reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jackfield.conformance.results import PropertyResult, Report, Status

PASSED = PropertyResult(
    "meaning", "The output is right.", "float32", Status.PASSED, 120, 0.4123456, 1.25
)
UNCLAIMED = replace(
    PASSED,
    law="lse",
    title="The LSE is right.",
    status=Status.NOT_CLAIMED,
    examples=0,
    max_error=None,
    seconds=0.0,
    reason="lse is not declared",
)
FAILED = replace(
    PASSED,
    variant="float16",
    status=Status.FAILED,
    examples=7,
    max_error=12.5,
    reason="the output is wrong in 3 of 8 elements",
    case="2 sequences | block_size=16",
    reproducer="found/meaning.py",
)


def make_report(*results: PropertyResult, **changes: Any) -> Report:
    """A report of these results, or of two that are in order."""
    report = Report(
        suite="attention",
        part="torch_sdpa",
        origin="jackfield 0.1.0",
        profile="quick, small cases",
        device="cpu, AVX2",
        seed=0,
        only={},
        command="jackfield conformance attention --backend torch_sdpa",
        versions={"python": "3.11.9", "jackfield": "0.1.0", "torch": "2.11.0"},
        results=results or (PASSED, UNCLAIMED),
        coverage={"dtype": {"float32": 120}, "head_size": {"64": 50, "128": 70}},
        capabilities={"dtypes": "float16, float32", "lse": "no"},
    )
    return replace(report, **changes)
