"""flash_attn on a GPU, with the library itself: meaning, CUDA graphs, no waiting."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case
from support.cuda import no_synchronisation
from torch import Tensor

from jackfield.backends.flash_attn import LIBRARY, FlashAttnBackend
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def library() -> None:
    if (reason := LIBRARY.missing(CUDA)) is not None:
        pytest.skip(reason)


pytestmark = pytest.mark.gpu

SLOPES = tuple(0.01 * head for head in range(14))
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 100},
    {"causal": False, "sliding_window": 100},
    {"sliding_window": 100, "alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES, "sinks": True},
    {"sinks": True},
    {"num_heads": 2},
    {"alibi_slopes": tuple(0.25 * head for head in range(14))},
    {"head_size": 64, "v_head_size": 64},
]
DTYPES = [torch.float16, torch.bfloat16]
# Decoding, with one split of the keys and with many; equal short queries; whole prompts; decoding
# on both sides of chunks.
BATCHES = [
    ([1, 256, 257, 40], [1, 1, 1, 1]),
    ([5000], [1]),
    ([900, 3, 700], [3, 3, 3]),
    ([80, 300, 65], [80, 300, 65]),
    ([300, 700, 20, 258, 1, 9], [1, 170, 1, 40, 1, 1]),
]


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(14, 2, 128, 128, 0.09, torch.bfloat16), **changes)


def host_case(spec: AttentionSpec, batch: AttentionBatch, num_blocks: int = 40) -> Case:
    return make_case(spec, batch, 256, num_blocks)


def placed(case: Case) -> Case:
    names = {field.name for field in fields(AttentionBatch)}
    moved: dict[str, Any] = {
        name: getattr(case.batch, name).to(CUDA) for name in names if f"{name}_cpu" in names
    }
    return replace(
        case,
        batch=replace(case.batch, **moved),
        cache=KVCache(k=case.cache.k.to(CUDA), v=case.cache.v.to(CUDA)),
        query=case.query.to(CUDA),
        key=case.key.to(CUDA),
        value=case.value.to(CUDA),
        sinks=None if case.sinks is None else case.sinks.to(CUDA),
    )


@cache
def lacks_alibi() -> bool:
    """Whether this build of the library was made without ALiBi."""
    spec = layer(alibi_slopes=SLOPES)
    case = placed(host_case(spec, make_batch([1], [1], 256, 40)))
    try:
        attend(FlashAttnBackend(spec, case.cache_spec, CUDA), case)
    except RuntimeError as error:
        if "does not support alibi" not in str(error):
            raise
        return True
    return False


def backend_of(case: Case) -> FlashAttnBackend:
    if case.spec.alibi_slopes is not None and lacks_alibi():
        pytest.skip("this build of flash-attn was made without ALiBi")
    return FlashAttnBackend(case.spec, case.cache_spec, CUDA)


def empty_results(case: Case) -> tuple[Tensor, Tensor]:
    shape = (len(case.query), case.spec.num_heads)
    out = torch.full((*shape, case.spec.v_head_size), UNTOUCHED, dtype=case.spec.dtype, device=CUDA)
    return out, torch.full(shape, UNTOUCHED, device=CUDA)


def attend(backend: FlashAttnBackend, case: Case) -> tuple[Tensor, Tensor]:
    out, lse = empty_results(case)
    plan = backend.plan(case.batch)
    backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=lse)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_feature_without_waiting(features: dict[str, Any], dtype: torch.dtype) -> None:
    for seq_lens, query_lens in BATCHES:
        host = host_case(layer(dtype=dtype, **features), make_batch(seq_lens, query_lens, 256, 40))
        case = placed(host)
        backend = backend_of(case)
        attend(backend, case)
        out, lse = empty_results(case)
        nowhere = torch.full_like(case.batch.slot_mapping, -1)
        with no_synchronisation():
            backend.write_kv(case.key, case.value, case.cache, nowhere)
            plan = backend.plan(case.batch)
            backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=lse)
        assert_meaning(host, out.cpu(), lse.cpu())


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [70, 300, 2], [1, 600, 1]], ids=str)
@pytest.mark.parametrize("features", [{}, {"sliding_window": 30}, {"sinks": True}], ids=str)
def test_rows_of_sequences_without_tokens(features: dict[str, Any], query_lens: list[int]) -> None:
    for seq_lens in ([0, 300, 0], [0, 0, 0]):
        lengths = [
            max(have, new if have else 0) for have, new in zip(seq_lens, query_lens, strict=True)
        ]
        host = host_case(layer(**features), idle_batch(lengths, query_lens))
        case = placed(host)
        assert_meaning(host, *attend(backend_of(case), case))


def idle_batch(seq_lens: list[int], query_lens: list[int]) -> AttentionBatch:
    """Query rows of sequences without tokens have no place in the cache."""
    stored = [new if have else 0 for have, new in zip(seq_lens, query_lens, strict=True)]
    real = make_batch(seq_lens, stored, 256, 40, extra_columns=0)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    slots = torch.full((sum(query_lens),), -1)
    return AttentionBatch.from_host(starts, real.seq_lens, real.block_table, slots)


@pytest.mark.parametrize(
    "features",
    [{}, {"sliding_window": 100}, {"sinks": True}, {"alibi_slopes": SLOPES}],
    ids=str,
)
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [4, 4, 4, 4], [1, 90, 1, 30]], ids=str)
def test_a_captured_graph_replays_with_other_lengths(
    features: dict[str, Any], query_lens: list[int]
) -> None:
    """Captured with as few tokens as there are rows, and a table for many more."""
    spec = layer(**features)
    first = placed(host_case(spec, make_batch(query_lens, query_lens, 256, 40, extra_columns=7)))
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    out, lse = empty_results(first)
    backend.forward(first.query, first.cache, plan, out, sinks=first.sinks, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(first.query, first.cache, plan, out, sinks=first.sinks, lse=lse)
    for lengths in ([2000, 95, 2048, 300], [90, 2048, 4, 40], [0, 100, 5, 0]):
        host = host_case(spec, idle_batch(lengths, query_lens))
        batch = placed(host).batch
        backend.plan(batch, into=plan)
        out.fill_(UNTOUCHED)
        lse.fill_(UNTOUCHED)
        graph.replay()
        torch.cuda.synchronize()
        expected = replace(first, batch=host.batch)
        assert_meaning(expected, out.cpu(), lse.cpu())


def test_the_same_call_gives_the_same_bits() -> None:
    for seq_lens, query_lens in BATCHES:
        case = placed(host_case(layer(), make_batch(seq_lens, query_lens, 256, 40)))
        backend = backend_of(case)
        first, again = attend(backend, case), attend(backend, case)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_a_cache_beyond_32_bit_addresses() -> None:
    spec = layer(num_heads=2, num_kv_heads=1)
    num_blocks = 2**31 // (256 * 128) + 8
    host = host_case(spec, make_batch([700, 40], [1, 20], 256, 40))
    case = placed(host)
    table = host.batch.block_table_cpu
    far = torch.where(table < 40, table + num_blocks - 40, table)
    shape = (num_blocks, 256, 1, 128)
    cache = KVCache(
        k=torch.zeros(shape, dtype=torch.bfloat16, device=CUDA),
        v=torch.zeros(shape, dtype=torch.bfloat16, device=CUDA),
    )
    cache.k[-40:], cache.v[-40:] = case.cache.k, case.cache.v
    backend = FlashAttnBackend(spec, replace(case.cache_spec, num_blocks=num_blocks), CUDA)
    out, lse = empty_results(case)
    plan = backend.plan(replace(case.batch, block_table_cpu=far))
    backend.forward(case.query, cache, plan, out, lse=lse)
    assert_meaning(host, out.cpu(), lse.cpu())
