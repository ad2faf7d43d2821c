"""The tables of published speeds say what the results in ``benchmarks/results`` say."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages import assert_rows, one_line, results

from jackfield.entrypoints.bench.results import BackendResult, BenchReport, Timing, read_report
from jackfield.entrypoints.bench.table import case_rate, microseconds

BACKENDS = (
    "triton",
    "flash_attn",
    "flashinfer",
    "xformers",
    "torch_sdpa",
    "torch_varlen",
    "flex",
    "xformers_cutlass",
)
WITH_DIRECT_CALLS = ("flash_attn", "flashinfer", "xformers")


@pytest.fixture
def bench(repository: Path) -> BenchReport:
    return read_report(repository / "benchmarks" / "results" / "attention_gpu.json")


@pytest.fixture
def plain_form(repository: Path) -> BenchReport:
    """flashinfer's own calls in the form that is not for CUDA graphs."""
    folder = repository / "benchmarks" / "results"
    return read_report(folder / "attention_gpu_plain_form.json")


@pytest.fixture
def backends_page(repository: Path) -> str:
    return (repository / "docs" / "backends.md").read_text(encoding="utf-8")


@pytest.fixture
def engine_page(repository: Path) -> str:
    return (repository / "docs" / "engine-speed.md").read_text(encoding="utf-8")


def timed(bench: BenchReport, case: str, backend: str) -> tuple[BackendResult, Timing]:
    (found,) = (one for one in bench.of_case(case) if one.backend == backend)
    assert found.timing is not None
    return found, found.timing


def test_nothing_in_the_run_was_wrong(bench: BenchReport) -> None:
    assert list(bench.faults) == []
    assert {one.backend for one in bench.results} == set(BACKENDS)


def test_rates_of_triton(bench: BenchReport, backends_page: str) -> None:
    rows = []
    for case in bench.cases:
        found, timing = timed(bench, case.name, "triton")
        assert found.share is not None
        dense = "-"
        if case.dense is not None and case.dense.timing is not None:
            dense = microseconds(case.dense.timing.best_us)
        rows.append(
            f"| `{case.name}` | {microseconds(timing.best_us)} | {case_rate(case, found)} | "
            f"{100 * found.share:.0f} % | {dense} |"
        )
    assert_rows(backends_page, rows)
    assert bench.ceilings is not None
    assert f"{bench.ceilings.read / 1e12:.2f} TB/s" in backends_page
    assert f"{bench.ceilings.matmul / 1e12:.0f} TFLOP/s" in backends_page


def test_backends_side_by_side(bench: BenchReport, backends_page: str) -> None:
    assert f"| case | {' | '.join(f'`{name}`' for name in BACKENDS)} |" in backends_page
    rows = []
    for case in bench.cases:
        times = [timed(bench, case.name, name)[1].best_us for name in BACKENDS]
        gaps = [has_gaps(timed(bench, case.name, name)[1]) for name in BACKENDS]
        cells = [
            microseconds(time) + ("\\*" if gap else "")
            for time, gap in zip(times, gaps, strict=True)
        ]
        cells[times.index(min(times))] = f"**{cells[times.index(min(times))]}**"
        rows.append(f"| `{case.name}` | {' | '.join(cells)} |")
    assert_rows(backends_page, rows)


def has_gaps(timing: Timing) -> bool:
    """Whether the host may have been too slow for the device to be busy all the time."""
    return timing.graph_us is None and timing.host_us > 250


def test_what_adapters_add(bench: BenchReport, plain_form: BenchReport, backends_page: str) -> None:
    assert_rows(
        backends_page,
        (
            f"| `{case.name}` | "
            + " | ".join(added(bench, case.name, name) for name in WITH_DIRECT_CALLS)
            + f" | {added(plain_form, case.name, 'flashinfer')} |"
            for case in bench.cases
        ),
    )


def test_what_is_said_of_adapters(
    bench: BenchReport, plain_form: BenchReport, backends_page: str
) -> None:
    text = one_line(backends_page)
    copies = [ours - theirs for ours, theirs in pairs(bench, "xformers")]
    assert f"copied to `out`: {min(copies):.1f} to {max(copies):.1f} us." in text
    forms = [ours - theirs for ours, theirs in pairs(plain_form, "flashinfer", "decode")]
    assert f"costs decoding up to {max(forms):.1f} us more." in text
    assert " attention --direct " in plain_form.command


