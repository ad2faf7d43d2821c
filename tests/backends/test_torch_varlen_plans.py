"""What torch_varlen hands to torch's function, by its version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, UNTOUCHED, Case, attend, make_batch, make_case
from support.varlen_backends import PagedVarlenOnCpu, VarlenOnCpu
from support.varlen_double import CALLS

from jackfield.backends.torch_varlen import TorchVarlenOptions
from jackfield.core.attention import AttentionBatch, AttentionSpec

SPEC = AttentionSpec(6, 2, 32, 32, 0.2, torch.float16)


@pytest.fixture(autouse=True)
def calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def case_of(
    seq_lens: list[int],
    query_lens: list[int],
    block_size: int = 16,
    spec: AttentionSpec = SPEC,
) -> Case:
    batch = make_batch(seq_lens, query_lens, block_size, 24)
    return make_case(spec, batch, block_size, 24)


def test_copied_keys_of_a_mixed_batch_are_one_call() -> None:
    case = case_of([20, 40, 7], [1, 30, 7])
    attend(VarlenOnCpu(SPEC, case.cache_spec, CPU), case)
    (call,) = CALLS
    table = case.batch.block_table_cpu
    assert call.query.data_ptr() == case.query.data_ptr()
    assert call.query.shape == (38, 6, 32)
    assert call.cu_seq_q.tolist() == [0, 1, 31, 38]
    assert call.cu_seq_k.tolist() == [0, 20, 60, 67]
    assert (call.max_q, call.max_k) == (30, 40)
    assert (call.scale, call.window_size, call.return_aux) == (0.2, (-1, 0), None)
    assert (call.enable_gqa, call.block_table, call.num_splits) == (None, None, None)
    first = case.cache.k[table[0, :2].long()].flatten(0, 1)[:20]
    assert torch.equal(call.key[:20], first)


def test_pages_of_a_mixed_batch_are_one_call() -> None:
    case = case_of([300, 40, 7], [1, 30, 7], 256)
    attend(PagedVarlenOnCpu(SPEC, case.cache_spec, CPU), case, with_lse=True)
    (call,) = CALLS
    table = case.batch.block_table_cpu
    assert call.key.data_ptr() == case.cache.k.data_ptr()
    assert call.key.shape == (24, 256, 2, 32)
    assert call.cu_seq_q.tolist() == [0, 1, 31, 38]
    assert call.cu_seq_k.tolist() == [0, 300, 340, 347]
    assert call.seqused_k is not None
    assert call.seqused_k.tolist() == [300, 40, 7]
    assert (call.max_q, call.max_k) == (30, 300)
    assert (call.enable_gqa, call.num_splits) == (True, 1)
    assert call.return_aux is not None
    assert call.return_aux.lse
    assert call.block_table is not None
    assert call.block_table[:, :2].tolist() == [
        table[0, :2].tolist(),
        [int(table[1, 0]), 0],
        [int(table[2, 0]), 0],
    ]


@pytest.mark.parametrize(
    ("causal", "window", "handed"),
    [
        (True, None, (-1, 0)),
        (True, 1, (0, 0)),
        (True, 10, (9, 0)),
        (False, None, (-1, -1)),
        (False, 10, (9, -1)),
    ],
)
def test_windows_are_translated(causal: bool, window: int | None, handed: tuple[int, int]) -> None:
    spec = AttentionSpec(6, 2, 32, 32, 0.2, torch.float16, causal=causal, sliding_window=window)
    case = case_of([50, 30], [1, 4], spec=spec)
    attend(VarlenOnCpu(spec, case.cache_spec, CPU), case)
    (call,) = CALLS
    assert call.window_size == handed
    seen = [min(50, window or 50), min(30, (window or 30) + 3)]
    assert call.cu_seq_k.tolist() == [0, seen[0], sum(seen)]


def test_heads_of_equal_number_need_no_groups() -> None:
    spec = AttentionSpec(2, 2, 32, 32, 0.2, torch.float16)
    case = case_of([300], [1], 256, spec)
    attend(PagedVarlenOnCpu(spec, case.cache_spec, CPU), case)
    assert CALLS[0].enable_gqa is False


def test_copies_are_bounded() -> None:
    """Elements of a key: 2 heads, 32 for the key and 32 for the value."""
    options = TorchVarlenOptions(max_gathered_elements=2 * 64 * 50)
    case = case_of([20, 30, 1, 70, 5], [20, 30, 1, 70, 5])
    attend(VarlenOnCpu(SPEC, case.cache_spec, CPU, options), case)
    assert [len(call.key) for call in CALLS] == [50, 1, 70, 5]


@pytest.mark.parametrize("kind", [VarlenOnCpu, PagedVarlenOnCpu])
@pytest.mark.parametrize("lens", [[0, 0, 20], [0, 0, 0]], ids=str)
def test_sequences_without_tokens_are_in_no_call(kind: type[VarlenOnCpu], lens: list[int]) -> None:
    real = case_of([1, 1, 20], [1, 18, 19], 256)
    batch = AttentionBatch.from_host(
        torch.tensor([0, 1, 19, 38], dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        real.batch.block_table_cpu,
        torch.full((38,), -1),
    )
    case = make_case(SPEC, batch, 256, 24)
    out, lse = attend(kind(SPEC, case.cache_spec, CPU), case, with_lse=True)
    assert [call.cu_seq_q.tolist() for call in CALLS] == ([[0, 19]] if lens[2] else [])
    assert_meaning(case, out, lse)


@pytest.mark.parametrize("kind", [VarlenOnCpu, PagedVarlenOnCpu])
def test_an_empty_batch_calls_nothing(kind: type[VarlenOnCpu]) -> None:
    case = case_of([], [], 256)
    out, _ = attend(kind(SPEC, case.cache_spec, CPU), case)
    assert not CALLS
    assert bool((out == UNTOUCHED).all())


def test_an_old_plan_stays_good() -> None:
    cases = [case_of([65, 3], [1, 3]), case_of([200, 1], [1, 1]), case_of([70, 20], [30, 20])]
    backend = VarlenOnCpu(SPEC, cases[0].cache_spec, CPU)
    plans = [backend.plan(case.batch) for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        out = torch.full(case.query.shape, UNTOUCHED, dtype=SPEC.dtype)
        backend.forward(case.query, case.cache, plan, out)
        assert_meaning(case, out, None)
