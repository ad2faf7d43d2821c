"""What flashinfer is told of named batches, and in which memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import flashinfer_double
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, Case, attend, make_batch, make_case
from support.flashinfer_cases import OnTheDouble, layer, library
from support.flashinfer_kernels_double import prefill_plan

from jackfield.backends._flashinfer_plan import Geometry, StepArrays
from jackfield.backends.flashinfer import FlashInferPlan
from jackfield.core.attention import AttentionBatch, AttentionSpec

__all__ = ["library"]

pytestmark = pytest.mark.usefixtures("library")
BLOCK, BLOCKS = 16, 40


def case_of(
    seq_lens: list[int], query_lens: list[int], columns: int | None = None, **changes: Any
) -> Case:
    """A case with a block table of so many columns, or as many as it needs and 2."""
    needed = -(-max(seq_lens) // BLOCK)
    extra = 2 if columns is None else columns - needed
    batch = make_batch(seq_lens, query_lens, BLOCK, BLOCKS, extra_columns=extra)
    return make_case(layer(**changes), batch, BLOCK, BLOCKS)


def backend_of(case: Case) -> OnTheDouble:
    return OnTheDouble(case.spec, case.cache_spec, CPU)


def planned(plan: FlashInferPlan) -> dict[str, Any]:
    """Arguments of the library's ``plan``; tensors as lists."""
    assert plan.held is not None
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in plan.held.wrapper.planned.items()
    }


def blocks_of(batch: AttentionBatch, *counts: int) -> list[int]:
    """The first so many blocks of each sequence."""
    table = batch.block_table_cpu
    return [block for row, count in zip(table, counts, strict=True) for block in row[:count]]


def test_decode() -> None:
    case = case_of([1, 16, 17, 33], [1, 1, 1, 1])
    told = planned(backend_of(case).plan(case.batch))
    assert told["indptr"] == [0, 1, 2, 4, 7]
    assert told["indices"] == blocks_of(case.batch, 1, 1, 2, 3)
    assert told["last_page_len"] == [1, 16, 1, 1]
    assert (told["num_qo_heads"], told["num_kv_heads"], told["head_dim"]) == (6, 2, 64)
    assert (told["page_size"], told["window_left"], told["sm_scale"]) == (16, -1, 1.0)
    dtypes = [told[name] for name in ("q_data_type", "kv_data_type", "o_data_type")]
    assert dtypes == [torch.bfloat16] * 3


def test_prefill_in_chunks_and_mixed() -> None:
    case = case_of([20, 40, 5], [4, 1, 5], sliding_window=9)
    told = planned(backend_of(case).plan(case.batch))
    assert told["qo_indptr"] == [0, 4, 5, 10]
    assert told["paged_kv_indptr"] == [0, 2, 5, 6]
    assert told["paged_kv_indices"] == blocks_of(case.batch, 2, 3, 1)
    assert told["paged_kv_last_page_len"] == [4, 8, 5]
    assert (told["causal"], told["window_left"], told["disable_split_kv"]) == (True, 8, False)
    assert (told["head_dim_qk"], told["head_dim_vo"]) == (64, 64)


def test_a_window_without_causality_is_not_split() -> None:
    case = case_of([20], [4], causal=False, sliding_window=9)
    told = planned(backend_of(case).plan(case.batch))
    assert (told["causal"], told["disable_split_kv"]) == (False, True)
    case = case_of([20], [4], causal=False)
    assert not planned(backend_of(case).plan(case.batch))["disable_split_kv"]


def test_sequences_without_rows_are_left_out_and_empty_ones_have_no_blocks() -> None:
    case = case_of([20, 33, 0, 7], [1, 0, 1, 1])
    backend = backend_of(case)
    plan = backend.plan(case.batch)
    told = planned(plan)
    assert told["indptr"] == [0, 2, 2, 3]
    assert told["indices"] == blocks_of(case.batch, 2, 0, 0, 1)
    assert told["last_page_len"] == [4, 1, 7]
    assert plan.blind.tolist() == [False, True, False]
    assert_meaning(case, *attend(backend, case, with_lse=True))


def test_a_step_without_rows_calls_nothing() -> None:
    case = case_of([20], [0])
    backend = backend_of(case)
    plan = backend.plan(case.batch)
    assert plan.held is None
    assert_meaning(case, *attend(backend, case, with_lse=True))
    assert backend.plan(case.batch, into=plan) is plan


