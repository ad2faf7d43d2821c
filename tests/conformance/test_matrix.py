"""The table of what backends may claim, and the one in the documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.reports import FAILED, PASSED, UNCLAIMED, make_report

from jackfield.conformance.matrix import BEGIN, END, Matrix, inserted, matrix, render, to_markdown
from jackfield.conformance.report import read_report
from jackfield.conformance.results import PropertyResult, Report, Status
from jackfield.core.errors import ConfigError

CLAIMS = {
    "dtypes": "bfloat16, float16, float64, float8_e4m3fn",
    "kv_dtypes": "float8_e4m3fn, float32",
    "head_sizes": "16 to 256, multiples of 8",
    "non_causal": "yes",
    "sliding_window": "yes",
    "alibi": "no",
    "lse": "yes",
    "cuda_graphs": "yes",
    "batch_invariant": "yes",
    "mixed_batches": "yes",
}
GRAPHS = replace(PASSED, law="plan_into", max_error=0.9)
INVARIANT = replace(FAILED, law="alone_or_together")


def rows_of(*reports: Report) -> dict[str, tuple[str, ...]]:
    """The cells of each row."""
    return dict(matrix(reports).rows)


def claiming(*results: PropertyResult, **changes: Any) -> Report:
    """A report with these claims."""
    return make_report(*results, capabilities=CLAIMS, **changes)


def test_a_claim_needs_its_laws() -> None:
    coverage = {
        "causal": {"on": 3},
        "sliding_window": {"off": 2, "on": 4},
        "dtype": {"bfloat16": 1, "float16": 1, "float64": 1, "float8_e4m3fn": 1},
        "head_size": {"16": 1, "256": 2},
    }
    rows = rows_of(claiming(PASSED, UNCLAIMED, GRAPHS, INVARIANT, coverage=coverage))
    assert rows["sliding window"] == ("yes",)
    assert rows["not causal"] == ("declared, not tried",)
    assert rows["ALiBi"] == ("no",)
    assert rows["sinks"] == ("?",)
    assert rows["CUDA graphs"] == ("yes",)
    assert rows["batch invariant"] == ("**fails**",)
    assert rows["LSE"] == ("declared, not tried (lse)",)
    assert rows["mixed batches"] == ("yes, not counted",)
    assert rows["laws"] == ("**1 failed**, 2 passed, 1 not claimed",)
    assert rows["examples"] == (str(120 + 120 + 7),)
    assert rows["dtypes"] == ("float64, bfloat16, float16, float8_e4m3fn",)
    assert rows["head sizes"] == ("16 to 256, multiples of 8",)


def test_what_has_no_example_is_not_proved() -> None:
    coverage = {
        "kv_dtype": {"float32": 5, "float8_e4m3fn": 0},
        "dtype": {"float16": 3, "bfloat16": 4},
        "head_size": {"16": 3, "64": 0, "256": 1},
        "alibi": {"off": 9},
    }
    claims = CLAIMS | {"alibi": "yes", "group_sizes": "1 and up"}
    rows = rows_of(make_report(PASSED, capabilities=claims, coverage=coverage))
    assert rows["cache dtypes"] == ("float32; declared, not tried: float8_e4m3fn",)
    assert rows["dtypes"] == ("bfloat16, float16; declared, not tried: float64, float8_e4m3fn",)
    assert rows["head sizes"] == ("16 to 256, multiples of 8; tried: 16, 256",)
    assert rows["group sizes"] == ("1 and up; tried: none",)
    assert rows["ALiBi"] == ("declared, not tried",)


def test_a_report_that_counts_no_examples_says_so() -> None:
    only = {"head_size": ("64", "128"), "law": ("meaning",)}
    claims = CLAIMS | {"block_sizes": "1 and up"}
    rows = rows_of(make_report(PASSED, capabilities=claims, coverage={}, only=only))
    assert rows["cache dtypes"] == ("float32, float8_e4m3fn; tried: not counted",)
    assert rows["head sizes"] == ("16 to 256, multiples of 8; tried: 64, 128",)
    assert rows["block sizes"] == ("1 and up; tried: not counted",)
    assert rows["not causal"] == ("yes, not counted",)
    assert rows["ALiBi"] == ("no",)


def test_a_narrowed_axis_shows_what_was_tried() -> None:
    coverage = {"head_size": {"64": 5, "128": 7}, "block_size": {"16": 3}}
    only = {"head_size": ("64", "128"), "alibi": ("off",)}
    claims = CLAIMS | {"block_sizes": "1 and up"}
    rows = rows_of(make_report(PASSED, capabilities=claims, coverage=coverage, only=only))
    assert rows["head sizes"] == ("16 to 256, multiples of 8; tried: 64, 128",)
    assert rows["block sizes"] == ("1 and up",)


def test_published_reports_that_were_narrowed_claim_what_was_tried(repository: Path) -> None:
    narrowed = set()
    for file in (repository / "docs" / "conformance").glob("*-h200.json"):
        report = read_report(file)
        rows = rows_of(report)
        for row, axis in (("head sizes", "head_size"), ("block sizes", "block_size")):
            tried = ", ".join(report.only.get(axis, ()))
            if tried:
                assert rows[row][0].endswith(f"; tried: {tried}")
                narrowed.add(report.part)
        if "on" not in report.only.get("alibi", ("on",)):
            assert rows["ALiBi"][0] in ("no", "declared, not tried")
    assert len(narrowed) >= 2


@pytest.mark.parametrize(
    ("coverage", "cell"),
    [
        ({"v_head_size": {"64": 0, "128": 2}}, "yes"),
        ({"v_head_size": {"64": 0, "128": 0}}, "declared, not tried"),
        ({"v_head_size": {"as head_size": 7, "128": 0}}, "declared, not tried"),
        ({"v_head_size": {}}, "yes, not counted"),
        ({"head_size": {"64": 3}}, "yes, not counted"),
    ],
)
def test_a_value_head_of_another_size_needs_an_example(
    coverage: dict[str, dict[str, int]], cell: str
) -> None:
    claims = CLAIMS | {"different_v_head_size": "yes"}
    rows = rows_of(make_report(PASSED, capabilities=claims, coverage=coverage))
    assert rows["value head of another size"] == (cell,)


@pytest.mark.parametrize(
    ("coverage", "cell"),
    [
        ({"different_kv_dtype": {"on": 2}}, "yes"),
        ({"different_kv_dtype": {"on": 0}}, "declared, not tried"),
        ({"kv_dtype": {"float32": 3}}, "yes, not counted"),
    ],
)
def test_a_cache_of_another_dtype_needs_an_example(
    coverage: dict[str, dict[str, int]], cell: str
) -> None:
    claims = CLAIMS | {"different_kv_dtype": "yes"}
    rows = rows_of(make_report(PASSED, capabilities=claims, coverage=coverage))
    assert rows["cache of another dtype than the query"] == (cell,)


def test_what_fails_in_one_dtype_fails() -> None:
    rows = rows_of(claiming(PASSED, FAILED))
    assert rows["sliding window"] == ("**fails**",)


def test_libraries() -> None:
    versions = {"torch": "2.11.0", "flash-attn": "2.8.3", "xformers": "0.0.35"}
    parts = {
        "torch_sdpa": "torch 2.11.0",
        "flash_attn": "flash-attn 2.8.3, torch 2.11.0",
        "xformers": "xformers 0.0.35, torch 2.11.0",
        "xformers_cutlass": "xformers 0.0.35, torch 2.11.0",
        "flashinfer": "jackfield 0.1.0",
    }
    reports = [make_report(part=part, versions=versions) for part in parts]
    assert rows_of(*reports)["library"] == tuple(parts.values())
    foreign = make_report(part="flash_attn", versions=versions, origin="fast-kernels 3.1")
    assert rows_of(foreign)["library"] == ("fast-kernels 3.1",)


def test_headings() -> None:
    one, other = make_report(), make_report(part="flex")
    assert matrix([one, other]).columns == ("torch_sdpa", "flex")
    cuda = make_report(device="cuda, NVIDIA H200")
    assert matrix([one, cuda]).columns == (
        "torch_sdpa on cpu, AVX2",
        "torch_sdpa on cuda, NVIDIA H200",
    )
    with pytest.raises(ConfigError, match="two reports are of one backend on one device"):
        matrix([one, one])
    with pytest.raises(ConfigError, match="at least one report"):
        matrix([])
    with pytest.raises(ConfigError, match="of the suite 'scheduler'"):
        matrix([make_report(suite="scheduler")])


def test_markdown_and_markers() -> None:
    table = Matrix(("a", "b"), (("dtypes", ("x", "y|z")),))
    block = to_markdown(table)
    assert block == "|  | `a` | `b` |\n| --- | --- | --- |\n| dtypes | x | y/z |\n"
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    made = inserted(page, block)
    assert made == f"before\n{BEGIN}\n\n{block}\n{END}\nafter\n"
    assert inserted(made or "", block) == made
    assert inserted("no markers", block) is None
    console = Console(record=True, width=100)
    with console.capture() as shown:
        console.print(render(table))
    assert "dtypes" in shown.get()


def test_the_table_of_the_documentation_is_that_of_the_reports(repository: Path) -> None:
    files = sorted((repository / "docs" / "conformance").glob("*-h200.json"))
    assert files
    page = (repository / "docs" / "backends.md").read_text(encoding="utf-8")
    block = to_markdown(matrix([read_report(file) for file in files]))
    command = (
        "jackfield conformance matrix docs/conformance/*-h200.json --markdown docs/backends.md"
    )
    assert command in page
    assert inserted(page, block) == page, f"run: {command}"


def test_published_reports_have_what_the_table_needs(repository: Path) -> None:
    for file in (repository / "docs" / "conformance").glob("*-h200.json"):
        report = read_report(file)
        cells = [cell for _, (cell,) in matrix([report]).rows]
        assert "?" not in cells
        assert any(one.status is Status.PASSED for one in report.results)
