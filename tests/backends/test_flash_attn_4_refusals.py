"""What flash_attn_4 cannot do is refused, by name; and why its library cannot be used."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
import torch
from support.attention_asserts import assert_write_kv
from support.attention_cases import CPU, make_batch, make_case
from support.flash_attn_4_cpu import FlashAttn4OnCpu
from support.flash_attn_4_double import VERSION, Double
from support.flash_attn_cpu import PresentLibrary

from jackfield.backends import flash_attn_4
from jackfield.backends.flash_attn_4 import FlashAttn4Backend
from jackfield.core.attention import AttentionPlan, AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.plugins import builtin

SPEC = AttentionSpec(4, 2, 64, 64, 0.125, torch.float16)
CACHE = KVCacheSpec(8, 16, 2, 64, 64, torch.float16)
CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (9, 0))


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(flash_attn_4, "LIBRARY", PresentLibrary(Double()))


def reasons(spec: AttentionSpec, cache: KVCacheSpec) -> list[str]:
    return FlashAttn4Backend.unsupported(spec, cache, CUDA)


def test_it_is_registered() -> None:
    found: dict[str, str | type] = {}

    def register(name: str, target: str | type) -> None:
        found[name] = target

    builtin.jackfield_attention_backends(register)
    assert found["flash_attn_4"] == f"{FlashAttn4Backend.__module__}:FlashAttn4Backend"


@pytest.mark.usefixtures("hopper")
def test_what_it_lacks_is_named() -> None:
    spec = replace(SPEC, head_size=72, v_head_size=64, dtype=torch.float32, scale=-1.0)
    spec = replace(spec, alibi_slopes=(0.5,) * 4, logits_soft_cap=30.0)
    cache = KVCacheSpec(8, 16, 2, 72, 64, torch.float32)
    sizes = "64, 80, 96, 112, 128, 192, 256"
    assert reasons(spec, cache) == [
        "logits_soft_cap=30.0 is not supported",
        "alibi_slopes is not supported",
        "v_head_size=64 with head_size=72 is not supported",
        f"head_size=72 is not supported (supported: {sizes})",
        "dtype=float32 is not supported (supported: bfloat16, float16)",
        "kv_cache_dtype=float32 is not supported (supported: bfloat16, float16)",
        "scale=-1.0 is not supported (supported: above 0)",
    ]


@pytest.mark.usefixtures("hopper")
def test_everything_else_is_supported() -> None:
    for block_size in (1, 16, 24, 128, 256):
        cache = replace(CACHE, block_size=block_size)
        spec = replace(SPEC, causal=False, sliding_window=5, sinks=True)
        assert reasons(spec, cache) == []
    declared = FlashAttn4Backend.capabilities(CUDA)
    assert declared.auto_priority == 0
    assert not declared.cuda_graphs


def test_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (8, 0))
    assert reasons(SPEC, CACHE) == ["compute capability 8.0 is below the needed 9.0"]
    on_gpu(monkeypatch, (10, 0))
    assert reasons(SPEC, CACHE) == ["compute capability 10.0 is not supported (supported: 9.x)"]


def test_an_absent_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2, which has the same top-level name, is not taken for it."""

    def only_flash_attn_2(name: str) -> str:
        if name == "flash-attn":
            return "2.8.3"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", only_flash_attn_2)
    assert FlashAttn4Backend.capabilities(CUDA).missing == (
        "flash-attn-4 is not installed; install it with: pip install 'jackfield[flash-attn-4]'"
    )
    with pytest.raises(UnsupportedError, match="flash-attn-4 is not installed"):
        FlashAttn4Backend(SPEC, CACHE, CPU)


def test_the_module_of_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("flash_attn.cute")
    older.__dict__["flash_attn_varlen_func"] = lambda q, k, v, cu_seqlens_q, page_table: None
    monkeypatch.setattr(flash_attn_4, "LIBRARY", PresentLibrary(older))
    assert FlashAttn4Backend.capabilities(CUDA).missing == (
        "the module flash_attn.cute is the older one that flash-attn 2 brings along, not that of "
        "flash-attn-4; install the latter again: pip install --force-reinstall --no-deps "
        "'flash-attn-4>=4.0.0b36,<4.1'"
    )


def test_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.0b5")
    assert FlashAttn4Backend.capabilities(CUDA).missing == (
        "flash-attn-4 4.0.0b5 is installed, and versions from 4.0.0b36 to below 4.1 are supported; "
        "install one with: pip install 'jackfield[flash-attn-4]'"
    )


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: VERSION)
    broken = replace(flash_attn_4.LIBRARY, module="flash_attn_of_no_such_name.cute")
    monkeypatch.setattr(flash_attn_4, "LIBRARY", broken)
    assert str(FlashAttn4Backend.capabilities(CUDA).missing).startswith(
        f"flash-attn-4 {VERSION} cannot be imported: ModuleNotFoundError: No module named"
    )


@pytest.mark.usefixtures("hopper")
def test_what_plan_and_forward_cannot_use() -> None:
    case = make_case(SPEC, make_batch([5], [2], 16, 8), 16, 8)
    backend = FlashAttn4OnCpu(SPEC, case.cache_spec, CPU)
    plan = backend.plan(case.batch)
    out = torch.zeros(len(case.query), 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="has no CUDA graphs: into must be None"):
        backend.plan(case.batch, into=plan)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is False"):
        backend.forward(case.query, case.cache, plan, out, sinks=torch.zeros(4))
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.forward(case.query, case.cache, AttentionPlan(), out)
    with pytest.raises(ValueError, match="2 query rows were planned, but query has 1 rows"):
        backend.forward(case.query[:1], case.cache, plan, out)


@pytest.mark.usefixtures("hopper")
def test_write_kv() -> None:
    case = make_case(SPEC, make_batch([30, 2], [4, 1], 16, 8), 16, 8)
    backend = FlashAttn4OnCpu(SPEC, case.cache_spec, CPU)
    assert_write_kv(backend, case, [False, True, False, False, True])