def test_the_soft_cap_is_given_to_plan_and_chooses_the_module(library: Any) -> None:
    case = case_of([20, 9], [1, 1], logits_soft_cap=5.0, scale=0.01)
    backend = backend_of(case)
    assert planned(backend.plan(case.batch))["logits_soft_cap"] == 5.0
    assert "_use_logits_cap_True_" in backend._modules["fa2"].name


def test_decode_and_prefill_take_one_module(library: Any) -> None:
    case = case_of([20], [4], sliding_window=5)
    backend = backend_of(case)
    assert backend._modules["fa2"].name == (
        "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
        "head_dim_qk_64_head_dim_vo_64_posenc_0_use_swa_True_use_logits_cap_False_f16qk_False"
    )
    for query_len in (1, 4):
        step = case_of([20], [query_len], sliding_window=5)
        plan = backend.plan(step.batch)
        assert plan.held is not None
        assert plan.held.wrapper.backend == "fa2"
        assert plan.held.wrapper.module.window


def test_a_plan_is_updated_where_it_is() -> None:
    first = case_of([1, 1, 1], [1, 1, 1], columns=4)
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    held = plan.held
    assert held is not None
    wrapper = held.wrapper

    def places() -> list[int]:
        tensors = (wrapper.page_starts, wrapper.pages, wrapper.last_page_lens, plan.to_natural)
        return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]

    before = places()
    for seq_lens in ([64, 0, 17], [0, 5, 64], [3, 4, 5]):
        case = case_of(seq_lens, [1, 1, 1], columns=4)
        assert backend.plan(case.batch, into=plan) is plan
        assert plan.held is held
        assert held.wrapper is wrapper
        assert places() == before
        assert_meaning(case, *attend_with(backend, plan, case))


def attend_with(
    backend: OnTheDouble, plan: FlashInferPlan, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = len(case.query), case.spec.num_heads
    out = torch.full((rows, heads, case.spec.v_head_size), 7.0, dtype=case.spec.dtype)
    lse = torch.full((rows, heads), 7.0)
    backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=lse)
    return out, lse


def test_plans_that_do_not_fit_are_refused() -> None:
    first = case_of([20, 9], [1, 1], columns=3)
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    with pytest.raises(ValueError, match=r"planned for query_start_loc=\[0, 1, 2\], not for"):
        backend.plan(case_of([20], [1]).batch, into=plan)
    with pytest.raises(ValueError, match="block tables of up to 3 columns, not for 4"):
        backend.plan(case_of([20, 9], [1, 1], columns=4).batch, into=plan)
    chunk = case_of([20, 9], [2, 1])
    with pytest.raises(ValueError, match="updates plans of decoding steps only"):
        backend.plan(chunk.batch, into=backend.plan(chunk.batch))


def test_plans_live_side_by_side_and_their_wrappers_are_used_again() -> None:
    cases = [case_of([20 + index, 9], [1, 1]) for index in range(3)]
    cases += [case_of([20 + index, 9], [3, 1]) for index in range(3)]
    backend = backend_of(cases[0])
    plans = [backend.plan(case.batch) for case in cases]
    wrappers = {id(plan.held.wrapper) for plan in plans if plan.held is not None}
    assert len(wrappers) == len(plans)
    for plan, case in zip(plans, cases, strict=True):
        assert_meaning(case, *attend_with(backend, plan, case))
    del plans, plan
    gc.collect()
    again = [backend.plan(case.batch) for case in cases]
    assert {id(plan.held.wrapper) for plan in again if plan.held is not None} == wrappers


def test_results_that_are_not_packed() -> None:
    """The library writes as if they were."""
    case = case_of([20, 9], [3, 1])
    backend = backend_of(case)
    heads = case.spec.num_heads
    out = torch.full((len(case.query), heads, 128), 7.0, dtype=torch.bfloat16)[..., :64]
    lse = torch.full((heads, len(case.query)), 7.0).T
    backend.forward(case.query, case.cache, backend.plan(case.batch), out, lse=lse)
    assert_meaning(case, out, lse)


