"""What the attention contract itself refuses, and what a backend may add to its capabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.core import attention, capabilities
from jackfield.core.attention import (
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
    allocate_kv_cache,
)
from jackfield.core.capabilities import KV_CACHE_DTYPES, kv_cache_dtype_of
from jackfield.core.errors import UnsupportedError

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 16, 16, 0.25, torch.float16)
CACHE = KVCacheSpec(8, 4, 2, 16, 16, torch.float16)
ONE_DTYPE = Capabilities(
    device_types=frozenset({"cpu"}),
    dtypes=frozenset({torch.float16, torch.float32}),
    kv_dtypes=frozenset({torch.float16, torch.float32, FP8}),
)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_is_a_finite_number_above_zero(scale: float) -> None:
    stored = torch.zeros(1, 1, 1, 1, dtype=FP8)
    with pytest.raises(ValueError, match=r"k_scale=.* must be a finite number above 0"):
        KVCache(stored, stored, k_scale=scale)
    with pytest.raises(ValueError, match=r"v_scale=.* must be a finite number above 0"):
        KVCache(stored, stored, v_scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_only_a_cache_of_8_bits_has_scales(dtype: torch.dtype) -> None:
    stored = torch.zeros(1, 1, 1, 1, dtype=dtype)
    assert KVCache(stored, stored).k_scale == 1.0
    with pytest.raises(ValueError, match=r"v_scale=2\.0 is for a cache of 8 bits; one of float"):
        KVCache(stored, stored, v_scale=2.0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_of_8_bits_takes_a_byte_for_each_number(layout: capabilities.KVLayout) -> None:
    spec = replace(CACHE, dtype=FP8)
    assert spec.bytes_per_block == 4 * 2 * (16 + 16)
    cache = allocate_kv_cache(spec, layout, CPU, 0.5, 2.0)
    assert (cache.k_scale, cache.v_scale) == (0.5, 2.0)
    assert cache.k.shape == (8, 4, 2, 16)
    assert not cache.v.view(torch.uint8).any()


def test_a_cache_of_8_bits_goes_with_every_dtype_of_the_query() -> None:
    for dtype in (torch.float16, torch.float32):
        spec = replace(SPEC, dtype=dtype)
        assert ONE_DTYPE.unsupported(spec, replace(CACHE, dtype=FP8), CPU) == []
    assert ONE_DTYPE.unsupported(SPEC, replace(CACHE, dtype=torch.float32), CPU) == [
        "kv_cache_dtype=float32 with dtype=float16 is not supported"
    ]


def test_a_missing_library_and_a_wrong_device_are_both_told() -> None:
    missing = replace(ONE_DTYPE, missing="the library is not installed")
    assert missing.unsupported(SPEC, CACHE, CPU) == ["the library is not installed"]
    assert missing.unsupported(SPEC, CACHE, torch.device("meta")) == [
        "the library is not installed",
        "device=meta is not supported (supported: cpu)",
    ]


class NoSinksInWindows(PlainBackend):
    """Sinks and windows, but not both."""

    name = "no sinks in windows"

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        reasons = super().unsupported(spec, cache, device)
        if spec.sinks and spec.sliding_window is not None:
            reasons.append(f"sinks with sliding_window={spec.sliding_window} are not supported")
        return reasons


def test_a_backend_may_refuse_a_combination() -> None:
    NoSinksInWindows(replace(SPEC, sinks=True), CACHE, CPU)
    NoSinksInWindows(replace(SPEC, sliding_window=7), CACHE, CPU)
    with pytest.raises(UnsupportedError, match="sinks with sliding_window=7 are not supported"):
        NoSinksInWindows(replace(SPEC, sinks=True, sliding_window=7), CACHE, CPU)


def test_names_that_plugins_import_from_the_contract() -> None:
    for name in ("Capabilities", "SizeSet", "dtype_name", "dtype_names", "KVLayout"):
        assert name in attention.__all__
        assert getattr(attention, name) is getattr(capabilities, name)


def test_settings_of_the_cache_dtype() -> None:
    assert kv_cache_dtype_of("auto") is None
    assert kv_cache_dtype_of("fp8") is kv_cache_dtype_of("fp8_e4m3") is FP8
    assert kv_cache_dtype_of("bfloat16") is torch.bfloat16
    # A message names a dtype; that name can be set.
    assert all(attention.dtype_name(dtype) in KV_CACHE_DTYPES for dtype in KV_CACHE_DTYPES.values())
