"""A build of flash-attn that lacks kernels is refused when a layer is made, not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cases import CPU
from support.flash_attn_cpu import FlashAttnOnCpu
from support.flash_attn_double import Double, Kernels

from jackfield.backends import flash_attn
from jackfield.backends._flash_attn_probe import wrong_kernels
from jackfield.core.attention import AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError

SPEC = AttentionSpec(4, 2, 64, 64, 0.125, torch.float16)
CACHE = KVCacheSpec(8, 256, 2, 64, 64, torch.float16)


class PartialKernels(Kernels):
    """A build that lacks one head size, and leaves its results as they were or spoils them."""

    def __init__(self, function: str, head_size: int, outcome: str) -> None:
        super().__init__()
        self.function, self.head_size, self.outcome = function, head_size, outcome
        self.attempts = 0

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.attempts += 1
        if name != self.function or arguments[0].shape[-1] != self.head_size:
            return getattr(super(), name)(*arguments)
        if self.outcome == "raises":
            raise RuntimeError("no kernel image is available")
        at = 12 if name == "fwd_kvcache" else 3
        result = arguments[at]
        if self.outcome == "unwritten":
            elsewhere = torch.empty_like(result)
            arguments = (*arguments[:at], elsewhere, *arguments[at + 1 :])
        found = getattr(super(), name)(*arguments)
        if self.outcome == "spoilt":
            result[..., 32:] = 0.0
        return found

    def fwd_kvcache(self, *arguments: Any) -> Any:  # type: ignore[override]
        return self._call("fwd_kvcache", arguments)

    def varlen_fwd(self, *arguments: Any) -> Any:  # type: ignore[override]
        return self._call("varlen_fwd", arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [8, 64, 72, 128, 256])
def test_a_whole_build_passes(head_size: int, dtype: torch.dtype) -> None:
    assert wrong_kernels(Kernels(), head_size, dtype, CPU) is None


@pytest.mark.parametrize("outcome", ["unwritten", "spoilt", "raises"])
@pytest.mark.parametrize("function", ["fwd_kvcache", "varlen_fwd"])
def test_a_build_without_a_head_size_is_seen(function: str, outcome: str) -> None:
    kernels = PartialKernels(function, 96, outcome)
    assert wrong_kernels(kernels, 64, torch.bfloat16, CPU) is None
    fault = wrong_kernels(kernels, 96, torch.bfloat16, CPU)
    assert fault is not None
    assert f"its {function} " in fault
    assert ("no kernel image" in fault) == (outcome == "raises")


def test_it_is_tried_once() -> None:
    kernels = PartialKernels("fwd_kvcache", 96, "spoilt")
    for _ in range(3):
        wrong_kernels(kernels, 64, torch.float16, CPU)
    assert kernels.attempts == 2
    wrong_kernels(kernels, 64, torch.bfloat16, CPU)
    assert kernels.attempts == 4


def test_the_backend_refuses_such_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Double()
    library.flash_attn_gpu = PartialKernels("varlen_fwd", 72, "spoilt")

    class Library:
        def missing(self, device: torch.device) -> str | None:
            return None

        def require(self, backend: str, device: torch.device) -> Double:
            return library

    monkeypatch.setattr(flash_attn, "LIBRARY", Library())
    monkeypatch.setattr(flash_attn, "_PROBED_DEVICES", frozenset({"cpu"}))
    FlashAttnOnCpu(SPEC, CACHE, CPU)
    spec = replace(SPEC, head_size=72, v_head_size=72)
    cache = replace(CACHE, head_size=72, v_head_size=72)
    with pytest.raises(UnsupportedError, match="head_size=72: its varlen_fwd is wrong by"):
        FlashAttnOnCpu(spec, cache, CPU)
