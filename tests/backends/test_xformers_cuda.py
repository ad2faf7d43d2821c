"""The backends on xformers on a GPU, with the library itself: meaning, CUDA graphs, no waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case
from support.gpu_cases import CUDA, attend_twice, empty_results, on_gpu, spoil_hidden

from jackfield.backends.xformers import XformersBackend, XformersCutlassBackend, XformersOptions
from jackfield.core.attention import AttentionSpec

# What the library and its Triton kernels warn about is not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

#: One power of two of sequences and of table columns in all batches: few compilations.
DECODE = ([1, 64, 65, 500], [1, 1, 1, 1])
SHORT = ([90, 3, 64, 300], [3, 3, 3, 3])
PREFILL = ([80, 500, 65], [80, 500, 65])
MIXED = ([100, 400, 20, 190, 9], [1, 70, 1, 40, 1])


@pytest.fixture(autouse=True)
def library() -> None:
    reason = XformersBackend.capabilities(CUDA).missing
    if reason is not None:
        pytest.skip(reason)


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(14, 2, 128, 128, 0.09, torch.bfloat16), **changes)


def case_of(
    spec: AttentionSpec, seq_lens: list[int], query_lens: list[int], block_size: int = 64
) -> Case:
    num_blocks = 30 * 64 // block_size
    batch = make_batch(seq_lens, query_lens, block_size, num_blocks)
    return make_case(spec, batch, block_size, num_blocks)


@pytest.mark.parametrize("batch", [DECODE, SHORT, PREFILL, MIXED], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"sinks": True},
        {"num_heads": 4, "num_kv_heads": 4, "head_size": 64, "v_head_size": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_lse", [False, True])
def test_pages_and_copies(
    batch: tuple[list[int], list[int]], changes: dict[str, Any], with_lse: bool
) -> None:
    host = case_of(layer(**changes), *batch)
    spoil_hidden(host)
    case = on_gpu(host)
    backend = XformersBackend(case.spec, case.cache_spec, CUDA)
    out, lse = attend_twice(backend, case, with_lse=with_lse)
    assert_meaning(host, out, lse if with_lse else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"sinks": True},
        {"head_size": 72, "v_head_size": 40},
        {"head_size": 8, "v_head_size": 8},
        {"num_heads": 2, "head_size": 512, "v_head_size": 512},
        {"num_kv_heads": 1},
    ],
    ids=str,
)
def test_copies(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    for batch in (DECODE, PREFILL, MIXED):
        host = case_of(layer(dtype=dtype, **changes), *batch, block_size=16)
        spoil_hidden(host)
        case = on_gpu(host)
        for options in (XformersOptions(), XformersOptions(max_gathered_elements=1 << 19)):
            backend = XformersCutlassBackend(case.spec, case.cache_spec, CUDA, options)
            assert_meaning(host, *attend_twice(backend, case))


def decode_case(seq_lens: list[int], seed: int) -> Case:
    needed = -(-max(seq_lens) // 64)
    batch = make_batch(seq_lens, [1] * len(seq_lens), 64, 200, seed=seed, extra_columns=32 - needed)
    return on_gpu(make_case(layer(), batch, 64, 200))


@pytest.mark.parametrize("num_seqs", [3, 4])
def test_a_captured_graph_replays_with_other_lengths(num_seqs: int) -> None:
    first = decode_case([1] * num_seqs, 0)
    backend = XformersBackend(first.spec, first.cache_spec, CUDA)
    plan = backend.plan(first.batch)
    out, lse = empty_results(first)
    backend.forward(first.query, first.cache, plan, out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(first.query, first.cache, plan, out, lse=lse)
    lengths = ([2000, 1, 17, 256], [2048, 2048, 2048, 2048], [0, 5, 0, 600], [1, 2, 3, 4])
    for seed, seq_lens in enumerate(lengths):
        host_batch = decode_case(seq_lens[:num_seqs], seed).batch
        case = replace(first, batch=host_batch)
        backend.plan(case.batch, into=plan)
        out.fill_(UNTOUCHED)
        lse.fill_(UNTOUCHED)
        graph.replay()
        torch.cuda.synchronize()
        assert_meaning(case, out.cpu(), lse.cpu())
        expected, expected_lse = attend_twice(backend, case)
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(lse.cpu(), expected_lse)
