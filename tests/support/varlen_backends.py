"""``torch_varlen`` on the CPU, on top of the double of torch's function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jackfield.backends.torch_varlen import TorchVarlenBackend
from jackfield.core.attention import Capabilities

from . import varlen_double


class VarlenOnCpu(TorchVarlenBackend):
    """With the function of torch 2.11, which copies all keys."""

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """The same on another device."""
        return replace(super().capabilities(device), device_types=frozenset({"cpu"}))

    @classmethod
    def _module(cls) -> Any:
        return varlen_double.module("2.11")


class PagedVarlenOnCpu(VarlenOnCpu):
    """With the function of torch 2.13, which reads blocks of 256."""

    @classmethod
    def _module(cls) -> Any:
        return varlen_double.module("2.13")
