"""Runs the benchmark: every backend on every case, ceilings first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from ...conformance.environment import device_name, versions
from ...core.attention import dtype_name
from .cases import BenchCase
from .ceilings import measure_ceilings
from .clock import Clock
from .contestants import Contestant
from .data import ExpectedRows, Layer, expected_rows
from .measure import measure_backend, measure_dense
from .results import BackendResult, BenchReport, CaseRecord, Ceilings, Settings, Verdict


@dataclass(frozen=True)
class BenchOptions:
    """What to run.

    Attributes:
        layer: dtypes and device.
        cases: what is timed.
        contestants: who.
        unavailable: who cannot run here, and why; for the report.
        block_size: tokens; None is each backend's preferred one.
        milliseconds: of a measurement.
        warm: as in ``Clock``.
        ceilings: whether to measure what the device does at most.
        direct: whether to time the libraries' own calls as well.
        command: what was typed, for the report.
    """

    layer: Layer
    cases: Sequence[BenchCase]
    contestants: Sequence[Contestant]
    unavailable: Mapping[str, str]
    block_size: int | None = None
    milliseconds: float = 60.0
    warm: bool = False
    ceilings: bool = True
    direct: bool = False
    command: str = ""

    @property
    def steps(self) -> int:
        """What ``BenchObserver`` is told about, how many times."""
        return self.ceilings + len(self.cases) * len(self.contestants)


class BenchObserver:
    """Is told how a run goes on; does nothing by itself."""

    def started(self, what: str) -> None:
        """Something is about to be measured."""

    def finished(self, result: BackendResult | None) -> None:
        """It has been measured; None stands for the ceilings."""


class Bench:
    """A run, which can be looked at before it is over.

    Attributes:
        report: what was found so far; whole cases only.
    """

    def __init__(self, options: BenchOptions, observer: BenchObserver | None = None) -> None:
        self._options = options
        self._observer = observer or BenchObserver()
        layer = options.layer
        self._clock = Clock(layer.device, options.milliseconds, options.warm)
        self.report = BenchReport(
            command=options.command,
            device=device_name(layer.device),
            versions=versions(),
            settings=Settings(
                dtype_name(layer.dtype),
                dtype_name(layer.kv_dtype),
                options.block_size,
                options.milliseconds,
                "warm" if options.warm or layer.device.type == "cpu" else "cold",
            ),
            cases=(),
            results=(),
            unavailable=dict(options.unavailable),
        )

    def run(self) -> BenchReport:
        """Measure everything."""
        device = self._options.layer.device
        # Streams, events and graphs are those of the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._run()

    def _run(self) -> BenchReport:
        started = time.perf_counter()
        if self._options.ceilings:
            self._observer.started("ceilings")
            ceilings = measure_ceilings(self._clock, self._options.layer.dtype)
            self.report = replace(self.report, ceilings=ceilings)
            self._observer.finished(None)
        for case in self._options.cases:
            self._run_case(case)
            self.report = replace(self.report, seconds=time.perf_counter() - started)
        return self.report

    def _run_case(self, case: BenchCase) -> None:
        options = self._options
        expected = expected_rows(case, options.layer)
        results = [self._measured(one, case, expected) for one in options.contestants]
        record = case_record(case, options.layer, self.report.ceilings, len(expected.rows))
        if options.direct:
            dense = measure_dense(case, options.layer, expected, self._clock)
            record = replace(record, dense=dense)
        self.report = replace(
            self.report,
            cases=(*self.report.cases, record),
            results=(*self.report.results, *rated(results, record, self.report.ceilings)),
        )

    def _measured(
        self, contestant: Contestant, case: BenchCase, expected: ExpectedRows
    ) -> BackendResult:
        options, device = self._options, self._options.layer.device
        self._observer.started(f"{case.name}: {contestant.label}")
        block_size = contestant.block_size(options.block_size, device)
        result = measure_backend(
            contestant, case, options.layer, block_size, expected, self._clock, options.direct
        )
        if device.type == "cuda":
            # What the next backend allocates is not to depend on what this one left.
            torch.cuda.empty_cache()
        self._observer.finished(result)
        return result


def case_record(
    case: BenchCase, layer: Layer, ceilings: Ceilings | None, rows_checked: int
) -> CaseRecord:
    """What a case is made of, and which ceiling limits it: the one that would take longer.

    Without ceilings that is reading for decode, and the matrix product for everything else.
    """
    num_bytes = case.num_bytes(layer.dtype.itemsize, layer.kv_dtype.itemsize)
    reads = case.kind == "decode"
    if ceilings is not None:
        reads = num_bytes / ceilings.read >= case.flops / ceilings.matmul
    return CaseRecord(
        name=case.name,
        kind=case.kind,
        num_bytes=num_bytes,
        flops=case.flops,
        num_tokens=case.num_tokens,
        rows_checked=rows_checked,
        limit="read" if reads else "matmul",
    )


def rated(
    results: Sequence[BackendResult], case: CaseRecord, ceilings: Ceilings | None
) -> list[BackendResult]:
    """The results of a case with rates, shares of the ceiling, and ratios to the fastest."""
    times = {one.backend: one.timing.best_us for one in results if one.timing is not None}
    rated = []
    for one in results:
        if one.verdict is not Verdict.TIMED:
            rated.append(one)
            continue
        took = times[one.backend] / 1e6
        bytes_per_s, flops_per_s = case.num_bytes / took, case.flops / took
        share = None
        if ceilings is not None:
            reads = case.limit == "read"
            share = bytes_per_s / ceilings.read if reads else flops_per_s / ceilings.matmul
        ratio = times[one.backend] / min(times.values())
        rated.append(
            replace(one, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, share=share, ratio=ratio)
        )
    return rated
