"""flex on a GPU, compiled: the same meaning, no compilation anew, no waiting for the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case, visible_slots
from support.cuda import no_synchronisation
from torch import Tensor
from torch._dynamo.utils import counters

from jackfield.backends.flex import FlexBackend, FlexOptions
from jackfield.conformance.attention.oracle import write_kv_oracle
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache, KVCacheSpec

# Torch's compiler warns about its own use of deprecated parts of torch.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

SLOPES = tuple(0.1 * head for head in range(6))
LAYERS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {}),
    (torch.bfloat16, {"causal": False}),
    (torch.bfloat16, {"sliding_window": 20}),
    (torch.bfloat16, {"causal": False, "sliding_window": 20}),
    (torch.bfloat16, {"logits_soft_cap": 5.0}),
    (torch.bfloat16, {"alibi_slopes": SLOPES}),
    (torch.bfloat16, {"sinks": True}),
    (torch.bfloat16, {"v_head_size": 32}),
    (torch.bfloat16, {"head_size": 72, "v_head_size": 80}),
    (torch.float16, {"sliding_window": 20, "sinks": True, "alibi_slopes": SLOPES}),
    (torch.float32, {}),
    (torch.float32, {"logits_soft_cap": 5.0, "alibi_slopes": SLOPES}),
    (torch.float32, {"head_size": 256, "v_head_size": 256}),
]
# Decoding; prefill; chunks beside decoding; a single sequence.
BATCHES = [
    ([1, 15, 16, 17, 130], [1, 1, 1, 1, 1]),
    ([64, 200, 65], [64, 200, 65]),
    ([1, 60, 33, 190, 90], [1, 7, 1, 150, 12]),
    ([33], [1]),
]
NUM_BLOCKS = 40


def on_gpu(case: Case) -> Case:
    device = torch.device("cuda")
    names = {field.name for field in fields(AttentionBatch)}
    batch = {name: getattr(case.batch, name).to(device) for name in names if f"{name}_cpu" in names}
    return replace(
        case,
        batch=replace(case.batch, **batch),
        cache=KVCache(k=case.cache.k.to(device), v=case.cache.v.to(device)),
        query=case.query.to(device),
        key=case.key.to(device),
        value=case.value.to(device),
        sinks=None if case.sinks is None else case.sinks.to(device),
    )


def backend_of(case: Case, **options: bool) -> FlexBackend:
    return FlexBackend(case.spec, case.cache_spec, torch.device("cuda"), FlexOptions(**options))


def attend(
    backend: FlexBackend, host: Case, *, with_lse: bool = True, may_wait: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and LSE, on the host. Once what is needed has been compiled, nothing waits."""
    case = on_gpu(host)
    rows, heads = len(case.query), case.spec.num_heads
    shape = (rows, heads, case.spec.v_head_size)
    out = torch.full(shape, UNTOUCHED, dtype=case.spec.dtype, device="cuda")
    lse = torch.full((rows, heads), UNTOUCHED, device="cuda")
    wanted = lse if with_lse else None
    with torch.inference_mode():
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=wanted)
        first = out.clone()
        with nullcontext() if may_wait else no_synchronisation():
            backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=wanted)
    assert torch.equal(out, first)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(("dtype", "features"), LAYERS, ids=str)
def test_equals_the_oracle(dtype: torch.dtype, features: dict[str, Any]) -> None:
    spec = replace(AttentionSpec(6, 2, 64, 64, 0.125, dtype), **features)
    backend: FlexBackend | None = None
    for seq_lens, query_lens in BATCHES:
        host = make_case(spec, make_batch(seq_lens, query_lens, 16, NUM_BLOCKS), 16, NUM_BLOCKS)
        backend = backend or backend_of(host)
        assert_meaning(host, *attend(backend, host))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_block_sizes_and_group_sizes(block_size: int, group_size: int) -> None:
    spec = AttentionSpec(2 * group_size, 2, 128, 128, 0.1, torch.bfloat16)
    batch = make_batch([1, 300, 257, 90], [1, 1, 130, 33], block_size, 64)
    host = make_case(spec, batch, block_size, 64)
    out, _ = attend(backend_of(host), host, with_lse=False)
    assert_meaning(host, out, None)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32])
def test_a_cache_of_another_dtype(kv_dtype: torch.dtype) -> None:
    spec = AttentionSpec(6, 2, 64, 64, 0.125, torch.bfloat16)
    batch = make_batch([60, 33], [7, 1], 16, NUM_BLOCKS)
    host = make_case(spec, batch, 16, NUM_BLOCKS, kv_dtype=kv_dtype)
    assert_meaning(host, *attend(backend_of(host), host))


