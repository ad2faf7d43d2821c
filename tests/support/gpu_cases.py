"""Cases of ``attention_cases`` on a CUDA device."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from jackfield.core.attention import AttentionBackend, AttentionBatch, KVCache

from .attention_cases import UNTOUCHED, Case, visible_slots
from .cuda import no_synchronisation

CUDA = torch.device("cuda")


def on_gpu(case: Case) -> Case:
    """The case with an NHD cache on the device; the host's twins stay."""
    names = {field.name for field in fields(AttentionBatch)}
    batch = {name: getattr(case.batch, name).to(CUDA) for name in names if f"{name}_cpu" in names}
    return replace(
        case,
        batch=replace(case.batch, **batch),
        cache=KVCache(k=case.cache.k.to(CUDA), v=case.cache.v.to(CUDA)),
        query=case.query.to(CUDA),
        key=case.key.to(CUDA),
        value=case.value.to(CUDA),
        sinks=None if case.sinks is None else case.sinks.to(CUDA),
    )


def spoil_hidden(case: Case) -> None:
    """NaN in all slots that no row sees."""
    hidden = ~visible_slots(case)
    case.cache.k[hidden], case.cache.v[hidden] = torch.nan, torch.nan


def empty_results(case: Case) -> tuple[Tensor, Tensor]:
    """Output and LSE on the device, filled with ``UNTOUCHED``."""
    shape = (len(case.query), case.spec.num_heads)
    out = torch.full((*shape, case.spec.v_head_size), UNTOUCHED, dtype=case.spec.dtype)
    return out.to(CUDA), torch.full(shape, UNTOUCHED, device=CUDA)


def attend_twice(
    backend: AttentionBackend, case: Case, *, with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Output and LSE, on the host. The second time, when kernels are there, nothing waits and all
    bits are the same."""
    out, lse = empty_results(case)
    first = torch.empty_like(out)
    wanted = lse if with_lse else None
    with torch.inference_mode():
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, first, sinks=case.sinks, lse=wanted)
        with no_synchronisation():
            plan = backend.plan(case.batch)
            backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=wanted)
    owned = case.batch.num_tokens
    assert torch.equal(out[:owned], first[:owned])
    return out.cpu(), lse.cpu()