def pairs(bench: BenchReport, backend: str, kind: str = "") -> list[tuple[float, float]]:
    """Times of our call and of the library's own, in the cases of a kind that have both."""
    found = []
    for case in bench.cases:
        one, timing = timed(bench, case.name, backend)
        if case.name.startswith(kind) and one.direct is not None and one.direct.timing is not None:
            found.append((timing.best_us, one.direct.timing.best_us))
    assert found
    return found


def added(bench: BenchReport, case: str, backend: str) -> str:
    """What a backend takes, what the library's own call takes, and how much more the former is."""
    found, timing = timed(bench, case, backend)
    if found.direct is None or found.direct.timing is None:
        return "-"
    ours, theirs = timing.best_us, found.direct.timing.best_us
    return f"{microseconds(ours)} / {microseconds(theirs)} ({ours / theirs - 1:+.1%})"


def test_engine_throughput(repository: Path, engine_page: str) -> None:
    assert_rows(
        engine_page,
        (
            f"| {one['model'].removesuffix(' shape')} | `{one['backend']}` | {one['mode']} | "
            f"{one['seconds']:.2f} | {one['output_tokens_per_second']:,} | {one['steps']:,} |"
            for one in results(repository, "engine_gpu")["results"]
        ),
    )


def test_other_engines(repository: Path, engine_page: str) -> None:
    """Their workload is ours; the page says what the file says, and that it is another run."""
    peers = results(repository, "engine_gpu_peers")
    ours = results(repository, "engine_gpu")["results"]
    for name in ("prompt_tokens", "output_tokens"):
        assert {peers["workload"][name]} == {one[name] for one in ours}
    engines = dict.fromkeys(one["engine"] for one in peers["results"])
    rates = {(one["engine"], one["shape"]): one["tokens_per_second"] for one in peers["results"]}
    assert_rows(
        engine_page,
        (
            f"| {name} | {span(rates.get((name, '0.5B')))} | {span(rates.get((name, '7B')))} |"
            for name in engines
        ),
    )
    assert not peers["same_run_as_engine_gpu"]
    text = one_line(engine_page)
    assert f"on {peers['measured']}. These numbers are not from the same run" in text
    small, large = peers["floor"]["estimates"]
    assert (
        f"{small['seconds']} s for 0.5B, which is {small['tokens_per_second']:,} tokens/s, and "
        f"{large['seconds']} s for 7B, which is {large['tokens_per_second']:,} tokens/s" in text
    )
    for one, tokens in ((small, 133_966), (large, 133_966)):
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"], rel=0.01)


def span(rates: list[int] | None) -> str:
    """Lowest and highest rate."""
    if rates is None:
        return "-"
    return " to ".join(f"{rate:,}" for rate in dict.fromkeys(rates))


def test_where_a_step_goes(repository: Path, engine_page: str) -> None:
    runs = results(repository, "engine_gpu")["results"]
    names = list(runs[0]["decoding"]["host_us_per_step"])
    rows = [
        f"| {name} | {' | '.join(str(run['decoding']['host_us_per_step'][name]) for run in runs)} |"
        for name in names
    ]
    assert_rows(engine_page, rows)
    device = " | ".join(str(run["decoding"]["device_us_per_step"]) for run in runs)
    assert f"| kernels on the device | {device} |" in engine_page


def test_swapping(repository: Path, engine_page: str) -> None:
    content = results(repository, "swap_gpu")
    assert all(one["contents_equal"] for one in content["rows"])
    assert {round(one["gib"], 2) for one in content["rows"]} == {4.0}
    assert_rows(
        engine_page,
        (
            f"| {one['dtype']} | {one['layout']} | {one['blocks']} | {one['portion']:,} | "
            f"{one['out']:.1f} ({one['out'] / one['plain_out']:.0%}) | "
            f"{one['in']:.1f} ({one['in'] / one['plain_in']:.0%}) |"
            for one in content["rows"]
        ),
    )
