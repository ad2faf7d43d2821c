"""The kernels of flashinfer: compiled on first use, one module for each kind of layer.

A module has the kernels for one combination of dtypes, head size, and whether there is a window and
a soft cap; for prefill and, on tensor cores, for decode. The library compiles it when a plan first
needs it, which takes a minute or two, and keeps it in a folder of the user's. Modules that were
built elsewhere are loaded from another folder, without a compiler.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.attention import AttentionSpec, KVCacheSpec
from ..core.errors import UnsupportedError
from ._library import Library

LIBRARY = Library(
    distribution="flashinfer-python",
    module="flashinfer",
    extra="flashinfer",
    at_least="0.6.12",
    below="0.6.14",
)
_logger = logging.getLogger(__name__)
# As the library numbers them: no position encoding inside attention.
_NO_POSITIONS = 0
# Names of the modules that this process has loaded: the library keeps them.
_loaded: set[str] = set()


@dataclass(frozen=True)
class KernelModule:
    """One compiled module of the library.

    Attributes:
        name: its name, which is that of its file.
        prebuilt: where a module that was built elsewhere is looked for first.
        built: where the library puts what it compiles.
    """

    name: str
    prebuilt: Path
    built: Path

    @staticmethod
    def of(library: Any, kernels: str, spec: AttentionSpec, cache: KVCacheSpec) -> KernelModule:
        """The module that a layer needs.

        Args:
            library: the module ``flashinfer``.
            kernels: ``fa2`` or ``fa3``.
            spec, cache: the layer.
        """
        name = library.jit.get_batch_prefill_uri(
            kernels,
            spec.dtype,
            cache.dtype,
            spec.dtype,
            torch.int32,
            spec.head_size,
            spec.v_head_size,
            _NO_POSITIONS,
            spec.sliding_window is not None,
            spec.logits_soft_cap is not None,
            False,
        )
        folders = library.jit.env
        return KernelModule(
            name=name,
            prebuilt=Path(folders.FLASHINFER_AOT_DIR) / name / f"{name}.so",
            built=Path(folders.FLASHINFER_JIT_DIR) / name / f"{name}.so",
        )

    def obstacle(self, library: Any) -> str | None:
        """Why the module can neither be loaded nor compiled, in a sentence; None if it can."""
        if self.prebuilt.exists():
            return None
        missing = _missing_tools(library)
        if not missing:
            return None
        text = (
            f"flashinfer has to compile its module {self.name} and cannot: {', '.join(missing)}; "
            f"install what is missing, or put the module, built on another machine by the same "
            f"version of flashinfer, at {self.prebuilt}"
        )
        if self.built.exists():
            text += (
                f" (one was built here earlier, at {self.built}, which flashinfer does not load "
                f"without asking ninja: copy it)"
            )
        return text

    @contextmanager
    def announced(self, backend: str) -> Iterator[None]:
        """Around a plan: in the first one the library loads the module, and perhaps compiles it.

        Raises:
            UnsupportedError: the module cannot be compiled.
        """
        if self.name in _loaded:
            yield
            return
        if self.prebuilt.exists():
            _logger.info("flashinfer loads its module %s", self.prebuilt)
        elif self.built.exists():
            _logger.info("flashinfer loads its module %s, if it is up to date", self.built)
        else:
            _logger.warning(
                "flashinfer compiles its module %s, which takes a minute or two; it is kept in %s "
                "and compiled once",
                self.name,
                self.built.parent,
            )
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if self.prebuilt.exists() or self.built.exists():
                raise
            raise UnsupportedError(
                f"attention backend {backend!r}",
                [f"flashinfer cannot compile its module {self.name}: {error}"],
            ) from error
        _loaded.add(self.name)
        _logger.info("flashinfer's module was ready after %.1f s", time.monotonic() - start)


def _missing_tools(library: Any) -> list[str]:
    """What flashinfer lacks to compile, in words."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return ["the environment variable FLASHINFER_DISABLE_JIT forbids it"]
    missing = []
    if shutil.which("ninja") is None:
        missing.append("ninja is not on PATH (pip install ninja)")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        missing.append("there is no C++ compiler (c++ on PATH, or CXX)")
    if not _has_nvcc(library):
        missing.append("nvcc is not found (install the CUDA toolkit, and set CUDA_HOME)")
    return missing


def _has_nvcc(library: Any) -> bool:
    chosen = os.environ.get("FLASHINFER_NVCC")
    if chosen is not None:
        return shutil.which(chosen) is not None
    try:
        toolkit = library.jit.cpp_ext.get_cuda_path()
    except RuntimeError:
        return False
    return shutil.which("nvcc", path=str(Path(toolkit) / "bin")) is not None
