"""What the tests of the ``triton`` backend share: they run on a GPU, else in Triton's interpreter.

Triton decides when it and the kernels are imported whether they are interpreted. Importing this
module imports both, and it does so while tests are collected, before a test of something else
imports triton. ``TRITON_INTERPRET`` is set again in the tests themselves, by ``interpreted``, so
that no other test sees a backend that works on a CPU.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jackfield.backends.triton_paged.backend import TritonBackend
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    allocate_kv_cache,
)

from .attention_cases import UNTOUCHED, Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton")
        import jackfield.backends.triton_paged.decode_kernel
        import jackfield.backends.triton_paged.prefill_kernel
        import jackfield.backends.triton_paged.store_kernel  # noqa: F401


def small_tiles(resident: int = 4, rounds: int = 1) -> TritonOptions:
    """Tiles so small that a few dozen keys make several tiles and chunks."""
    shape = {"keys": 16, "num_warps": 4, "num_stages": 2}
    spread = {"chunk_keys": 16, "max_chunks": 16, "resident": resident, "rounds": rounds}
    return TritonOptions.model_validate(
        {"prefill": {"rows": 32, **shape}, "decode": {**shape, **spread}}
    )


SMALL_TILES = small_tiles()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter, for the length of a test, where there is no GPU."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def placed(case: Case, kind: type[AttentionBackend] = TritonBackend) -> Case:
    """The case on ``DEVICE``, its cache in the backend's own physical order."""
    layout = kind.capabilities(DEVICE).kv_layout
    scales = (case.cache.k_scale, case.cache.v_scale)
    cache = allocate_kv_cache(case.cache_spec, layout, DEVICE, *scales)
    cache.k.copy_(case.cache.k)
    cache.v.copy_(case.cache.v)
    names = {field.name for field in fields(AttentionBatch)}
    moved: dict[str, Any] = {
        name: getattr(case.batch, name).to(DEVICE) for name in names if f"{name}_cpu" in names
    }
    return replace(
        case,
        batch=replace(case.batch, **moved),
        cache=cache,
        query=case.query.to(DEVICE),
        key=case.key.to(DEVICE),
        value=case.value.to(DEVICE),
        sinks=None if case.sinks is None else case.sinks.to(DEVICE),
    )


def backend_of(case: Case, options: TritonOptions | None = SMALL_TILES) -> TritonBackend:
    """A backend for the case's layer."""
    return TritonBackend(case.spec, case.cache_spec, DEVICE, options)


def empty_results(case: Case) -> tuple[Tensor, Tensor]:
    """Output and LSE, filled with ``UNTOUCHED``."""
    shape = (len(case.query), case.spec.num_heads)
    out = torch.full((*shape, case.spec.v_head_size), UNTOUCHED, dtype=case.spec.dtype)
    return out.to(DEVICE), torch.full(shape, UNTOUCHED, device=DEVICE)


def attend(
    backend: AttentionBackend, case: Case, *, with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """``plan`` and ``forward`` of a placed case: output and LSE on the host."""
    out, lse = empty_results(case)
    backend.forward(
        case.query,
        case.cache,
        backend.plan(case.batch),
        out,
        sinks=case.sinks,
        lse=lse if with_lse else None,
    )
    return out.cpu(), lse.cpu()


def layer(**changes: Any) -> AttentionSpec:
    """A small layer of 6 heads in 2 groups, with changes."""
    return replace(AttentionSpec(6, 2, 32, 32, 0.2, torch.float32), **changes)
