"""What tests of the flashinfer backend on a CPU share: the backend on top of the double."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.backends import _flashinfer_modules as modules
from jackfield.backends.flashinfer import FlashInferBackend
from jackfield.core.attention import AttentionSpec, Capabilities, KVCacheSpec

from .flashinfer_double import VERSION, make_double


class OnTheDouble(FlashInferBackend):
    """The backend, declared for the CPU, with every kernel there."""

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        real = super().capabilities(torch.device("cuda"))
        return replace(real, device_types=frozenset({"cpu"}), missing=None)

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        return cls.capabilities(device).unsupported(spec, cache, device)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double in the place of the library."""
    double = make_double(tmp_path)
    install(double, monkeypatch)
    return double


def install(double: Any, monkeypatch: pytest.MonkeyPatch, version: str | None = VERSION) -> None:
    """Let the double be what ``import flashinfer`` finds, or nothing at all."""
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(type(modules.LIBRARY), "version", lambda self: version)


def layer(**changes: Any) -> AttentionSpec:
    """A small layer of 6 heads in 2 groups, with changes."""
    return replace(AttentionSpec(6, 2, 64, 64, 0.125, torch.bfloat16), **changes)
