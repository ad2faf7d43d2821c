"""Times of calls: on CUDA devices by events around the call, on a CPU by the clock of the host."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]
#: Seconds that a measurement of a short call lasts at least on a CPU, by calling it several times.
_SHORTEST = 2e-4
_FEWEST, _MOST = 10, 300
_HOST_REPEATS = 20


@dataclass(frozen=True)
class Clock:
    """How calls are timed.

    Attributes:
        device: what they run on.
        milliseconds: what a measurement takes, roughly.
        warm: CUDA only. Off, every call finds none of its data in the L2 cache: something larger is
            read before it, outside of the two events. On, short calls are made one after the other
            between two events, and find in the cache what the one before left.
    """

    device: torch.device
    milliseconds: float
    warm: bool = False

    def seconds(self, call: Call) -> float:
        """Median time of a call on the device; on a CPU, of the call itself."""
        call()
        return self._on_host(call) if self.device.type == "cpu" else self._on_device(call)

    def host_seconds(self, call: Call) -> float:
        """Median time until a call returns, the device being idle when it begins."""
        times = []
        call()
        for _ in range(_HOST_REPEATS):
            self.wait()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        self.wait()
        return statistics.median(times)

    def graph(self, call: Call) -> Call:
        """The call, captured as a CUDA graph; what is returned replays it."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _on_host(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        once = max(time.perf_counter() - start, 1e-7)
        calls = max(1, round(_SHORTEST / once))
        times = []
        for _ in range(self._repeats(once * calls)):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)

    def _on_device(self, call: Call) -> float:
        once = max(self._timed(call, 1)() / 1e3, 1e-6)
        # A second call between the same events would find its data in the cache.
        calls = max(1, round(_SHORTEST / once)) if self.warm else 1
        times = [self._timed(call, calls) for _ in range(self._repeats(max(once * calls, 1e-4)))]
        return statistics.median(time() for time in times) / 1e3 / calls

    def _timed(self, call: Call, calls: int) -> Callable[[], float]:
        """Make the calls; what is returned waits for them and tells how many milliseconds."""
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        # Read, not written: nobody's writes are left for the call to write back. It takes longer
        # than to launch a kernel, so that the host is ahead.
        _filler(self.device).sum()
        start.record()
        for _ in range(calls):
            call()
        end.record()

        def milliseconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end))

        return milliseconds

    def _repeats(self, seconds: float) -> int:
        return max(_FEWEST, min(_MOST, int(self.milliseconds / 1e3 / seconds)))


@functools.cache
def _filler(device: torch.device) -> Tensor:
    """A gibibyte: more than any L2 cache has."""
    return torch.zeros(1 << 28, dtype=torch.float32, device=device)