def test_a_cache_with_heads_first() -> None:
    """Strides say where heads and tokens are: the library reads any order."""
    case = case_of([20, 9], [3, 1])
    other = {
        name: getattr(case.cache, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("k", "v")
    }
    plain = attend(backend_of(case), case, with_lse=True)
    moved = attend(backend_of(case), replace(case, cache=replace(case.cache, **other)))
    assert torch.equal(plain[0], moved[0])


@pytest.mark.parametrize("scale", [-0.125, 0.001, -1e-5, 0.0, 0.02])
def test_scales_that_the_kernels_do_not_take(scale: float) -> None:
    case = case_of([20, 9], [3, 1], scale=scale)
    assert_meaning(case, *attend(backend_of(case), case, with_lse=True))


def test_only_such_scales_change_the_query() -> None:
    backend = backend_of(case_of([1], [1]))
    assert backend._scaling(1.0) == (1.0, 0.125)
    assert backend._scaling(0.01) == (2.0**-4, 0.125 * 0.01 * 16)


@pytest.mark.parametrize("query_lens", [[1, 1], [5, 1]])
def test_a_cache_of_8_bits(query_lens: list[int]) -> None:
    batch = make_batch([20, 9], query_lens, BLOCK, BLOCKS)
    case = make_case(layer(), batch, BLOCK, BLOCKS)
    scales = {"k_scale": 0.25, "v_scale": 0.5}
    stored = {
        name: (getattr(case.cache, name) / scales[f"{name}_scale"]).to(torch.float8_e4m3fn)
        for name in ("k", "v")
    }
    cache_spec = replace(case.cache_spec, dtype=torch.float8_e4m3fn)
    meant = {name: tensor.float() * scales[f"{name}_scale"] for name, tensor in stored.items()}
    plain = replace(case, cache=replace(case.cache, **meant))
    coded = replace(case, cache=replace(case.cache, **stored, **scales), cache_spec=cache_spec)
    assert_meaning(plain, *attend(backend_of(coded), coded, with_lse=True))


SHAPES = [(28, 4, 128), (14, 2, 64), (32, 8, 128), (8, 1, 256), (12, 12, 64), (40, 1, 128)]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_workspaces_are_as_large_as_the_library_wants(
    heads: tuple[int, int, int], window: int | None
) -> None:
    """On a device of 132 processors, by the library's own arithmetic."""
    generator = np.random.default_rng(0)
    geometry = Geometry(*heads, processors=132)
    spec = AttentionSpec(heads[0], heads[1], heads[2], heads[2], 0.1, torch.bfloat16)
    for num_seqs in (1, 2, 7, 33, 64, 257, 512):
        seq_lens = generator.integers(1, 5000, num_seqs)
        chunks = np.minimum(seq_lens, generator.integers(1, 700, num_seqs))
        for query_lens in (np.ones_like(seq_lens), chunks, seq_lens):
            arrays = arrays_of(seq_lens, query_lens)
            decodes = bool((query_lens == 1).all())
            info = prefill_plan(
                arrays.query_start_loc.tolist(),
                arrays.page_start_loc.tolist(),
                arrays.num_rows,
                (spec.num_heads, spec.num_kv_heads),
                spec.head_size,
                BLOCK,
                decodes,
                -1 if window is None else window - 1,
                False,
                132,
            )
            if decodes:
                assert info.float_bytes <= geometry.captured_bytes(num_seqs)
                assert info.int_bytes <= geometry.captured_plan_bytes(num_seqs)
            else:
                assert info.float_bytes <= geometry.split_bytes(arrays)
                assert info.int_bytes <= 8 * 1024 * 1024


def arrays_of(seq_lens: Any, query_lens: Any) -> StepArrays:
    """Arrays of a batch whose blocks do not matter."""
    width = int(-(-seq_lens.max() // BLOCK))
    batch = AttentionBatch.from_host(
        torch.tensor([0, *query_lens.cumsum()], dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.zeros(len(seq_lens), width, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
    )
    return StepArrays.of(batch, BLOCK)


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 1]], ids=["decode", "mixed"])
def test_each_wrapper_knows_where_the_library_keeps_its_plan(query_lens: list[int]) -> None:
    case = case_of([20, 9], query_lens)
    plan = backend_of(case).plan(case.batch)
    assert plan.held is not None
    assert plan.held.pinned is plan.held.wrapper._pin_memory_int_workspace_buffer


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 1]], ids=["decode", "mixed"])
def test_a_library_without_that_place_is_refused(
    query_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        flashinfer_double._Wrapper, "_pin_memory_int_workspace_buffer", Unset(), raising=False
    )
    case = case_of([20, 9], query_lens)
    with pytest.raises(RuntimeError, match=r"flashinfer 0\.6\.13 has no _pin_memory_int_workspace"):
        backend_of(case).plan(case.batch)


class Unset:
    """An attribute that is not there, whatever is stored in it."""

    def __get__(self, owner: object, kind: object) -> None:
        raise AttributeError

    def __set__(self, owner: object, value: object) -> None:
        owner.__dict__["kept"] = value