def test_lengths_do_not_compile_anew() -> None:
    """Small tiles and large ones: two graphs, whatever the batch."""
    spec = AttentionSpec(4, 2, 32, 32, 0.2, torch.bfloat16)
    batches = [make_batch(seq_lens, query_lens, 16, NUM_BLOCKS) for seq_lens, query_lens in BATCHES]
    backend = backend_of(make_case(spec, batches[0], 16, NUM_BLOCKS))
    before = counters["stats"]["unique_graphs"]
    for batch in batches:
        attend(backend, make_case(spec, batch, 16, NUM_BLOCKS))
    assert counters["stats"]["unique_graphs"] - before == 2


def test_places_and_finite_contents_of_hidden_slots_do_not_matter() -> None:
    spec = AttentionSpec(6, 2, 64, 64, 0.125, torch.bfloat16, sliding_window=50)
    batch = make_batch([1, 60, 33, 190], [1, 7, 1, 150], 16, NUM_BLOCKS, shared_prefix=True)
    host = make_case(spec, batch, 16, NUM_BLOCKS)
    backend = backend_of(host)
    expected = attend(backend, host)
    hidden = ~visible_slots(host)
    host.cache.k[hidden], host.cache.v[hidden] = 3e38, -3e38
    new_place = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
    table = new_place[batch.block_table_cpu.long().clamp(0, NUM_BLOCKS - 1)].int()
    moved = replace(
        host,
        batch=replace(batch, block_table=table, block_table_cpu=table),
        cache=KVCache(k=host.cache.k[new_place.argsort()], v=host.cache.v[new_place.argsort()]),
    )
    for found, wanted in zip(attend(backend, moved), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_visible_key_are_zero(causal: bool) -> None:
    spec = AttentionSpec(4, 2, 32, 32, 0.25, torch.bfloat16, causal=causal, sinks=True)
    host = make_case(spec, make_batch([0, 5], [0, 2], 16, 8), 16, 8)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    host = replace(
        host, batch=replace(host.batch, query_start_loc=starts, query_start_loc_cpu=starts)
    )
    out, lse = attend(backend_of(host), host)
    assert bool((out[:2] == 0).all())
    assert bool((lse[:2] == -torch.inf).all())
    assert_meaning(host, out, lse)


def test_without_compilation() -> None:
    spec = AttentionSpec(6, 2, 64, 64, 0.125, torch.bfloat16)
    host = make_case(spec, make_batch([60, 33], [7, 1], 16, NUM_BLOCKS), 16, NUM_BLOCKS)
    assert_meaning(host, *attend(backend_of(host, compile=False), host, may_wait=True))


def test_a_cache_of_more_elements_than_32_bits_address() -> None:
    spec = AttentionSpec(8, 8, 128, 128, 0.1, torch.bfloat16)
    small, large = 16, (1 << 15) + 16
    batch = make_batch([300, 90], [1, 33], 64, small)
    host = make_case(spec, batch, 64, small)
    case = on_gpu(host)
    shape = (large, 64, 8, 128)
    cache = KVCache(
        k=torch.zeros(shape, dtype=torch.bfloat16, device="cuda"),
        v=torch.zeros(shape, dtype=torch.bfloat16, device="cuda"),
    )
    cache.k[-small:], cache.v[-small:] = case.cache.k, case.cache.v
    table = torch.where(batch.block_table_cpu < small, batch.block_table_cpu + large - small, -1)
    far = replace(batch, block_table=table.cuda(), block_table_cpu=table)
    cache_spec = KVCacheSpec(large, 64, 8, 128, 128, torch.bfloat16)
    backend = FlexBackend(spec, cache_spec, torch.device("cuda"))
    out = torch.full_like(case.query, UNTOUCHED)
    backend.forward(case.query, cache, backend.plan(far), out)
    assert_meaning(host, out.cpu(), None)


@pytest.mark.parametrize("all_skipped", [False, True])
def test_write_kv(all_skipped: bool) -> None:
    spec = AttentionSpec(6, 2, 64, 32, 0.125, torch.bfloat16)
    host = make_case(spec, make_batch([5, 17], [5, 3], 16, 6), 16, 6)
    slots = host.batch.slot_mapping_cpu.clone()
    slots[:: 1 if all_skipped else 3] = -1
    expected = write_kv_oracle(host.key, host.value, host.cache, slots)
    case = on_gpu(host)
    backend = backend_of(host)
    device_slots = slots.to("cuda")
    with no_synchronisation():
        backend.write_kv(case.key, case.value, case.cache, device_slots)
    assert torch.equal(case.cache.k.cpu(), expected.k)
    assert torch.equal(case.cache.v.cpu(), expected.v)
