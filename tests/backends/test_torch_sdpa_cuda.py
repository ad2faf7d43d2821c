"""torch_sdpa on a GPU: the same meaning, and ``forward`` never waits for the device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.attention_cases import UNTOUCHED, Case, bounds, make_batch, make_case, visible_slots
from support.cuda import no_synchronisation

from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.conformance.attention.oracle import attention_oracle, write_kv_oracle
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache

pytestmark = pytest.mark.gpu

FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 20},
    {"causal": False, "sliding_window": 20},
    {"logits_soft_cap": 5.0},
    {"alibi_slopes": tuple(0.1 * head for head in range(6))},
    {"sinks": True},
    {"v_head_size": 32},
]


def on_gpu(case: Case) -> Case:
    device = torch.device("cuda")
    batch = {
        field.name: getattr(case.batch, field.name).to(device)
        for field in fields(AttentionBatch)
        if f"{field.name}_cpu" in {other.name for other in fields(AttentionBatch)}
    }
    return replace(
        case,
        batch=replace(case.batch, **batch),
        cache=KVCache(k=case.cache.k.to(device), v=case.cache.v.to(device)),
        query=case.query.to(device),
        key=case.key.to(device),
        value=case.value.to(device),
        sinks=None if case.sinks is None else case.sinks.to(device),
    )


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
@pytest.mark.parametrize("with_lse", [False, True])
def test_equals_the_oracle(features: dict[str, Any], dtype: torch.dtype, with_lse: bool) -> None:
    plain = AttentionSpec(6, 2, 64, 64, 0.125, dtype)
    spec = replace(plain, **features)
    batch = make_batch([1, 15, 16, 17, 60, 33, 90], [1, 1, 1, 17, 7, 1, 12], 16, 30)
    host = make_case(spec, batch, 16, 30)
    hidden = ~visible_slots(host)
    host.cache.k[hidden], host.cache.v[hidden] = torch.nan, torch.nan
    case = on_gpu(host)
    backend = TorchSdpaBackend(spec, case.cache_spec, torch.device("cuda"))
    plan = backend.plan(case.batch)
    out = torch.full((len(case.query), 6, spec.v_head_size), UNTOUCHED, dtype=dtype, device="cuda")
    lse = torch.full((len(case.query), 6), UNTOUCHED, device="cuda")
    with no_synchronisation():
        backend.forward(
            case.query, case.cache, plan, out, sinks=case.sinks, lse=lse if with_lse else None
        )
    expected, expected_lse = attention_oracle(spec, host.query, host.cache, batch, host.sinks)
    owned = batch.num_tokens
    finite = KVCache(k=host.cache.k.nan_to_num(), v=host.cache.v.nan_to_num())
    out_bound, lse_bound = bounds(replace(host, cache=finite))
    torch.testing.assert_close(out[:owned].cpu().double(), expected[:owned], rtol=0, atol=out_bound)
    assert bool((out[owned:] == UNTOUCHED).all())
    if with_lse:
        torch.testing.assert_close(
            lse[:owned].cpu().double(), expected_lse[:owned], rtol=0, atol=lse_bound
        )


@pytest.mark.parametrize("all_skipped", [False, True])
def test_write_kv(all_skipped: bool) -> None:
    spec = AttentionSpec(6, 2, 64, 32, 0.125, torch.bfloat16)
    host = make_case(spec, make_batch([5, 17], [5, 3], 16, 6), 16, 6)
    host.cache.k[:, -1], host.cache.v[:, 0] = torch.nan, torch.nan
    slots = host.batch.slot_mapping_cpu.clone()
    slots[:: 1 if all_skipped else 3] = -1
    expected = write_kv_oracle(host.key, host.value, host.cache, slots)
    case = on_gpu(host)
    backend = TorchSdpaBackend(spec, case.cache_spec, torch.device("cuda"))
    device_slots = slots.to("cuda")
    with no_synchronisation():
        backend.write_kv(case.key, case.value, case.cache, device_slots)
    for stored, wanted in ((case.cache.k, expected.k), (case.cache.v, expected.v)):
        assert torch.equal(stored.cpu().view(torch.int16), wanted.view(torch.int16))


def test_a_long_prompt_in_tiles_beside_decoding_sequences() -> None:
    spec = AttentionSpec(4, 2, 64, 64, 0.125, torch.bfloat16)
    host = make_case(spec, make_batch([330, 47, 290], [300, 1, 290], 16, 50), 16, 50)
    case = on_gpu(host)
    backend = TorchSdpaBackend(spec, case.cache_spec, torch.device("cuda"))
    out = torch.full((len(case.query), 4, 64), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    backend.forward(case.query, case.cache, backend.plan(case.batch), out)
    expected, _ = attention_oracle(spec, host.query, host.cache, host.batch)
    owned = host.batch.num_tokens
    torch.testing.assert_close(
        out[:owned].cpu().double(), expected[:owned], rtol=0, atol=bounds(host)[0]
    )
