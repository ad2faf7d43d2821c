"""Reports as JSON, as Markdown, on a terminal, and as what a package publishes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.reports import FAILED, PASSED, UNCLAIMED, make_report

from jackfield.conformance.published import published, published_lines, summary
from jackfield.conformance.report import from_json, read_report, to_json
from jackfield.conformance.report_text import percentage, render, to_markdown, verdict
from jackfield.conformance.results import PropertyResult, Report, Status
from jackfield.core.errors import ConfigError

texts = st.text(max_size=8)
results = st.builds(
    PropertyResult,
    law=texts,
    title=texts,
    variant=texts,
    status=st.sampled_from(Status),
    examples=st.integers(0, 1000),
    max_error=st.none() | st.floats(0, allow_nan=False),
    seconds=st.floats(0, 1e6),
    reason=texts,
    case=texts,
    reproducer=texts,
)
counts = st.dictionaries(texts, st.integers(0, 9), max_size=3)
reports = st.builds(
    Report,
    suite=texts,
    part=texts,
    origin=texts,
    profile=texts,
    device=texts,
    seed=st.integers(),
    only=st.dictionaries(texts, st.lists(texts, max_size=2).map(tuple), max_size=2),
    command=texts,
    versions=st.dictionaries(texts, texts, max_size=2),
    results=st.lists(results, min_size=1, max_size=3).map(tuple),
    coverage=st.dictionaries(texts, counts, max_size=2),
    capabilities=st.dictionaries(texts, texts, max_size=2),
)


def shown(report: Report) -> str:
    console = Console(file=StringIO(), width=240, color_system=None)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


@given(reports)
def test_json_loses_nothing_but_digits(report: Report) -> None:
    read = from_json(to_json(report))
    assert to_json(read) == to_json(report)
    for one, other in zip(read.results, report.results, strict=True):
        assert math.isclose(one.seconds, other.seconds, rel_tol=1e-3)
        assert replace(one, seconds=0, max_error=None) == replace(other, seconds=0, max_error=None)
        if one.max_error is None or other.max_error is None:
            assert one.max_error is other.max_error
        else:
            assert math.isclose(one.max_error, other.max_error, rel_tol=1e-3)
    assert replace(read, results=()) == replace(report, results=())


def test_json_is_stable_and_rounded() -> None:
    report = make_report(PASSED, replace(FAILED, max_error=math.inf))
    content = json.loads(to_json(report))
    assert list(content)[:4] == ["format", "ok", "suite", "part"]
    assert content["format"] == 1
    assert content["ok"] is False
    assert content["results"][0]["max_error"] == 0.4123
    assert content["results"][0]["status"] == "pass"
    assert content["results"][1]["max_error"] == "inf"
    assert from_json(to_json(report)).results[1].max_error == math.inf


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("format"), "no conformance report"),
        (lambda content: content.update(format=2), "of format 2; this Jackfield reads format 1"),
        (without("seed"), "the report has no 'seed'"),
        (lambda content: content["results"][1].pop("law"), r"results\[1\] has no 'law'"),
        (lambda content: content.update(devise="cpu"), "'devise'; did you mean 'device'"),
        (lambda content: content["results"].append("x"), r"results\[2\] is no JSON object"),
        (lambda content: content.update(results=[]), "at least one law"),
        (lambda content: content.update(seed="one"), "seed is 'one'"),
        (
            lambda content: content["results"][0].update(status="fine"),
            r"results.0.status is 'fine'",
        ),
        (lambda content: content["results"][0].update(status="fail"), "ok=true, its results say"),
    ],
)
def test_a_damaged_file_is_refused(
    damage: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    content = json.loads(to_json(make_report()))
    damage(content)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as raised:
        read_report(path)
    assert str(path) in str(raised.value)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is no JSON"):
        from_json("no")
    with pytest.raises(ConfigError, match="no conformance report"):
        from_json("[1]")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "absent.json")


def test_markdown() -> None:
    coverage = {"dtype": {"float32": 120, "float16": 0}}
    page = to_markdown(make_report(PASSED, FAILED, UNCLAIMED, coverage=coverage))
    assert "# Attention conformance: `torch_sdpa`" in page
    assert "**FAILED: 1 law failed, 1 declared value without an example**" in page
    assert "| law | float32 | float16 |" in page
    assert "| `meaning`: The output is right. | pass 41% (120) | **FAIL** 1250% (7) |" in page
    assert "| `lse`: The LSE is right. | not claimed | - |" in page
    assert "- `lse` (float32): lse is not declared" in page
    assert "```text\n2 sequences | block_size=16\n```" in page
    assert "Reproducer: `found/meaning.py`" in page
    assert "| `dtype` | float32 (120), **float16 (0)** |" in page
    assert "seed: 0" in page
    assert "python 3.11.9, jackfield 0.1.0, torch 2.11.0" in page


def test_markdown_tables_keep_their_columns() -> None:
    page = to_markdown(make_report(replace(PASSED, title="Either a|b\nor not.")))
    assert "| `meaning`: Either a\\|b or not. | pass 41% (120) |" in page


def test_terminal() -> None:
    many = {str(size): size for size in range(1, 12)}
    text = shown(
        make_report(
            PASSED,
            FAILED,
            UNCLAIMED,
            only={"dtype": ("float16", "float32")},
            coverage={"head_size": {**many, "256": 0}, "alibi": {"on": 3, "off": 4}},
        )
    )
    lines = [line.split() for line in text.splitlines()]
    assert any(
        line[1:3] == ["meaning", "│"] and "41%" in line and "1250%" in line for line in lines
    )
    assert "1 2 3 4 5 6 7 8 9 10 11: 1 to 11 each, fewest with 1, 256: none" in text
    assert "on: 3, off: 4" in text
    assert "meaning, float16: The output is right." in text
    assert "the smallest case found:\n    2 sequences | block_size=16" in text
    assert "reproducer: found/meaning.py" in text
    assert text.splitlines()[-1].startswith("FAILED: 1 law failed")
    assert "127 examples in 2.5 s" in text.splitlines()[-1]
    assert "narrowed to dtype=float16,float32" in text.splitlines()[-1]


def test_a_law_without_variants_has_one_column() -> None:
    text = shown(make_report(replace(PASSED, variant="")))
    assert "result" in text
    assert text.splitlines()[-1].startswith("passed on cpu, AVX2: 120 examples")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.4123, "41%"), (0.00123, "0.12%"), (0.999, "100%"), (12.5, "1250%"), (math.inf, "inf%")],
)
def test_percentage(share: float, text: str) -> None:
    assert percentage(share) == text


@given(reports)
def test_the_verdict_is_that_of_the_report(report: Report) -> None:
    assert (verdict(report) == "passed") is report.ok


def test_summary() -> None:
    half = replace(PASSED, variant="float16")
    report = make_report(PASSED, half, device="cuda, NVIDIA H200", profile="full, large cases")
    assert summary(report) == (
        "passed on cuda, NVIDIA H200, float32/float16 "
        "(profile full, large cases; jackfield 0.1.0; torch 2.11.0)"
    )
    narrowed = summary(make_report(only={"head_size": ("64",)}))
    assert "narrowed to head_size=64" in narrowed
    assert summary(make_report(FAILED)).startswith("FAILED: 1 law failed")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that must not be imported to find its reports."""
    folder = tmp_path / "report_publisher"
    (folder / "conformance").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_published_reports_of_a_package(package: Path) -> None:
    target = "report_publisher.attention:Backend"
    assert published_lines("attention", "torch_sdpa", target) == ("no published report",)
    folder = package / "conformance"
    (folder / "a.json").write_text(to_json(make_report()))
    (folder / "b.json").write_text(to_json(make_report(part="other")))
    (folder / "c.json").write_text("{}")
    assert [one.path.name for one in published("report_publisher")] == [
        "a.json",
        "b.json",
        "c.json",
    ]
    good, bad = published_lines("attention", "torch_sdpa", target)
    assert good == summary(make_report())
    assert bad.startswith("unreadable report: ")
    assert "c.json" in bad
    assert published_lines("scheduler", "torch_sdpa", target)[0].startswith("unreadable")


def test_a_package_that_is_not_there_publishes_nothing() -> None:
    assert published("no_such_package_of_reports") == ()
    assert published("") == ()


def test_own_published_reports_can_be_read(repository: Path) -> None:
    """Every committed report is found by ``explain``, and none is damaged."""
    found = published("jackfield")
    committed = sorted((repository / "docs" / "conformance").glob("*.json"))
    assert [one.path.name for one in found] == [path.name for path in committed]
    assert [one.problem for one in found if one.problem] == []
