"""The benchmark on a GPU: events, graphs, ceilings."""

from __future__ import annotations

import pytest
import torch

from jackfield.backends.torch_sdpa import TorchSdpaBackend, TorchSdpaOptions
from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.core.options import NoOptions
from jackfield.entrypoints.bench.cases import BenchCase
from jackfield.entrypoints.bench.ceilings import measure_ceilings
from jackfield.entrypoints.bench.clock import Clock
from jackfield.entrypoints.bench.contestants import Contestant, named
from jackfield.entrypoints.bench.data import Layer
from jackfield.entrypoints.bench.results import Verdict
from jackfield.entrypoints.bench.run import Bench, BenchOptions

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CASES = (
    BenchCase(14, 2, 64, ((300, 1),) * 8),
    BenchCase(14, 2, 64, ((257, 257),) * 2),
    BenchCase(14, 2, 64, ((300, 1), (90, 90))),
)


@pytest.mark.parametrize("warm", [False, True])
def test_events_and_host_times(warm: bool) -> None:
    clock = Clock(CUDA, 5, warm)
    small, large = (torch.randn(size, size, device=CUDA) for size in (64, 4096))
    assert 0 < clock.seconds(lambda: small @ small) < clock.seconds(lambda: large @ large)
    assert 0 < clock.host_seconds(lambda: large @ large) < 0.1


def test_a_graph_replays_the_call() -> None:
    clock = Clock(CUDA, 5)
    numbers = torch.zeros(8, device=CUDA)
    replay = clock.graph(lambda: numbers.add_(1))
    clock.wait()
    before = numbers.clone()
    replay()
    clock.wait()
    assert torch.equal(numbers, before + 1)


def test_a_run() -> None:
    pytest.importorskip("triton")
    contestants = [
        *named(["triton"]),
        Contestant("torch_sdpa", TorchSdpaBackend, TorchSdpaOptions()),
        Contestant("plain", PlainBackend, NoOptions()),
    ]
    layer = Layer(torch.bfloat16, torch.bfloat16, CUDA)
    options = BenchOptions(layer, CASES, contestants, {}, milliseconds=2, direct=True)
    report = Bench(options).run()
    assert list(report.faults) == []
    for one in report.results:
        assert one.verdict is Verdict.TIMED
        assert one.timing is not None
        captured = one.backend == "triton" and one.case.startswith("decode")
        assert (one.timing.graph_us is not None) is captured
        assert one.share is not None
    dense = [case.dense is not None for case in report.cases]
    assert dense == [False, True, False]


def test_ceilings() -> None:
    found = measure_ceilings(Clock(CUDA, 5), torch.bfloat16)
    assert min(found.copy, found.read) > 1e10
    assert found.matmul > 1e11
