"""What a run of the benchmark found, as plain data; the JSON file holds exactly this."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from ...conformance.report import plain
from ...core.errors import ConfigError

#: Rises when a file can no longer be read by what read it before.
FORMAT = 2


class Verdict(Enum):
    """What became of a backend on a case."""

    TIMED = "timed"
    WRONG = "wrong"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Ceilings:
    """What the device does at most.

    Attributes:
        copy, read: bytes a second; a copy counts twice, read and written.
        matmul: floating-point operations a second of a matrix product.
    """

    copy: float
    read: float
    matmul: float


@dataclass(frozen=True)
class Timing:
    """Times of a call in microseconds, each a median.

    Attributes:
        device_us: on the device, called from Python; on a CPU, the call itself.
        graph_us: on the device, replayed from a CUDA graph; None where there is none.
        host_us: until the call returns to the host, which begins when the device is idle.
    """

    device_us: float
    graph_us: float | None
    host_us: float

    @property
    def best_us(self) -> float:
        """From the graph if there is one: what a step of the engine takes."""
        return self.device_us if self.graph_us is None else self.graph_us


@dataclass(frozen=True)
class DirectResult:
    """A library's own call on the tensors of a backend, without the backend.

    Attributes:
        name: what is called.
        verdict: what became of it; refused if there is no such call for the case.
        reason: why it was not timed; "" if it was.
        error: largest error as a share of its bound; None if it was not computed.
        timing: None if it was not timed.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    error: float | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class BackendResult:
    """A backend on a case.

    Attributes:
        case, backend: names; that of a backend with options has them behind it.
        block_size: tokens of a block.
        verdict: what became of it.
        reasons: why it was not timed; empty if it was.
        error: largest error of the compared rows as a share of its bound; None if not computed.
        timing: of ``forward``; None if it was not timed.
        plan_host_us, write_kv_us, write_kv_host_us: medians in microseconds: of ``plan`` on the
            host, of ``write_kv`` on the device and on the host.
        first_call_s: seconds of the first ``forward``, compilation included.
        bytes_per_s, flops_per_s: what the case is made of, over the best time.
        share: of the ceiling that limits the case; None without ceilings.
        ratio: best time over that of the fastest backend of the case: 1 or more.
        direct: the library's own call; None if it was not asked for, or the backend has none.
    """

    case: str
    backend: str
    block_size: int
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    error: float | None = None
    timing: Timing | None = None
    plan_host_us: float | None = None
    write_kv_us: float | None = None
    write_kv_host_us: float | None = None
    first_call_s: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    share: float | None = None
    ratio: float | None = None
    direct: DirectResult | None = None


@dataclass(frozen=True)
class CaseRecord:
    """A case as it was run.

    Attributes:
        name, kind: of the case.
        num_bytes, flops: of visible keys and values, query and output, each once; of the two
            matrix products.
        num_tokens, rows_checked: rows of the query, and how many of them were compared.
        limit: ``read`` or ``matmul``: the ceiling that would take longer.
        dense: torch's attention of the same prompts, contiguous and unpaged; None if it was not
            asked for, or the case is no prefill of equal lengths.
    """

    name: str
    kind: str
    num_bytes: int
    flops: int
    num_tokens: int
    rows_checked: int
    limit: str
    dense: DirectResult | None = None


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        dtype, kv_cache_dtype: of query and cache.
        block_size: tokens; None is each backend's preferred one.
        milliseconds: of a measurement.
        cache: whether calls find the device's cache ``cold`` or ``warm``.
    """

    dtype: str
    kv_cache_dtype: str
    block_size: int | None
    milliseconds: float
    cache: str


@dataclass(frozen=True)
class BenchReport:
    """One run.

    Attributes:
        command: what was typed.
        device: with the device's name.
        versions: of Python, torch, Jackfield and the libraries that matter.
        settings: what was asked for.
        cases: in the order in which they were run.
        results: one for each case and backend that runs here.
        unavailable: backends that cannot run here at all, and why.
        ceilings: None if they were not measured.
        seconds: of the whole run.
    """

    command: str
    device: str
    versions: Mapping[str, str]
    settings: Settings
    cases: tuple[CaseRecord, ...]
    results: tuple[BackendResult, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    seconds: float = 0.0

    def of_case(self, name: str) -> tuple[BackendResult, ...]:
        """The results of a case, the fastest first, those that were not timed last."""
        found = [one for one in self.results if one.case == name]
        return tuple(sorted(found, key=lambda one: one.ratio or float("inf")))

    @property
    def faults(self) -> Iterator[str]:
        """Whatever was wrong or broke, in a sentence each."""
        bad = (Verdict.WRONG, Verdict.FAILED)
        for one in self.results:
            if one.verdict in bad:
                yield f"{one.case}: {one.backend} {one.verdict.value}: {'; '.join(one.reasons)}"
            if one.direct is not None and one.direct.verdict in bad:
                yield f"{one.case}: {_direct_fault(one.direct)}"
        for case in self.cases:
            if case.dense is not None and case.dense.verdict in bad:
                yield f"{case.name}: {_direct_fault(case.dense)}"


def _direct_fault(direct: DirectResult) -> str:
    return f"{direct.name} {direct.verdict.value}: {direct.reason}"


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _File:
    format: int
    report: BenchReport


_ADAPTER = TypeAdapter(_File)


def to_json(report: BenchReport) -> str:
    """The report as JSON, indented; numbers have four digits."""
    return json.dumps({"format": FORMAT, "report": plain(report)}, indent=1) + "\n"


def read_report(path: Path) -> BenchReport:
    """The report of a file.

    Raises:
        ConfigError: it cannot be read, or is no report of this format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the results {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(
            f"{str(path)!r} holds no results of format {FORMAT}, such as "
            "`jackfield bench attention --json FILE` writes"
        )
    try:
        return _ADAPTER.validate_python(content).report
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"]))
        raise ConfigError(f"{str(path)!r} is damaged: {where}: {detail['msg']}") from None
