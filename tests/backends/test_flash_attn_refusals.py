"""What flash_attn cannot do is refused, by name; and why its library cannot be used."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from support.attention_asserts import assert_write_kv
from support.attention_cases import CPU, make_batch, make_case
from support.flash_attn_cpu import FlashAttnOnCpu
from support.flash_attn_double import FWD_KVCACHE, VARLEN_FWD, VERSION, Double, Kernels

from jackfield.backends import flash_attn
from jackfield.backends.flash_attn import LIBRARY, FlashAttnBackend
from jackfield.core.attention import AttentionPlan, AttentionSpec, KVCache, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import PartOptions
from jackfield.plugins import builtin

SPEC = AttentionSpec(4, 2, 64, 64, 0.125, torch.float16)
CACHE = KVCacheSpec(8, 256, 2, 64, 64, torch.float16)
CUDA = torch.device("cuda")


class Installed:
    """A library that is there, with its double as its module."""

    def missing(self, device: torch.device) -> str | None:
        return None

    def require(self, backend: str, device: torch.device) -> Double:
        return Double()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash_attn, "LIBRARY", Installed())


def reasons(spec: AttentionSpec, cache: KVCacheSpec) -> list[str]:
    return FlashAttnBackend.unsupported(spec, cache, CUDA)


def test_it_is_registered() -> None:
    found: dict[str, str | type] = {}

    def register(name: str, target: str | type) -> None:
        found[name] = target

    builtin.jackfield_attention_backends(register)
    assert found["flash_attn"] == f"{FlashAttnBackend.__module__}:FlashAttnBackend"


@pytest.mark.usefixtures("hopper")
def test_what_it_lacks_is_named() -> None:
    spec = AttentionSpec(4, 2, 12, 512, 0.25, torch.float32)
    cache = KVCacheSpec(8, 128, 2, 12, 512, torch.float8_e4m3fn)
    assert reasons(spec, cache) == [
        "v_head_size=512 with head_size=12 is not supported",
        "head_size=12 is not supported (supported: 8 to 256, multiples of 8)",
        "v_head_size=512 is not supported (supported: 8 to 256, multiples of 8)",
        "block_size=128 is not supported (supported: 256 and up, multiples of 256)",
        "dtype=float32 is not supported (supported: bfloat16, float16)",
        "kv_cache_dtype=float8_e4m3fn is not supported (supported: bfloat16, float16)",
    ]


@pytest.mark.usefixtures("hopper")
def test_features_that_exclude_each_other() -> None:
    spec = replace(SPEC, causal=False, alibi_slopes=(0.5,) * 4)
    assert reasons(spec, CACHE) == [
        "alibi_slopes with causal=False is not supported: flash-attn takes the absolute distance "
        "of keys behind a row"
    ]
    assert reasons(replace(SPEC, scale=-0.1), CACHE) == [
        "scale=-0.1 is not supported (supported: above 0)"
    ]
    assert reasons(replace(SPEC, alibi_slopes=(0.5,) * 4), CACHE) == []


@pytest.mark.usefixtures("hopper")
def test_everything_else_is_supported() -> None:
    spec = replace(SPEC, sliding_window=5, causal=False, sinks=True)
    assert reasons(spec, CACHE) == []
    declared = FlashAttnBackend.capabilities(CUDA)
    assert declared.preferred_block_size in declared.block_sizes
    assert declared.auto_priority == 40
    assert not declared.nonfinite_safe


def test_an_old_gpu(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert reasons(SPEC, CACHE) == ["compute capability 7.5 is below the needed 8.0"]


@pytest.mark.usefixtures("hopper")
def test_a_cpu() -> None:
    assert FlashAttnBackend.unsupported(SPEC, CACHE, CPU) == [
        "device=cpu is not supported (supported: cuda)"
    ]


def test_an_absent_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert FlashAttnBackend.capabilities(CUDA).missing == (
        "flash-attn is not installed; install it with: pip install 'jackfield[flash-attn]'"
    )
    with pytest.raises(UnsupportedError, match="flash-attn is not installed"):
        FlashAttnBackend(SPEC, CACHE, CPU)


@pytest.mark.parametrize("version", ["2.7.4.post1", "2.8.2", "2.9.0"])
def test_another_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert FlashAttnBackend.capabilities(CUDA).missing == (
        f"flash-attn {version} is installed, and versions from 2.8.3 to below 2.9 are supported; "
        "install one with: pip install 'jackfield[flash-attn]'"
    )


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: VERSION)
    broken = replace(LIBRARY, module="flash_attn.nothing_of_this_name")
    monkeypatch.setattr(flash_attn, "LIBRARY", broken)
    assert FlashAttnBackend.capabilities(CPU).missing is None
    assert str(FlashAttnBackend.capabilities(CUDA).missing).startswith(
        f"flash-attn {VERSION} cannot be imported: ModuleNotFoundError: No module named"
    )


@pytest.mark.usefixtures("hopper")
def test_what_forward_and_the_constructor_cannot_use() -> None:
    class Strange(PartOptions):
        pass

    with pytest.raises(TypeError, match="must be NoOptions, not Strange"):
        FlashAttnOnCpu(SPEC, CACHE, CPU, Strange())
    case = make_case(SPEC, make_batch([5], [2], 256, 8), 256, 8)
    backend = FlashAttnOnCpu(SPEC, case.cache_spec, CPU)
    plan = backend.plan(case.batch)
    out = torch.zeros(len(case.query), 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is False"):
        backend.forward(case.query, case.cache, plan, out, sinks=torch.zeros(4))
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.forward(case.query, case.cache, AttentionPlan(), out)
    with pytest.raises(ValueError, match="2 query rows were planned, but query has 1 rows"):
        backend.forward(case.query[:1], case.cache, plan, out)
    heads_first = KVCache(
        k=case.cache.k.transpose(1, 2).contiguous().transpose(1, 2), v=case.cache.v
    )
    with pytest.raises(ValueError, match="2048 tokens x 2 heads x 64 in NHD order"):
        backend.forward(case.query, heads_first, plan, out)


@pytest.mark.usefixtures("hopper")
def test_write_kv() -> None:
    case = make_case(SPEC, make_batch([300, 2], [4, 1], 256, 8), 256, 8)
    backend = FlashAttnOnCpu(SPEC, case.cache_spec, CPU)
    assert_write_kv(backend, case, [False, True, False, False, True])


SIGNATURES = [("fwd_kvcache", FWD_KVCACHE), ("varlen_fwd", VARLEN_FWD)]


@pytest.mark.parametrize(("function", "recorded"), SIGNATURES)
def test_the_double_takes_what_the_library_takes(function: str, recorded: str) -> None:
    names = recorded.split(", ")
    code = getattr(Kernels, function).__code__
    assert list(code.co_varnames[1 : code.co_argcount]) == names
    assert code.co_posonlyargcount == len(names) + 1


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "recorded"), SIGNATURES)
def test_the_library_takes_what_is_recorded(function: str, recorded: str) -> None:
    module = pytest.importorskip("flash_attn_2_cuda", exc_type=ImportError)
    # Compiled functions say how many arguments they take in the first line of their text only.
    signature = str(getattr(module, function).__doc__).splitlines()[0]
    assert len(re.findall(r"\barg\d+:", signature)) == len(recorded.split(", "))
