"""What the triton backend cannot do is refused, by name and in one sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.attention_cases import CPU, make_batch, make_case
from support.triton_cases import DEVICE, backend_of, empty_results, interpreted, layer, placed

from jackfield.backends.triton_paged import device_code
from jackfield.backends.triton_paged.backend import TritonBackend
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.core.attention import AttentionPlan, KVCache, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import NoOptions

__all__ = ["interpreted"]

SPEC = layer(dtype=torch.bfloat16)
CACHE = KVCacheSpec(8, 16, 2, 32, 32, torch.bfloat16)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="not installed; install it with: pip install"):
        TritonBackend(SPEC, CACHE, DEVICE)


def test_on_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    missing = TritonBackend.capabilities(CPU).missing
    assert missing is not None
    assert "set TRITON_INTERPRET=1" in missing


def test_the_interpreter_asked_for_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device_code, "INTERPRETED", False)
    with pytest.raises(UnsupportedError, match="after triton had been imported"):
        TritonBackend(SPEC, CACHE, CPU)


def test_auto_never_takes_it_on_a_cpu() -> None:
    assert TritonBackend.capabilities(CPU).auto_priority == 0
    assert TritonBackend.capabilities(torch.device("cuda")).auto_priority > 10


def test_asking_for_capabilities_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from jackfield.backends.triton_paged.backend import TritonBackend;"
        "TritonBackend.capabilities(torch.device('cpu')); print('triton' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 20}, "head_size=20 is not supported"),
        ({"head_size": 264}, "head_size=264 is not supported"),
        ({"v_head_size": 8}, "v_head_size=8 is not supported"),
        ({"dtype": torch.float64}, "dtype=float64 is not supported"),
        ({"num_heads": 258}, "group size=129 is not supported"),
    ],
)
def test_layers_that_are_not_declared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        TritonBackend(replace(SPEC, **changes), CACHE, DEVICE)


@pytest.mark.parametrize("block_size", [1, 4, 12, 48])
def test_block_sizes_that_are_not_declared(block_size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"block_size={block_size} is not supported"):
        TritonBackend(SPEC, replace(CACHE, block_size=block_size), DEVICE)


def test_unknown_and_impossible_options() -> None:
    with pytest.raises(ValidationError, match="tiles"):
        TritonOptions.model_validate({"tiles": 1})
    tiles = {"rows": 48, "keys": 64, "num_warps": 4, "num_stages": 2}
    with pytest.raises(ValidationError, match="48 is no power of two"):
        TritonOptions.model_validate({"prefill": tiles})
    with pytest.raises(TypeError, match="TritonOptions, not NoOptions"):
        TritonBackend(SPEC, CACHE, DEVICE, NoOptions())


def test_what_forward_cannot_use() -> None:
    case = placed(make_case(SPEC, make_batch([5], [2], 16, 8), 16, 8))
    backend = backend_of(case)
    plan = backend.plan(case.batch)
    out, _ = empty_results(case)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is False"):
        backend.forward(case.query, case.cache, plan, out, sinks=torch.zeros(6))
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.forward(case.query, case.cache, AttentionPlan(), out)
    with pytest.raises(ValueError, match="2 query rows were planned, but query has 1 rows"):
        backend.forward(case.query[:1], case.cache, plan, out)
    with pytest.raises(ValueError, match="built for bfloat16, but query is float32"):
        backend.forward(case.query.float(), case.cache, plan, out)
    with pytest.raises(ValueError, match="elements of a head must be contiguous"):
        backend.forward(case.query.transpose(1, 2), case.cache, plan, out)


def test_sinks_that_are_missing_or_of_another_kind() -> None:
    case = placed(make_case(replace(SPEC, sinks=True), make_batch([5], [2], 16, 8), 16, 8))
    backend = backend_of(case)
    out, _ = empty_results(case)
    plan = backend.plan(case.batch)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is True"):
        backend.forward(case.query, case.cache, plan, out)
    for sinks in (torch.zeros(5), torch.zeros(6, dtype=torch.float16), torch.zeros(12)[::2]):
        with pytest.raises(ValueError, match=r"sinks must be a contiguous float32 tensor \(6,\)"):
            backend.forward(case.query, case.cache, plan, out, sinks=sinks.to(DEVICE))


def test_a_cache_of_another_kind() -> None:
    case = placed(make_case(SPEC, make_batch([5], [2], 16, 8), 16, 8))
    backend = backend_of(case)
    k, v = case.cache.k, case.cache.v
    out, _ = empty_results(case)
    plan = backend.plan(case.batch)
    strided = torch.zeros(8, 16, 2, 36, dtype=k.dtype, device=DEVICE)[..., :32]
    for wrong in (k[:4], k.float(), k.transpose(1, 2), strided):
        with pytest.raises(ValueError, match=r"cache of shape \(8, 16, 2, 32\)"):
            backend.forward(case.query, KVCache(k=wrong, v=v), plan, out)
        with pytest.raises(ValueError, match=r"cache of shape \(8, 16, 2, 32\)"):
            backend.write_kv(case.key, case.value, KVCache(k=k, v=wrong), case.batch.slot_mapping)
    with pytest.raises(ValueError, match="2 slots, but key has 1 rows"):
        backend.write_kv(case.key[:1], case.value, case.cache, case.batch.slot_mapping)
