"""What the backends on xformers cannot do is refused, by name; and the double is like the real."""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from typing import Any

import pytest
import torch
from support import xformers_double
from support.attention_asserts import assert_impossible_calls_are_refused
from support.attention_cases import CPU
from support.xformers_backends import XformersCutlassOnCpu, XformersOnCpu

from jackfield.backends import _library
from jackfield.backends.xformers import (
    XformersBackend,
    XformersCutlassBackend,
    XformersOptions,
)
from jackfield.core.attention import AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import NoOptions
from jackfield.plugins import builtin

CUDA = torch.device("cuda")
SPEC = AttentionSpec(6, 2, 32, 32, 0.2, torch.float16)


def cache_of(spec: AttentionSpec, block_size: int = 64) -> KVCacheSpec:
    return KVCacheSpec(
        8, block_size, spec.num_kv_heads, spec.head_size, spec.v_head_size, spec.dtype
    )


def test_they_are_registered() -> None:
    found: dict[str, str | type] = {}

    def register(name: str, target: str | type) -> None:
        found[name] = target

    builtin.jackfield_attention_backends(register)
    for kind in (XformersBackend, XformersCutlassBackend):
        assert found[kind.name] == f"{kind.__module__}:{kind.__qualname__}"


def test_auto_never_chooses_them() -> None:
    assert XformersBackend.capabilities(CUDA).auto_priority == 0
    assert XformersCutlassBackend.capabilities(CUDA).auto_priority == 0


def test_what_the_paged_operator_lacks_is_named() -> None:
    spec = AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=80,
        v_head_size=96,
        scale=0.1,
        dtype=torch.float32,
        causal=False,
        sliding_window=3,
        logits_soft_cap=4.0,
        alibi_slopes=(0.5,) * 6,
    )
    declared = XformersOnCpu.capabilities(CPU)
    assert declared.unsupported(spec, cache_of(spec, 16), CPU) == [
        "causal=False is not supported",
        "sliding_window=3 is not supported",
        "logits_soft_cap=4.0 is not supported",
        "alibi_slopes is not supported",
        "v_head_size=96 with head_size=80 is not supported",
        "head_size=80 is not supported (supported: 16, 32, 64, 128, 256)",
        "v_head_size=96 is not supported (supported: 16, 32, 64, 128, 256)",
        "block_size=16 is not supported (supported: 64 and up, multiples of 64)",
        "dtype=float32 is not supported (supported: bfloat16, float16)",
        "kv_cache_dtype=float32 is not supported (supported: bfloat16, float16)",
    ]


def test_what_the_cutlass_operator_lacks_is_named() -> None:
    spec = AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=20,
        v_head_size=520,
        scale=0.1,
        dtype=torch.float64,
        causal=False,
        logits_soft_cap=4.0,
        alibi_slopes=(0.5,) * 6,
    )
    declared = XformersCutlassOnCpu.capabilities(CPU)
    assert declared.unsupported(spec, cache_of(spec, 5), CPU) == [
        "causal=False is not supported",
        "logits_soft_cap=4.0 is not supported",
        "alibi_slopes is not supported",
        "head_size=20 is not supported (supported: 8 to 512, multiples of 8)",
        "v_head_size=520 is not supported (supported: 8 to 512, multiples of 8)",
        "dtype=float64 is not supported (supported: bfloat16, float16, float32)",
        "kv_cache_dtype=float64 is not supported (supported: bfloat16, float16, float32)",
    ]


@pytest.mark.parametrize("kind", [XformersBackend, XformersCutlassBackend])
@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        (
            {},
            "xformers is not installed; install it with: pip install 'jackfield[xformers]'",
        ),
        (
            {"xformers": "0.0.34"},
            "xformers 0.0.34 is installed, and versions from 0.0.35 to below 0.0.36 are "
            "supported; install one with: pip install 'jackfield[xformers]'",
        ),
    ],
    ids=str,
)
def test_an_absent_or_old_library(
    kind: type[XformersBackend],
    versions: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, versions)
    for device in (CPU, CUDA):
        assert kind.capabilities(device).missing == reason
    with pytest.raises(UnsupportedError, match=r"xformers.* is "):
        kind(SPEC, cache_of(SPEC), CUDA)


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("jackfield.backends._library.metadata.version", version)


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"xformers": "0.0.35", "triton": "3.6.0"})
    monkeypatch.setattr(_library, "_import_failure", lambda module: f"ImportError: no {module}")
    for kind in (XformersBackend, XformersCutlassBackend):
        assert kind.capabilities(CUDA).missing == (
            "xformers 0.0.35 cannot be imported: ImportError: no xformers.ops.fmha"
        )


