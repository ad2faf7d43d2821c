"""The ``flash_attn`` backend on a CPU, over the double of its library."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from jackfield.backends import flash_attn
from jackfield.backends.flash_attn import FlashAttnBackend
from jackfield.core.attention import Capabilities

from .flash_attn_double import Double


class PresentLibrary:
    """A library that is always there."""

    distribution = "flash-attn-4"
    at_least = "4.0.0b36"
    below = "4.1"

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def missing(self, device: torch.device) -> str | None:
        """Nothing is."""
        return None

    def load(self) -> ModuleType:
        """The module."""
        return self._module

    def require(self, backend: str, device: torch.device) -> ModuleType:
        """The module."""
        return self._module


class FlashAttnOnCpu(FlashAttnBackend):
    """The backend, which declares for a CPU what it declares for CUDA."""

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """As for CUDA, but for the type of the device and what is missing."""
        declared = super().capabilities(device)
        return replace(declared, device_types=frozenset({"cpu"}), missing=None)


class NonCausalFlashAttnOnCpu(FlashAttnOnCpu):
    """The same without ALiBi, which is refused where ``causal`` is false."""

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Everything but ALiBi."""
        return replace(super().capabilities(device), alibi=False)


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    """The library's double, in place of the library."""
    module = Double()
    monkeypatch.setattr(flash_attn, "LIBRARY", PresentLibrary(module))
    return module
