"""The backends on xformers, on the CPU, on top of the double of the library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import torch

from jackfield.backends._library import Library
from jackfield.backends.xformers import LIBRARY, TRITON, XformersBackend, XformersCutlassBackend
from jackfield.core.attention import Capabilities

from . import xformers_double


@dataclass(frozen=True)
class PresentLibrary(Library):
    """Always there, and the double."""

    def missing(self, device: torch.device) -> str | None:
        """Nothing is."""
        return None

    def load(self) -> ModuleType:
        """The double."""
        return xformers_double.module()


def _present(library: Library) -> PresentLibrary:
    return PresentLibrary(
        library.distribution, library.module, library.extra, library.at_least, library.below
    )


class XformersOnCpu(XformersBackend):
    """``xformers``; plans are updated in place as for CUDA graphs."""

    _library: ClassVar[Library] = _present(LIBRARY)
    _triton: ClassVar[Library] = _present(TRITON)

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """The same on another device."""
        return replace(super().capabilities(device), device_types=frozenset({"cpu"}))


class XformersCutlassOnCpu(XformersCutlassBackend):
    """``xformers_cutlass``."""

    _library: ClassVar[Library] = _present(LIBRARY)

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """The same on another device."""
        return replace(super().capabilities(device), device_types=frozenset({"cpu"}))
