"""What flashinfer cannot do is refused, by name and in one sentence."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.attention_cases import CPU, make_batch, make_case
from support.flashinfer_cases import OnTheDouble, install, layer, library

from jackfield.backends import _library
from jackfield.backends._flashinfer_modules import KernelModule
from jackfield.backends.flashinfer import FlashInferBackend, FlashInferOptions
from jackfield.core.attention import AttentionPlan, AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import NoOptions
from jackfield.plugins import builtin

__all__ = ["library"]

CUDA = torch.device("cuda")
SPEC = layer()
CACHE = KVCacheSpec(8, 16, 2, 64, 64, torch.bfloat16)
MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
    "head_dim_qk_64_head_dim_vo_64_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as the declaration is concerned."""
    _library._import_failure.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What ``shutil.which`` finds: everything but for what a test takes away."""
    found = {"ninja", "c++", "nvcc"}
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.delenv("CXX", raising=False)

    def which(name: str, path: str | None = None) -> str | None:
        return f"/bin/{name}" if name in found else None

    monkeypatch.setattr(shutil, "which", which)
    return found


def test_it_is_registered() -> None:
    found: dict[str, str | type] = {}

    def register(name: str, target: str | type) -> None:
        found[name] = target

    builtin.jackfield_attention_backends(register)
    assert found["flashinfer"] == f"{FlashInferBackend.__module__}:FlashInferBackend"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            None,
            "flashinfer-python is not installed; install it with: "
            "pip install 'jackfield[flashinfer]'",
        ),
        (
            "0.6.11",
            "flashinfer-python 0.6.11 is installed, and versions from 0.6.12 to below 0.6.14 are "
            "supported; install one with: pip install 'jackfield[flashinfer]'",
        ),
        (
            "0.6.14",
            "flashinfer-python 0.6.14 is installed, and versions from 0.6.12 to below 0.6.14 are "
            "supported; install one with: pip install 'jackfield[flashinfer]'",
        ),
    ],
)
def test_a_library_that_is_absent_or_of_another_version(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(None, monkeypatch, version)
    assert FlashInferBackend.capabilities(CUDA).missing == message


@pytest.mark.usefixtures("hopper")
def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(None, monkeypatch)
    expected = "flashinfer-python 0.6.13 cannot be imported: ModuleNotFoundError: "
    missing = FlashInferBackend.capabilities(CUDA).missing
    assert missing is not None
    assert missing.startswith(expected)
    assert FlashInferBackend.unsupported(SPEC, CACHE, CUDA) == [missing]
    _library._import_failure.cache_clear()


@pytest.mark.usefixtures("library", "hopper", "tools")
@pytest.mark.parametrize(
    ("spec", "cache", "reasons"),
    [
        (
            {"alibi_slopes": (0.5,) * 6},
            {},
            ["alibi_slopes is not supported"],
        ),
        (
            {"head_size": 80, "v_head_size": 80},
            {"head_size": 80, "v_head_size": 80},
            ["head_size=80 is not supported (supported: 64, 128, 256)"],
        ),
        (
            {"v_head_size": 128},
            {"v_head_size": 128},
            ["v_head_size=128 with head_size=64 is not supported"],
        ),
        (
            {"dtype": torch.float32},
            {"dtype": torch.float32},
            [
                "dtype=float32 is not supported (supported: bfloat16, float16)",
                "kv_cache_dtype=float32 is not supported (supported: bfloat16, float16, "
                "float8_e4m3fn)",
            ],
        ),
        (
            {"dtype": torch.float16},
            {},
            ["kv_cache_dtype=bfloat16 with dtype=float16 is not supported"],
        ),
    ],
    ids=["alibi", "head size", "value head size", "float32", "two dtypes"],
)
def test_what_is_not_declared(
    spec: dict[str, Any], cache: dict[str, Any], reasons: list[str]
) -> None:
    asked = (replace(SPEC, **spec), replace(CACHE, **cache))
    assert FlashInferBackend.unsupported(*asked, CUDA) == reasons


@pytest.mark.usefixtures("hopper", "tools")
def test_what_is_declared(library: Any) -> None:
    library.jit.cpp_ext.get_cuda_path = lambda: "/usr/local/cuda"
    everything = replace(SPEC, causal=False, sliding_window=7, sinks=True)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert FlashInferBackend.unsupported(everything, replace(CACHE, dtype=dtype), CUDA) == []


@pytest.mark.usefixtures("hopper")
def test_kernels_that_cannot_be_compiled(library: Any, tools: set[str]) -> None:
    library.jit.cpp_ext.get_cuda_path = lambda: "/usr/local/cuda"
    folder = library.jit.env.FLASHINFER_AOT_DIR
    there = (
        f"install what is missing, or put the module, built on another machine by the same version "
        f"of flashinfer, at {folder / MODULE / MODULE}.so"
    )
    tools -= {"ninja", "nvcc"}
    with pytest.raises(UnsupportedError) as refusal:
        FlashInferBackend(SPEC, CACHE, CUDA)
    assert refusal.value.reasons == (
        f"flashinfer has to compile its module {MODULE} and cannot: ninja is not on PATH (pip "
        f"install ninja), nvcc is not found (install the CUDA toolkit, and set CUDA_HOME); {there}",
    )
    tools |= {"ninja", "nvcc"}
    tools -= {"c++"}
    (reason,) = FlashInferBackend.unsupported(SPEC, CACHE, CUDA)
    assert "there is no C++ compiler (c++ on PATH, or CXX)" in reason


@pytest.mark.usefixtures("hopper")
def test_without_a_toolkit_nvcc_is_missing(library: Any, tools: set[str]) -> None:
    (reason,) = FlashInferBackend.unsupported(SPEC, CACHE, CUDA)
    assert "nvcc is not found" in reason


@pytest.mark.usefixtures("hopper", "tools")
def test_compiling_may_be_forbidden(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    (reason,) = FlashInferBackend.unsupported(SPEC, CACHE, CUDA)
    assert "the environment variable FLASHINFER_DISABLE_JIT forbids it" in reason


@pytest.mark.usefixtures("hopper")
def test_a_prebuilt_module_needs_no_compiler(library: Any, tools: set[str]) -> None:
    tools.clear()
    module = KernelModule.of(library, "fa2", SPEC, CACHE)
    touch(module.built)
    (reason,) = FlashInferBackend.unsupported(SPEC, CACHE, CUDA)
    assert f"one was built here earlier, at {module.built}" in reason
    touch(module.prebuilt)
    assert FlashInferBackend.unsupported(SPEC, CACHE, CUDA) == []


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.touch()


def test_a_failed_compilation_is_an_unsupported_layer(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = replace(KernelModule.of(library, "fa2", SPEC, CACHE), name="one_that_fails")
    with (
        pytest.raises(UnsupportedError, match="cannot compile its module one_that_fails: Ninja"),
        module.announced("flashinfer"),
    ):
        raise RuntimeError("Ninja build failed.")
    assert "compiles its module one_that_fails, which takes a minute or two" in caplog.text
    assert str(module.built.parent) in caplog.text
    touch(module.prebuilt)
    with pytest.raises(RuntimeError, match="out of memory"), module.announced("flashinfer"):
        raise RuntimeError("out of memory")


def test_a_module_is_announced_once(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = replace(KernelModule.of(library, "fa2", SPEC, CACHE), name="one_that_is_new")
    for _ in range(2):
        with module.announced("flashinfer"):
            pass
    assert caplog.text.count("compiles its module one_that_is_new") == 1


def test_options(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="backend"):
        FlashInferOptions.model_validate({"backend": "cudnn"})
    with pytest.raises(TypeError, match="FlashInferOptions, not NoOptions"):
        OnTheDouble(SPEC, CACHE, CPU, NoOptions())
    fp8 = replace(CACHE, dtype=torch.float8_e4m3fn)
    options = FlashInferOptions(backend="fa3")
    with pytest.raises(UnsupportedError, match="fa3 with kv_cache_dtype=float8_e4m3fn is not"):
        OnTheDouble(SPEC, fp8, CPU, options)
    module = KernelModule.of(library, "fa3", SPEC, CACHE)
    assert module.name == f"{MODULE}_sm90"
    touch(module.prebuilt)
    backend = OnTheDouble(SPEC, CACHE, CPU, options)
    batch = make_batch([20, 9], [3, 1], 16, 8)
    plan = backend.plan(batch)
    assert plan.held is not None
    assert plan.held.wrapper.backend == "fa3"
    assert plan.held.wrapper.planned["seq_lens"].tolist() == [20, 9]


@pytest.mark.usefixtures("library")
def test_what_forward_and_plan_cannot_use() -> None:
    case = make_case(SPEC, make_batch([5], [2], 16, 8), 16, 8)
    backend = OnTheDouble(SPEC, CACHE, CPU)
    plan = backend.plan(case.batch)
    out = torch.zeros(len(case.query), 6, 64, dtype=torch.bfloat16)

    def forward(**changes: Any) -> None:
        tensors = {"query": case.query, "cache": case.cache, "plan": plan, "out": out}
        backend.forward(**(tensors | changes))

    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        forward(plan=AttentionPlan())
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.plan(case.batch, into=AttentionPlan())
    with pytest.raises(ValueError, match=r"spec\.sinks, which is False"):
        forward(sinks=torch.zeros(6))
    with pytest.raises(ValueError, match="2 query rows were planned, but query has 1 rows"):
        forward(query=case.query[:1])
    with pytest.raises(ValueError, match=r"cache of shape \(8, 16, 2, 64\), not for keys of"):
        forward(cache=replace(case.cache, k=case.cache.k[:4], v=case.cache.v[:4]))
    with pytest.raises(ValueError, match="keys and values of equal strides"):
        forward(cache=replace(case.cache, k=case.cache.k.repeat(1, 1, 1, 2)[..., :64]))
    uneven = torch.zeros(4, 6, 67, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(ValueError, match="strides of the query must be multiples of 8 elements"):
        forward(query=uneven)
    far = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 6, 64), (2**31, 0, 1))
    with pytest.raises(ValueError, match=r"cannot address 2 query rows that are 2147483648 el"):
        backend._check_tensors(far, case.cache, 2)


def test_nothing_is_imported_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert FlashInferBackend.capabilities(CPU).missing is not None
    assert FlashInferBackend.capabilities(CPU).auto_priority == 30


def test_the_large_spec_of_a_model_is_served(library: Any) -> None:
    spec = AttentionSpec(28, 4, 128, 128, 128**-0.5, torch.bfloat16)
    backend = OnTheDouble(spec, KVCacheSpec(8, 16, 4, 128, 128, torch.bfloat16), CPU)
    assert backend._modules["fa2"].name == MODULE.replace("_64_", "_128_")
