"""The libraries' own calls, on doubles of the libraries."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from support.library_doubles import DOUBLES

from jackfield.core.attention import KVLayout
from jackfield.core.options import NoOptions
from jackfield.entrypoints.bench.cases import BenchCase
from jackfield.entrypoints.bench.clock import Clock
from jackfield.entrypoints.bench.data import BenchData, Layer, expected_rows, make_data
from jackfield.entrypoints.bench.direct import (
    DIRECT_CALLS,
    NoDirectCall,
    dense_call,
    direct_call,
)
from jackfield.entrypoints.bench.measure import check, measure_call
from jackfield.entrypoints.bench.results import Verdict

LAYER = Layer(torch.float32, torch.float32, torch.device("cpu"))
DECODE = BenchCase(6, 2, 16, ((33, 1), (20, 1), (1, 1)))
PREFILL = BenchCase(6, 2, 16, ((33, 33), (33, 33)))
MIXED = BenchCase(6, 2, 16, ((33, 1), (20, 20), (40, 7)))
CASES = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}
LAYOUTS: tuple[KVLayout, ...] = ("NHD", "HND")


@pytest.fixture
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in DOUBLES.items():
        monkeypatch.setitem(sys.modules, name, module)
        for parent in (name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)):
            if parent not in DOUBLES:
                monkeypatch.setitem(sys.modules, parent, SimpleNamespace())


def filled(case: BenchCase, layout: KVLayout = "NHD") -> BenchData:
    """A case whose new tokens are in the cache."""
    data = make_data(case, LAYER, 16, layout)
    slots = data.batch.slot_mapping
    data.cache.k[slots // 16, slots % 16] = data.key
    data.cache.v[slots // 16, slots % 16] = data.value
    return data


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("backend", DIRECT_CALLS)
def test_each_call_computes_the_case(backend: str, kind: str) -> None:
    case = CASES[kind]
    # FlashInfer alone is told of another order.
    for layout in LAYOUTS if backend == "flashinfer" else LAYOUTS[:1]:
        data = filled(case, layout)
        if backend == "xformers" and kind != "decode":
            with pytest.raises(NoDirectCall, match="split-K"):
                direct_call(backend, data, NoOptions())
            return
        found = direct_call(backend, data, NoOptions())
        assert found is not None
        assert check(found.call(), expected_rows(case, LAYER)) <= 1


def test_no_library_no_call() -> None:
    assert direct_call("torch_sdpa", filled(DECODE), NoOptions()) is None


def test_another_cache_dtype_has_no_call() -> None:
    layer = Layer(torch.float32, torch.float16, torch.device("cpu"))
    with pytest.raises(NoDirectCall, match="query's dtype"):
        direct_call("flash_attn", make_data(DECODE, layer, 16, "NHD"), NoOptions())


def test_dense() -> None:
    found = dense_call(make_data(PREFILL, LAYER, 16, "NHD"))
    assert check(found.call(), expected_rows(PREFILL, LAYER)) <= 1


def test_what_becomes_of_a_call() -> None:
    expected = expected_rows(DECODE, LAYER)
    right = expected.out.float()
    clock = Clock(LAYER.device, milliseconds=1)

    def broken() -> torch.Tensor:
        raise RuntimeError("no kernel image")

    timed = measure_call("right", lambda: right, expected, clock, graph=False)
    assert timed.verdict is Verdict.TIMED
    assert timed.timing is not None
    assert timed.timing.graph_us is None
    wrong = measure_call("wrong", lambda: right * 1.01, expected, clock, graph=False)
    assert (wrong.verdict, wrong.timing) == (Verdict.WRONG, None)
    assert wrong.error is not None
    assert wrong.error > 1
    failed = measure_call("broken", broken, expected, clock, graph=False)
    assert failed.verdict is Verdict.FAILED
    assert failed.reason == "RuntimeError: no kernel image"
