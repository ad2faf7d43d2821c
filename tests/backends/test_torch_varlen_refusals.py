"""What torch_varlen cannot do is refused, by name; and the double is like torch's function."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import varlen_double
from support.attention_cases import CPU, make_batch, make_case
from support.varlen_backends import PagedVarlenOnCpu, VarlenOnCpu
from torch.nn.attention import varlen

from jackfield.backends.torch_varlen import TorchVarlenBackend, TorchVarlenOptions
from jackfield.core.attention import AttentionPlan, AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import NoOptions
from jackfield.plugins import builtin

CUDA = torch.device("cuda")
SPEC = AttentionSpec(6, 2, 32, 32, 0.2, torch.float16)
CACHE = KVCacheSpec(8, 16, 2, 32, 32, torch.float16)


def test_it_is_registered() -> None:
    found: dict[str, str | type] = {}

    def register(name: str, target: str | type) -> None:
        found[name] = target

    builtin.jackfield_attention_backends(register)
    assert found["torch_varlen"] == f"{TorchVarlenBackend.__module__}:TorchVarlenBackend"


def test_auto_never_chooses_it() -> None:
    assert TorchVarlenBackend.capabilities(CUDA).auto_priority == 0


def test_blocks_that_suit_the_version_are_preferred() -> None:
    assert VarlenOnCpu.capabilities(CPU).preferred_block_size == 16
    assert PagedVarlenOnCpu.capabilities(CPU).preferred_block_size == 256


def test_what_it_lacks_is_named() -> None:
    spec = AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=20,
        v_head_size=264,
        scale=0.1,
        dtype=torch.float32,
        logits_soft_cap=4.0,
        alibi_slopes=(0.5,) * 6,
    )
    cache = KVCacheSpec(8, 5, 2, 20, 264, torch.float32)
    assert VarlenOnCpu.capabilities(CPU).unsupported(spec, cache, CPU) == [
        "logits_soft_cap=4.0 is not supported",
        "alibi_slopes is not supported",
        "v_head_size=264 with head_size=20 is not supported",
        "head_size=20 is not supported (supported: 8 to 256, multiples of 8)",
        "v_head_size=264 is not supported (supported: 8 to 256, multiples of 8)",
        "dtype=float32 is not supported (supported: bfloat16, float16)",
        "kv_cache_dtype=float32 is not supported (supported: bfloat16, float16)",
    ]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"device=cpu is not supported \(supported: cuda\)"):
        TorchVarlenBackend(SPEC, CACHE, CPU)


class AbsentModule(VarlenOnCpu):
    @classmethod
    def _module(cls) -> Any:
        raise ModuleNotFoundError


class OldModule(VarlenOnCpu):
    """As in torch 2.10, which has no windows."""

    @classmethod
    def _module(cls) -> Any:
        return SimpleNamespace(varlen_attn=lambda query, key, value, is_causal=False: None)


@pytest.mark.parametrize("kind", [AbsentModule, OldModule])
def test_a_torch_without_the_function(kind: type[VarlenOnCpu]) -> None:
    assert kind.capabilities(CPU).missing == (
        f"torch {torch.__version__} has no torch.nn.attention.varlen.varlen_attn with a "
        "window_size; install one that has: pip install 'torch>=2.11'"
    )
    with pytest.raises(UnsupportedError, match=r"has no torch\.nn\.attention\.varlen"):
        kind(SPEC, CACHE, CPU)


def test_slots_beyond_32_bits() -> None:
    cache = KVCacheSpec(2**27, 16, 2, 32, 32, torch.float16)
    with pytest.raises(UnsupportedError, match=r"num_blocks=134217728 of block_size=16 .* 2\*\*31"):
        VarlenOnCpu(SPEC, cache, CPU)


def test_options_of_another_part() -> None:
    with pytest.raises(TypeError, match="TorchVarlenOptions, not NoOptions"):
        VarlenOnCpu(SPEC, CACHE, CPU, NoOptions())
    with pytest.raises(ValueError, match="max_gathered_elements"):
        TorchVarlenOptions(max_gathered_elements=0)


def test_what_plan_and_forward_cannot_use() -> None:
    case = make_case(SPEC, make_batch([5], [2], 16, 8), 16, 8)
    backend = VarlenOnCpu(SPEC, CACHE, CPU)
    plan = backend.plan(case.batch)
    out = torch.zeros(len(case.query), 6, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="into must be None"):
        backend.plan(case.batch, into=plan)
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.forward(case.query, case.cache, AttentionPlan(), out)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is False"):
        backend.forward(case.query, case.cache, plan, out, sinks=torch.zeros(6))
    with pytest.raises(ValueError, match="2 query rows were planned"):
        backend.forward(case.query[:1], case.cache, plan, out)


def test_an_lse_in_another_order_is_not_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SPEC, make_batch([5], [2], 16, 8), 16, 8)
    backend = VarlenOnCpu(SPEC, CACHE, CPU)
    monkeypatch.setattr(
        backend, "_attend", lambda query, *_, **__: (query, torch.zeros(query.shape[:2]))
    )
    out = torch.zeros(len(case.query), 6, 32, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"returned an LSE of shape \(2, 6\), not \(6, 2\)"):
        backend.forward(
            case.query, case.cache, backend.plan(case.batch), out, lse=torch.zeros(4, 6)
        )


def kinds_of(function: Any) -> dict[str, tuple[Any, Any]]:
    """Kind and default of each parameter."""
    found = inspect.signature(function).parameters.values()
    return {one.name: (one.kind, one.default) for one in found}


def recorded(version: str) -> dict[str, tuple[Any, Any]]:
    scope: dict[str, Any] = {}
    exec(f"def function({varlen_double.SIGNATURES[version]}): pass", scope)
    return kinds_of(scope["function"])


@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_the_double_has_the_recorded_signatures(version: str) -> None:
    assert kinds_of(varlen_double.module(version).varlen_attn) == recorded(version)


def test_torch_has_a_recorded_signature() -> None:
    assert kinds_of(varlen.varlen_attn) in (recorded("2.11"), recorded("2.13"))
    assert varlen.AuxRequest._fields == varlen_double.AuxRequest._fields