def test_a_triton_without_block_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"xformers": "0.0.35", "triton": "3.9.0"})
    monkeypatch.setattr(_library, "_import_failure", lambda module: None)
    assert XformersBackend.capabilities(CUDA).missing == (
        "triton 3.9.0 is installed, and versions from 3.6 to below 3.9 are supported; install one "
        "with: pip install 'triton>=3.6,<3.9'"
    )
    assert XformersCutlassBackend.capabilities(CUDA).missing is None


def test_a_device_without_cutlass_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    for kind in (XformersOnCpu, XformersCutlassOnCpu):
        assert kind.capabilities(CUDA).missing == (
            "compute capability 10.0 is above 9.0, the newest that xformers' cutlass operator "
            "supports; use the attention backend triton"
        )
        assert kind.capabilities(CPU).missing is None


@pytest.mark.parametrize("kind", [XformersOnCpu, XformersCutlassOnCpu])
def test_slots_beyond_32_bits(kind: type[XformersOnCpu]) -> None:
    cache = KVCacheSpec(2**25, 64, 2, 32, 32, torch.float16)
    with pytest.raises(UnsupportedError, match=r"num_blocks=33554432 of block_size=64 .* 2\*\*31"):
        kind(SPEC, cache, CPU)


def test_a_torch_whose_kernels_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xformers_double.CutlassFwOp, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="cannot use the cutlass kernels of torch"):
        XformersOnCpu(SPEC, cache_of(SPEC), CPU)


def test_options_of_another_part() -> None:
    with pytest.raises(TypeError, match="XformersOptions, not NoOptions"):
        XformersOnCpu(SPEC, cache_of(SPEC), CPU, NoOptions())
    with pytest.raises(ValueError, match="max_gathered_elements"):
        XformersOptions(max_gathered_elements=0)


def test_what_forward_cannot_use() -> None:
    assert_impossible_calls_are_refused(XformersCutlassOnCpu)


def parameters(text: str) -> dict[str, tuple[Any, Any]]:
    """Kind and default of each parameter of a list like those of the double."""
    scope: dict[str, Any] = {}
    exec(f"def function({text}): pass", scope)
    return kinds_of(scope["function"])


def kinds_of(function: Any) -> dict[str, tuple[Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return {one.name: (one.kind, one.default) for one in found}


def assert_like_the_record(fmha: Any) -> None:
    for name, text in xformers_double.SIGNATURES.items():
        assert kinds_of(getattr(fmha, name)) == parameters(text)
    for op in (fmha.triton_splitk.FwOp, fmha.cutlass.FwOp):
        assert kinds_of(op.apply) == parameters(xformers_double.OPERATOR_SIGNATURE)
        assert op.is_available()
    for name, text in xformers_double.BIAS_SIGNATURES.items():
        assert kinds_of(getattr(fmha.attn_bias, name)) == parameters(text)


def test_the_double_has_the_recorded_signatures() -> None:
    assert_like_the_record(xformers_double)


@pytest.mark.filterwarnings("ignore")
def test_the_library_has_the_recorded_signatures() -> None:
    try:
        fmha = importlib.import_module("xformers.ops.fmha")
    except ImportError as error:
        pytest.skip(f"xformers cannot be imported: {error}")
    assert_like_the_record(fmha)
    assert fmha.triton_splitk.FwOp.BLOCK_N == xformers_double.SplitKFwOp.BLOCK_N
    assert fmha.cutlass.FwOp.CUDA_MAXIMUM_COMPUTE_CAPABILITY == (9, 0)
