"""Attention backends that misbehave or can do little; importable by other processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.core.attention import (
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
)
from jackfield.core.options import PartOptions


class NarrowBackend(PlainBackend):
    """Right, and fast enough to say nothing about; subclasses change what is declared."""

    #: Fields of ``Capabilities`` that differ from those of ``PlainBackend``.
    declared: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """As declared."""
        return replace(super().capabilities(device), **cls.declared)  # type: ignore[arg-type]


class NeverBothBackend(NarrowBackend):
    """Has windows and ALiBi, but not together."""

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """As in the contract."""
        reasons = super().unsupported(spec, cache, device)
        if spec.sliding_window is not None and spec.alibi_slopes is not None:
            reasons.append("sliding_window with alibi_slopes is not supported")
        return reasons


class SaysNoButBuildsBackend(NeverBothBackend):
    """Names reasons, and is built all the same."""

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(replace(spec, alibi_slopes=None), cache, device, options)


class _FailingBackend(NarrowBackend):
    """Does something else in every forward of a layer in float16."""

    declared: ClassVar[Mapping[str, object]] = {"dtypes": frozenset({torch.float16, torch.float32})}

    def fail(self, out: Tensor) -> None:
        """What is done."""

    def forward(
        self,
        query: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """As in ``PlainBackend``, and the failure."""
        super().forward(query, cache, plan, out, sinks=sinks, lse=lse)
        if self.spec.dtype == torch.float16:
            self.fail(out)
        return out


class DyingBackend(_FailingBackend):
    """Ends the process."""

    def fail(self, out: Tensor) -> None:
        """Exit without a word."""
        os._exit(7)


class ExitingBackend(_FailingBackend):
    """Raises ``SystemExit``."""

    def fail(self, out: Tensor) -> None:
        """Exit as a script does."""
        raise SystemExit("no licence")


class InterruptedBackend(_FailingBackend):
    """Is interrupted by the user."""

    def fail(self, out: Tensor) -> None:
        """As Ctrl-C does."""
        raise KeyboardInterrupt


class WrongBackend(_FailingBackend):
    """Is wrong whenever it is asked."""

    def fail(self, out: Tensor) -> None:
        """Another result."""
        out += 1


class FlakyBackend(_FailingBackend):
    """Is wrong the first time only."""

    failures = 0

    def fail(self, out: Tensor) -> None:
        """Another result, once."""
        if not FlakyBackend.failures:
            FlakyBackend.failures += 1
            out += 1


class MissingBackend(NarrowBackend):
    """Its library is not there, and nothing of it may be run."""

    declared: ClassVar[Mapping[str, object]] = {
        "missing": "the library absent_kernels is not installed",
        "dtypes": frozenset(),
        "kv_dtypes": frozenset(),
    }


class CUDAOnlyBackend(NarrowBackend):
    """Does not run on a CPU."""

    declared: ClassVar[Mapping[str, object]] = {"device_types": frozenset({"cuda"})}
