"""One message for each thing that a backend cannot do, for every backend that has such a limit."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch

from jackfield.backends import flash_attn_4
from jackfield.backends._library import Library
from jackfield.core.attention import AttentionBackend, AttentionSpec, Capabilities, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind

CUDA = torch.device("cuda")
ENTRIES = discover(environ={"JACKFIELD_PLUGINS": ""}).registry.entries(PartKind.ATTENTION_BACKEND)
BACKENDS: dict[str, type[AttentionBackend]] = {entry.name: entry.load() for entry in ENTRIES}
HALVES = "bfloat16, float16"
FLOATS = "bfloat16, float16, float32"

MISSING = {
    "flash_attn": (
        "flash-attn is not installed; install it with: pip install 'jackfield[flash-attn]'"
    ),
    "flash_attn_4": (
        "flash-attn-4 is not installed; install it with: pip install 'jackfield[flash-attn-4]'"
    ),
    "flashinfer": (
        "flashinfer-python is not installed; install it with: pip install 'jackfield[flashinfer]'"
    ),
    "triton": "triton is not installed; install it with: pip install 'triton>=3.6'",
    "xformers": "xformers is not installed; install it with: pip install 'jackfield[xformers]'",
    "xformers_cutlass": (
        "xformers is not installed; install it with: pip install 'jackfield[xformers]'"
    ),
}
#: The newest device that is too old, and what is needed.
TOO_OLD = {
    "flash_attn": ((7, 5), "8.0"),
    "flash_attn_4": ((8, 9), "9.0"),
    "flashinfer": ((7, 5), "8.0"),
    "flex": ((7, 5), "8.0"),
    "torch_varlen": ((7, 5), "8.0"),
    "triton": ((7, 5), "8.0"),
    "xformers": ((7, 5), "8.0"),
    "xformers_cutlass": ((7, 5), "8.0"),
}
TOO_NEW = {
    "flash_attn_4": "compute capability 10.0 is not supported (supported: 9.x)",
    "xformers": (
        "compute capability 10.0 is above 9.0, the newest that xformers' cutlass operator "
        "supports; use the attention backend triton"
    ),
    "xformers_cutlass": (
        "compute capability 10.0 is above 9.0, the newest that xformers' cutlass operator "
        "supports; use the attention backend triton"
    ),
}
#: A size that is not supported, and those that are.
HEAD_SIZES = {
    "flash_attn": (264, "8 to 256, multiples of 8"),
    "flash_attn_4": (72, "64, 80, 96, 112, 128, 192, 256"),
    "flashinfer": (72, "64, 128, 256"),
    "flex": (264, "16 to 256"),
    "torch_varlen": (71, "8 to 256, multiples of 8"),
    "triton": (71, "16 to 256, multiples of 8"),
    "xformers": (72, "16, 32, 64, 128, 256"),
    "xformers_cutlass": (520, "8 to 512, multiples of 8"),
}
BLOCK_SIZES = {
    "flash_attn": (16, "256 and up, multiples of 256"),
    "flex": (24, "16, 32, 64, 128, 256"),
    "triton": (24, "8, 16, 32, 64, 128, 256, 512, 1024"),
    "xformers": (16, "64 and up, multiples of 64"),
}
#: A dtype that is not supported, and the dtypes of query and cache that are.
DTYPES = {
    "flash_attn": ("float32", HALVES, HALVES),
    "flash_attn_4": ("float32", HALVES, HALVES),
    "flashinfer": ("float32", HALVES, "bfloat16, float16, float8_e4m3fn"),
    "flex": ("float64", FLOATS, FLOATS),
    "torch_sdpa": (
        "int32",
        "bfloat16, float16, float32, float64",
        "bfloat16, float16, float32, float64, float8_e4m3fn",
    ),
    "torch_varlen": ("float32", HALVES, HALVES),
    "triton": ("float64", FLOATS, f"{FLOATS}, float8_e4m3fn"),
    "xformers": ("float32", HALVES, HALVES),
    "xformers_cutlass": ("float64", FLOATS, FLOATS),
}
NO_SOFT_CAP = ("flash_attn_4", "torch_varlen", "xformers", "xformers_cutlass")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU and all libraries, as far as the declarations are concerned."""
    on_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(Library, "missing", lambda self, device: None)
    monkeypatch.setattr(flash_attn_4, "_missing", lambda device: None)
    find_spec = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> object:
        return name if name == "triton" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let the device be of this compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def declared(name: str) -> Capabilities:
    return BACKENDS[name].capabilities(CUDA)


def refusal(name: str, block_size: int | None = None, **changes: Any) -> str:
    """What the constructor says, without the name that it begins with."""
    spec = replace(AttentionSpec(4, 2, 64, 64, 0.125, torch.bfloat16), **changes)
    size = declared(name).preferred_block_size if block_size is None else block_size
    cache = KVCacheSpec(8, size, 2, spec.head_size, spec.v_head_size, spec.dtype)
    with pytest.raises(UnsupportedError) as caught:
        BACKENDS[name](spec, cache, CUDA)
    begin = f"attention backend {name!r}: "
    message = str(caught.value)
    assert message.startswith(begin)
    return message.removeprefix(begin)


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.undo()
    on_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert refusal(name) == MISSING[name]


@pytest.mark.parametrize("name", TOO_OLD)
def test_a_gpu_that_is_too_old(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, needed = TOO_OLD[name]
    on_gpu(monkeypatch, found)
    assert refusal(name) == (
        f"compute capability {found[0]}.{found[1]} is below the needed {needed}"
    )


@pytest.mark.parametrize("name", TOO_NEW)
def test_a_gpu_that_is_too_new(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (10, 0))
    assert refusal(name) == TOO_NEW[name]


@pytest.mark.parametrize("name", HEAD_SIZES)
def test_a_head_size(name: str) -> None:
    size, supported = HEAD_SIZES[name]
    said = refusal(name, head_size=size, v_head_size=size)
    assert said == f"head_size={size} is not supported (supported: {supported})"


@pytest.mark.parametrize("name", BLOCK_SIZES)
def test_a_block_size(name: str) -> None:
    size, supported = BLOCK_SIZES[name]
    said = refusal(name, block_size=size)
    assert said == f"block_size={size} is not supported (supported: {supported})"


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype(name: str) -> None:
    dtype, supported, in_caches = DTYPES[name]
    assert refusal(name, dtype=getattr(torch, dtype)) == (
        f"dtype={dtype} is not supported (supported: {supported}); "
        f"kv_cache_dtype={dtype} is not supported (supported: {in_caches})"
    )


@pytest.mark.parametrize("name", NO_SOFT_CAP)
def test_a_soft_cap(name: str) -> None:
    assert refusal(name, logits_soft_cap=30.0) == "logits_soft_cap=30.0 is not supported"


def test_every_backend_with_a_limit_is_tried() -> None:
    can = {name: declared(name) for name in BACKENDS}
    large = 2**30 + 1
    assert set(TOO_OLD) == {name for name in can if can[name].compute_capability is not None}
    assert set(HEAD_SIZES) == {name for name in can if large not in can[name].head_sizes}
    assert set(BLOCK_SIZES) == {name for name in can if large not in can[name].block_sizes}
    assert set(DTYPES) == set(can)
    assert set(NO_SOFT_CAP) == {name for name in can if not can[name].logits_soft_cap}
    of_torch = {"flex", "torch_sdpa", "torch_varlen"}
    assert set(MISSING) == set(can) - of_torch
