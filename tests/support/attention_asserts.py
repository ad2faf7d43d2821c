"""What tests of attention backends assert, whatever the backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jackfield.conformance.attention.oracle import attention_oracle, write_kv_oracle
from jackfield.core.attention import (
    AttentionBackend,
    AttentionPlan,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
)

from .attention_cases import CPU, UNTOUCHED, Case, bounds, make_batch, make_case


def assert_meaning(case: Case, out: Tensor, lse: Tensor | None) -> None:
    """Within rounding of the oracle where a query owns the row, untouched elsewhere.

    Args:
        case: on any device.
        out, lse: on the host; no LSE if it was not asked for.
    """
    owned = case.batch.num_tokens
    cache = replace(case.cache, k=case.cache.k.to(CPU), v=case.cache.v.to(CPU))
    sinks = None if case.sinks is None else case.sinks.to(CPU)
    expected, expected_lse = attention_oracle(
        case.spec, case.query.to(CPU), cache, case.batch, sinks
    )
    out_bound, lse_bound = bounds(case)
    torch.testing.assert_close(out[:owned].double(), expected[:owned], rtol=0, atol=out_bound)
    assert bool((out[owned:] == UNTOUCHED).all())
    if lse is not None:
        torch.testing.assert_close(
            lse[:owned].double(), expected_lse[:owned], rtol=0, atol=lse_bound
        )
        assert bool((lse[owned:] == UNTOUCHED).all())


def assert_same_values(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Output and LSE of two calls are equal, and no number is NaN."""
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    return torch.equal(
        first.contiguous().view(-1).view(torch.uint8),
        second.contiguous().view(-1).view(torch.uint8),
    )


def assert_write_kv(backend: AttentionBackend, case: Case, skipped: list[bool]) -> None:
    """``write_kv`` changes the named slots and no other byte, NaN among them; slot -1 is none."""
    slots = torch.where(torch.tensor(skipped, dtype=torch.bool), -1, case.batch.slot_mapping)
    case.cache.k[:, -1] = float("nan")
    expected = write_kv_oracle(case.key, case.value, case.cache, slots)
    backend.write_kv(case.key, case.value, case.cache, slots)
    assert same_bytes(case.cache.k, expected.k)
    assert same_bytes(case.cache.v, expected.v)


def assert_impossible_calls_are_refused(kind: type[AttentionBackend]) -> None:
    """Of a backend on the CPU that reads packed NHD caches and captures no graphs."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32)
    case = make_case(spec, make_batch([5], [2], 4, 8), 4, 8)
    backend = kind(spec, KVCacheSpec(8, 4, 2, 16, 16, torch.float32), CPU)
    plan = backend.plan(case.batch)
    out = torch.zeros(len(case.query), 4, 16)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is False"):
        backend.forward(case.query, case.cache, plan, out, sinks=torch.zeros(4))
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.forward(case.query, case.cache, AttentionPlan(), out)
    with pytest.raises(ValueError, match="2 query rows were planned, but query has 1 rows"):
        backend.forward(case.query[:1], case.cache, plan, out)
    heads_first = KVCache(
        k=case.cache.k.transpose(1, 2).contiguous().transpose(1, 2), v=case.cache.v
    )
    with pytest.raises(ValueError, match="32 tokens x 2 heads x 16 in NHD order"):
        backend.forward(case.query, heads_first, plan, out)
    with pytest.raises(ValueError, match="into must be None"):
        backend.plan(case.batch, into=plan)
