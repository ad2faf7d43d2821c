"""The ``flash_attn_4`` backend on a CPU, over the double of its library."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jackfield.backends import flash_attn_4
from jackfield.backends.flash_attn_4 import FlashAttn4Backend
from jackfield.core.attention import Capabilities

from .flash_attn_4_double import Double
from .flash_attn_cpu import PresentLibrary


class FlashAttn4OnCpu(FlashAttn4Backend):
    """The backend, which declares for a CPU what it declares for CUDA."""

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """As for CUDA, but for the type of the device and what is missing."""
        declared = super().capabilities(device)
        return replace(declared, device_types=frozenset({"cpu"}), missing=None)


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    """The library's double, in place of the library."""
    module = Double()
    monkeypatch.setattr(flash_attn_4, "LIBRARY", PresentLibrary(module))
    return module
