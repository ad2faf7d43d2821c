"""The backend on flashinfer's own wrappers, where it is installed, with kernels of the double."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from support.flashinfer_cases import OnTheDouble
from support.flashinfer_double import VERSION
from support.flashinfer_kernels_double import KernelModuleDouble

from jackfield.backends import _flashinfer_modules as modules
from jackfield.conformance.attention.contract import assert_conforms


@pytest.mark.filterwarnings("ignore")
def test_the_wrappers_of_the_library_pass_on_what_the_kernels_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = pytest.importorskip("flashinfer")
    if library.__version__ != VERSION:
        pytest.skip(f"the kernels are those of flashinfer {VERSION}, not {library.__version__}")

    @cache
    def kernels(_backend: str, *arguments: Any) -> KernelModuleDouble:
        return KernelModuleDouble(*arguments)

    empty = torch.empty

    def unpinned(*sizes: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return empty(*sizes, **options)

    for module in (library.prefill, library.decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", kernels)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(type(modules.LIBRARY), "version", lambda self: VERSION)
    logging.getLogger("flashinfer.jit").setLevel(logging.ERROR)
    report = assert_conforms(
        OnTheDouble,
        laws=["meaning", "lse", "nothing_visible", "steps", "plan_into"],
        scale="tiny",
        only={
            "dtype": ["bfloat16"],
            "head_size": ["64"],
        },
    )
    assert report.ok
