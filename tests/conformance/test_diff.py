"""Two reports compared."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from support.reports import FAILED, PASSED, UNCLAIMED, make_report

from jackfield.conformance.diff import ReportDiff, compare, diff_to_json, render_diff
from jackfield.conformance.results import PropertyResult, Status
from jackfield.core.errors import ConfigError

#: A second law, so that a report whose first law is missing still has one.
OTHER = replace(PASSED, law="repeated")


def compared(old: PropertyResult | None, new: PropertyResult | None) -> ReportDiff:
    reports = [make_report(OTHER, *([] if one is None else [one])) for one in (old, new)]
    return compare(*reports)


def shown(diff: ReportDiff) -> str:
    console = Console(file=StringIO(), width=160, color_system=None)
    with console.capture() as capture:
        console.print(render_diff(diff))
    return capture.get()


def of(status: Status | None) -> PropertyResult | None:
    return None if status is None else replace(PASSED, status=status)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (Status.FAILED, Status.PASSED, "better"),
        (Status.NOT_CLAIMED, Status.PASSED, "better"),
        (Status.PASSED, Status.FAILED, "worse"),
        (Status.PASSED, Status.NOT_CLAIMED, "worse"),
        (Status.PASSED, None, "worse"),
        (Status.NOT_CLAIMED, Status.FAILED, "worse"),
        (None, Status.FAILED, "worse"),
        (Status.FAILED, Status.NOT_CLAIMED, "changed"),
        (Status.FAILED, None, "changed"),
        (None, Status.PASSED, "new"),
        (None, Status.NOT_CLAIMED, "new"),
        (Status.NOT_CLAIMED, None, "gone"),
    ],
)
def test_every_change_has_one_place(old: Status | None, new: Status | None, kind: str) -> None:
    diff = compared(of(old), of(new))
    lists = {name: getattr(diff, name) for name in ("better", "worse", "changed", "new", "gone")}
    assert {name: len(found) for name, found in lists.items() if found} == {kind: 1}
    assert diff.ok is (kind != "worse")
    (change,) = lists[kind]
    assert (change.law, change.variant, change.old, change.new) == ("meaning", "float32", old, new)


@pytest.mark.parametrize("status", Status)
def test_no_change_is_no_change(status: Status) -> None:
    diff = compared(of(status), of(status))
    assert diff.ok
    assert not any((diff.better, diff.worse, diff.changed, diff.new, diff.gone, diff.notes))
    assert diff.error_change is None
    assert "nothing became worse" in shown(diff)


def test_coverage() -> None:
    old = make_report(coverage={"a": {"kept": 1, "lost": 1, "never": 0, "gained": 0, "left": 2}})
    new = make_report(coverage={"a": {"kept": 2, "lost": 0, "never": 0, "gained": 1, "fresh": 0}})
    diff = compare(old, new)
    assert diff.uncovered == ("a=lost", "a=fresh", "a=left")
    assert diff.covered == ("a=gained",)
    assert not diff.ok
    assert "a=lost: no example" in shown(diff)
    assert "a=gained: has examples now" in shown(diff)


def test_largest_change_of_an_error_and_seconds() -> None:
    half = replace(PASSED, variant="float16")
    old = make_report(PASSED, half, UNCLAIMED)
    new = make_report(
        replace(PASSED, max_error=0.5, seconds=3.0), replace(half, max_error=0.1), UNCLAIMED
    )
    diff = compare(old, new)
    assert diff.error_change is not None
    assert str(diff.error_change) == "meaning, float16: 41% -> 10% of the bound"
    assert (diff.old_seconds, diff.new_seconds) == (2.5, 4.25)
    assert "time: 2.5 s -> 4.2 s" in shown(diff)


def test_different_parts_and_devices_are_said_first() -> None:
    new = make_report(FAILED, part="flex", device="cuda, NVIDIA H200", seed=3, versions={})
    diff = compare(make_report(PASSED), new)
    assert diff.notes[:3] == (
        "different parts: torch_sdpa -> flex",
        "different devices: cpu, AVX2 -> cuda, NVIDIA H200",
        "seed: 0 -> 3",
    )
    assert "torch: 2.11.0 -> absent" in diff.notes
    assert shown(diff).splitlines()[0] == diff.notes[0]


def test_different_suites_are_refused() -> None:
    with pytest.raises(ConfigError, match="'attention' cannot be compared with one of the suite"):
        compare(make_report(), make_report(suite="scheduler"))


def test_json() -> None:
    content = json.loads(diff_to_json(compared(PASSED, replace(FAILED, variant="float32"))))
    assert content["ok"] is False
    (worse,) = content["worse"]
    assert worse["old"] == "pass"
    assert worse["new"] == "fail"
    assert worse["reason"] == FAILED.reason
