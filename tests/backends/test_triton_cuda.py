"""The triton backend on a GPU: CUDA graphs, no waiting, one compilation, larger shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case, visible_slots
from support.cuda import no_synchronisation
from support.triton_cases import (
    attend,
    backend_of,
    empty_results,
    interpreted,
    placed,
)

from jackfield.backends.triton_paged import planning
from jackfield.backends.triton_paged.backend import TritonBackend
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache

__all__ = ["interpreted"]

pytestmark = pytest.mark.gpu

FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 100},
    {"causal": False, "sliding_window": 100},
    {"logits_soft_cap": 5.0},
    {"alibi_slopes": tuple(0.01 * head for head in range(14))},
    {"sinks": True},
    {"v_head_size": 64},
    {"head_size": 80, "v_head_size": 80},
    {"scale": -0.05},
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Decoding with one split and with several, a few rows, chunks and whole prompts.
BATCH = ([1, 700, 257, 256, 300, 150, 129], [1, 1, 2, 40, 3, 150, 1])
NUM_BLOCKS = 140


def large_case(spec: AttentionSpec, kv_dtype: torch.dtype | None = None) -> tuple[Case, Case]:
    """The case on the host and on the GPU, NaN in all slots that no row sees."""
    host = make_case(spec, make_batch(*BATCH, 16, NUM_BLOCKS), 16, NUM_BLOCKS, kv_dtype=kv_dtype)
    hidden = ~visible_slots(host)
    host.cache.k[hidden], host.cache.v[hidden] = torch.nan, torch.nan
    return host, placed(host)


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(14, 2, 128, 128, 0.09, torch.bfloat16), **changes)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_feature_without_waiting(features: dict[str, Any], dtype: torch.dtype) -> None:
    host, case = large_case(layer(dtype=dtype, **features))
    backend = backend_of(case, None)
    attend(backend, case)
    out, lse = empty_results(case)
    nowhere = torch.full_like(case.batch.slot_mapping, -1)
    with no_synchronisation():
        backend.write_kv(case.key, case.value, case.cache, nowhere)
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=lse)
    assert_meaning(host, out.cpu(), lse.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_a_cache_of_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    host, case = large_case(layer(dtype=dtype), kv_dtype)
    assert_meaning(host, *attend(backend_of(case, None), case))


@pytest.mark.parametrize("head_size", [16, 64, 96, 256])
@pytest.mark.parametrize("group_size", [1, 8, 20, 32, 64, 128])
def test_sizes(head_size: int, group_size: int) -> None:
    spec = AttentionSpec(group_size, 1, head_size, head_size, 0.1, torch.bfloat16)
    host = make_case(spec, make_batch([600, 150, 40], [1, 33, 2], 32, 30), 32, 30)
    case = placed(host)
    assert_meaning(host, *attend(backend_of(case, None), case))


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_block_sizes(block_size: int) -> None:
    num_blocks = 1200 // block_size + 4
    batch = make_batch([600, 150, 40], [1, 33, 2], block_size, num_blocks)
    host = make_case(layer(), batch, block_size, num_blocks)
    case = placed(host)
    assert_meaning(host, *attend(backend_of(case, None), case))


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    _, case = large_case(layer())
    backend = backend_of(case, None)
    out, lse = attend(backend, case)
    starts = case.batch.query_start_loc_cpu
    for index, query_len in enumerate(BATCH[1]):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        one = slice(index, index + 1)
        batch = AttentionBatch.from_host(
            torch.tensor([0, query_len], dtype=torch.int32),
            case.batch.seq_lens_cpu[one],
            case.batch.block_table_cpu[one],
            case.batch.slot_mapping_cpu[rows],
            "cuda",
        )
        alone, alone_lse = attend(backend, replace(case, batch=batch, query=case.query[rows]))
        assert torch.equal(alone, out[rows])
        assert torch.equal(alone_lse, lse[rows])


@pytest.mark.parametrize("features", [{}, {"sliding_window": 1500}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_work_is_spread_over_programs_changes_no_bit(
    features: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single chunks, groups of them, and several groups of one program."""
    batch = make_batch([3000, 1024, 5, 1025, 1300, 300] * 8, [1, 2, 1, 1, 2, 1] * 8, 16, 3400)
    case = placed(make_case(layer(dtype=dtype, **features), batch, 16, 3400))
    usual = backend_of(case, None)._constants.decode_tiles
    seen = []
    results = []
    for few_groups, resident, rounds in ((4, 8, 1), (0, 1, 64), (0, 1, 1)):
        monkeypatch.setattr(planning, "_FEW_GROUPS", few_groups)
        tiles = usual.model_copy(update={"resident": resident, "rounds": rounds})
        backend = backend_of(case, TritonOptions(decode=tiles))
        plan = backend.plan(case.batch)
        seen.append((plan.num_programs, plan.num_decode_items))
        results.append(attend(backend, case))
    assert seen[0][0] == seen[0][1] > seen[1][1] == seen[1][0] > seen[2][0]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def decode_case(seq_lens: list[int], seed: int, columns: int) -> Case:
    needed = -(-max(seq_lens) // 16)
    batch = make_batch(
        seq_lens, [1] * len(seq_lens), 16, 600, seed=seed, extra_columns=columns - needed
    )
    return placed(make_case(layer(), batch, 16, 600))


def test_a_captured_graph_replays_with_other_lengths() -> None:
    """Captured with short sequences, whose forward alone would have needed no merging."""
    first = decode_case([1, 1, 1, 1], 0, 128)
    backend = backend_of(first, None)
    plan = backend.plan(first.batch)
    out, lse = empty_results(first)
    backend.forward(first.query, first.cache, plan, out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(first.query, first.cache, plan, out, lse=lse)
    for seed, lengths in enumerate(
        ([2000, 1, 17, 256], [2048, 2048, 2048, 2048], [0, 5, 0, 600], [1, 2, 3, 4])
    ):
        case = replace(decode_case(lengths, seed, 128), query=first.query, cache=first.cache)
        backend.plan(case.batch, into=plan)
        out.fill_(UNTOUCHED)
        lse.fill_(UNTOUCHED)
        graph.replay()
        expected, expected_lse = attend(backend, case)
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(lse.cpu(), expected_lse)


def compiled_kernels(backend: TritonBackend) -> int:
    """Kernels in the caches of all three functions."""
    functions = (
        backend._prefill_kernel,
        backend._decode_kernel,
        backend._store._kernel,
    )
    return sum(
        len(entry[0] if isinstance(entry, tuple) else entry)
        for function in functions
        for entry in function.device_caches.values()
    )


def test_other_lengths_and_other_numbers_compile_nothing() -> None:
    """Nor do other windows, scales and caps, other numbers of heads and other block sizes, but for
    the one that is compiled in."""
    cases: list[Case] = []
    for seq_lens, query_lens, heads, block_size in (
        ([100, 40], [1, 30], (14, 2), 32),
        ([1, 1000, 16, 17, 300], [1, 1, 16, 17, 3], (14, 2), 64),
        ([1000], [1000], (14, 2), 32),
        ([900], [1], (16, 1), 32),
        ([33, 64], [33, 1], (12, 12), 8),
    ):
        num_blocks = sum(-(-length // block_size) for length in seq_lens) + 3
        batch = make_batch(seq_lens, query_lens, block_size, num_blocks)
        index = len(cases)
        spec = layer(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            sliding_window=77 + index,
            logits_soft_cap=3.0 + index,
            scale=0.1 + index,
        )
        cases.append(placed(make_case(spec, batch, block_size, num_blocks)))
    counts = []
    for case in cases:
        backend = backend_of(case, None)
        backend.write_kv(case.key, case.value, case.cache, case.batch.slot_mapping)
        attend(backend, case)
        counts.append(compiled_kernels(backend))
    assert len(set(counts)) == 1


def test_a_cache_beyond_32_bit_addresses() -> None:
    spec = layer(num_heads=2, num_kv_heads=1)
    num_blocks = 2**31 // (16 * 128) + 8
    host = make_case(spec, make_batch([700, 40], [1, 20], 16, 50), 16, 50)
    case = placed(host)
    table = host.batch.block_table_cpu
    far = torch.where(table < 50, table + num_blocks - 50, table)
    shape = (num_blocks, 1, 16, 128)
    cache = KVCache(
        k=torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2),
        v=torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2),
    )
    cache.k[-50:], cache.v[-50:] = case.cache.k, case.cache.v
    backend = backend_of(
        replace(case, cache_spec=replace(case.cache_spec, num_blocks=num_blocks)), None
    )
    out, lse = empty_results(case)
    plan = backend.plan(replace(case.batch, block_table_cpu=far))
    backend.forward(case.query, cache, plan, out, lse=lse)
    assert_meaning(host, out.cpu(), lse.cpu())
    slots = torch.tensor([num_blocks * 16 - 1], device="cuda")
    backend.write_kv(case.key[:1], case.value[:1], cache, slots)
    assert torch.equal(cache.k[-1, -1], case.key[0])
