"""One backend on one case: first whether it is right, then how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ...conformance.attention.subject import describe, share_of_bound
from .cases import BenchCase
from .clock import Clock
from .contestants import Contestant
from .data import BenchData, ExpectedRows, Layer, make_data
from .direct import NoDirectCall, dense_call, direct_call
from .results import BackendResult, DirectResult, Timing, Verdict


class WrongResult(Exception):  # noqa: N818 - it is no error of this program
    """A result is not what it has to be.

    Attributes:
        share: largest error as a share of its bound.
    """

    def __init__(self, message: str, share: float) -> None:
        super().__init__(message)
        self.share = share


def measure_backend(
    contestant: Contestant,
    case: BenchCase,
    layer: Layer,
    block_size: int,
    expected: ExpectedRows,
    clock: Clock,
    with_direct: bool,
) -> BackendResult:
    """Check a backend on a case, and time it if it is right."""
    refusals = contestant.refusals(case, layer, layer.cache_spec(case, block_size))
    if refusals:
        return _untimed(contestant, case, block_size, Verdict.REFUSED, *refusals)
    try:
        return _measured(contestant, case, layer, block_size, expected, clock, with_direct)
    except WrongResult as wrong:
        return _untimed(contestant, case, block_size, Verdict.WRONG, str(wrong), error=wrong.share)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return _untimed(contestant, case, block_size, Verdict.FAILED, text)


def _measured(
    contestant: Contestant,
    case: BenchCase,
    layer: Layer,
    block_size: int,
    expected: ExpectedRows,
    clock: Clock,
    with_direct: bool,
) -> BackendResult:
    can = contestant.backend.capabilities(layer.device)
    data = make_data(case, layer, block_size, can.kv_layout)
    backend = contestant.backend(data.spec, data.cache_spec, layer.device, contestant.options)
    slots = data.batch.slot_mapping

    def write() -> None:
        backend.write_kv(data.key, data.value, data.cache, slots)

    write()
    plan = backend.plan(data.batch)
    out = data.new_out()

    def forward() -> Tensor:
        return backend.forward(data.query, data.cache, plan, out)

    clock.wait()
    start = time.perf_counter()
    forward()
    clock.wait()
    first_call = time.perf_counter() - start
    error = check(out, expected)
    graphs = can.cuda_graphs and may_be_replayed(case, layer.device)
    timing, graph_error = _time(forward, out, expected, clock, graphs)
    return BackendResult(
        case=case.name,
        backend=contestant.label,
        block_size=block_size,
        verdict=Verdict.TIMED,
        error=max(error, graph_error),
        timing=timing,
        plan_host_us=1e6 * clock.host_seconds(lambda: backend.plan(data.batch)),
        write_kv_us=1e6 * clock.seconds(write),
        write_kv_host_us=1e6 * clock.host_seconds(write),
        first_call_s=first_call,
        direct=_direct(contestant, data, expected, clock) if with_direct else None,
    )


def may_be_replayed(case: BenchCase, device: torch.device) -> bool:
    """Whether the engine would replay the step from a CUDA graph: it captures decoding only."""
    return case.kind == "decode" and device.type == "cuda"


def check(out: Tensor, expected: ExpectedRows) -> float:
    """The largest error of the sampled rows as a share of its bound.

    Raises:
        WrongResult: one is above its bound; or any row, sampled or not, is NaN or was not written.
    """
    actual = out[expected.rows]
    share = share_of_bound(actual, expected.out, expected.bound)
    if not share <= 1:
        text = describe("the output", actual, expected.out, expected.bound)
        raise WrongResult(f"{text} (rows are those compared)", share)
    unwritten = int(out.isnan().flatten(1).any(dim=1).sum())
    if unwritten:
        raise WrongResult(f"{unwritten} of {len(out)} rows are NaN or not written", torch.inf)
    return share


def _time(
    call: Callable[[], Tensor],
    out: Tensor | None,
    expected: ExpectedRows,
    clock: Clock,
    graph: bool,
) -> tuple[Timing, float]:
    """Times of a call, and the largest error of what its graph computes.

    Args:
        call: returns its output.
        out: where it writes it; None if the call returns a new tensor each time.
        expected: what it has to be.
        clock: times it.
        graph: whether it is captured.
    """
    device = clock.seconds(call)
    host = clock.host_seconds(call)
    if not graph:
        return Timing(1e6 * device, None, 1e6 * host), 0.0
    captured: list[Tensor] = []
    replay = clock.graph(lambda: captured.append(call()))
    result = captured[-1] if out is None else out
    result.fill_(torch.nan)
    replay()
    clock.wait()
    error = check(result, expected)
    return Timing(1e6 * device, 1e6 * clock.seconds(replay), 1e6 * host), error


def _direct(
    contestant: Contestant, data: BenchData, expected: ExpectedRows, clock: Clock
) -> DirectResult | None:
    name = contestant.backend.name
    try:
        found = direct_call(name, data, contestant.options)
    except NoDirectCall as reason:
        return DirectResult("", Verdict.REFUSED, str(reason))
    except Exception as error:
        return DirectResult(name, Verdict.FAILED, f"{type(error).__name__}: {error}")
    if found is None:
        return None
    graph = may_be_replayed(data.case, data.query.device)
    return measure_call(found.name, found.call, expected, clock, graph)


def measure_dense(
    case: BenchCase, layer: Layer, expected: ExpectedRows, clock: Clock
) -> DirectResult | None:
    """Torch's attention of the same prompts, unpaged; None if the case is no such prefill, or the
    cache has another dtype, which makes it another result."""
    if case.kind != "prefill" or len(set(case.sequences)) > 1 or layer.kv_dtype != layer.dtype:
        return None
    found = dense_call(make_data(case, layer, 16, "NHD"))
    return measure_call(found.name, found.call, expected, clock, graph=False)


def measure_call(
    name: str, call: Callable[[], Tensor], expected: ExpectedRows, clock: Clock, graph: bool
) -> DirectResult:
    """Check a call that returns ``[T, N, H]``, and time it if it is right.

    Args:
        name: of the function that is called.
        call: makes the call.
        expected: what it has to return.
        clock: times it.
        graph: whether it is also replayed from a CUDA graph, if it can be captured.
    """
    try:
        error = check(call(), expected)
        try:
            timing, _ = _time(call, None, expected, clock, graph)
        except WrongResult:
            raise
        except RuntimeError:
            # A library need not be capturable; then the time from Python stands alone.
            clock.wait()
            timing, _ = _time(call, None, expected, clock, False)
    except WrongResult as wrong:
        return DirectResult(name, Verdict.WRONG, str(wrong), wrong.share)
    except Exception as failure:
        return DirectResult(name, Verdict.FAILED, f"{type(failure).__name__}: {failure}")
    return DirectResult(name, Verdict.TIMED, "", error, timing)


def _untimed(
    contestant: Contestant,
    case: BenchCase,
    block_size: int,
    verdict: Verdict,
    *reasons: str,
    error: float | None = None,
) -> BackendResult:
    return BackendResult(case.name, contestant.label, block_size, verdict, reasons, error)
