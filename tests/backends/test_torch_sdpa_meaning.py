"""torch_sdpa computes what the contract says, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_asserts import (
    assert_meaning,
    assert_same_values,
    assert_write_kv,
    same_bytes,
)
from support.attention_cases import (
    CPU,
    UNTOUCHED,
    Case,
    attend,
    cases,
    make_batch,
    make_case,
    visible_slots,
)
from torch import Tensor

from jackfield.backends._kv_store import store_on_host, store_without_sync
from jackfield.backends.torch_sdpa import TorchSdpaBackend, TorchSdpaOptions
from jackfield.core.attention import AttentionSpec, KVCache

few = settings(max_examples=50, deadline=None)


def backend_of(case: Case, **options: int) -> TorchSdpaBackend:
    return TorchSdpaBackend(case.spec, case.cache_spec, CPU, TorchSdpaOptions(**options))


@few
@given(cases(), st.booleans())
def test_equals_the_oracle(case: Case, with_lse: bool) -> None:
    out, lse = attend(backend_of(case), case, with_lse=with_lse)
    assert_meaning(case, out, lse if with_lse else None)


@few
@given(cases(), st.integers(1, 2000), st.integers(1, 4000), st.booleans())
def test_equals_the_oracle_in_small_pieces(
    case: Case, scores: int, gathered: int, with_lse: bool
) -> None:
    backend = backend_of(case, max_score_elements=scores, max_gathered_elements=gathered)
    out, lse = attend(backend, case, with_lse=with_lse)
    assert_meaning(case, out, lse if with_lse else None)


@few
@given(cases(), st.sampled_from([float("nan"), float("inf"), float("-inf"), 6e4]), st.booleans())
def test_slots_of_no_visible_key_do_not_matter(case: Case, poison: float, with_lse: bool) -> None:
    hidden = ~visible_slots(case)
    poisoned = KVCache(k=case.cache.k.clone(), v=case.cache.v.clone())
    poisoned.k[hidden], poisoned.v[hidden] = poison, poison
    backend = backend_of(case)
    assert_same_values(
        attend(backend, case, with_lse=with_lse),
        attend(backend, replace(case, cache=poisoned), with_lse=with_lse),
    )


@few
@given(cases(), st.integers(0, 99), st.sampled_from([-7, 2**31 - 1]), st.booleans())
def test_physical_places_and_stale_table_tails_do_not_matter(
    case: Case, seed: int, garbage: int, with_lse: bool
) -> None:
    num_blocks = case.cache_spec.num_blocks
    new_place = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    table = case.batch.block_table_cpu
    first_token = torch.arange(table.shape[1]) * case.cache_spec.block_size
    stale = first_token >= case.batch.seq_lens_cpu[:, None]
    moved = torch.where(stale, garbage, new_place[table.long().clamp(0, num_blocks - 1)]).int()
    elsewhere = replace(
        case,
        batch=replace(case.batch, block_table=moved, block_table_cpu=moved),
        cache=KVCache(
            k=case.cache.k[new_place.argsort()],
            v=case.cache.v[new_place.argsort()],
        ),
    )
    backend = backend_of(case)
    assert_same_values(
        attend(backend, case, with_lse=with_lse), attend(backend, elsewhere, with_lse=with_lse)
    )


@few
@given(cases(), st.booleans())
def test_forward_repeats_itself_and_leaves_its_inputs_alone(case: Case, with_lse: bool) -> None:
    backend = backend_of(case)
    inputs = (case.cache.k, case.cache.v, case.query)
    before = [tensor.clone() for tensor in inputs]
    first = attend(backend, case, with_lse=with_lse)
    assert all(same_bytes(old, new) for old, new in zip(before, inputs, strict=True))
    assert_same_values(first, attend(backend, case, with_lse=with_lse))
    assert_same_values(first, attend(backend_of(case), case, with_lse=with_lse))


@few
@given(cases(), st.booleans())
def test_strided_and_packed_inputs_give_the_same_bits(case: Case, with_lse: bool) -> None:
    backend = backend_of(case)
    packed = replace(case, query=case.query.contiguous())
    assert_same_values(
        attend(backend, case, with_lse=with_lse), attend(backend, packed, with_lse=with_lse)
    )


Pair = tuple[Tensor, Tensor]
Store = Callable[[Pair, Tensor, Pair], None]


@few
@given(cases(), st.data())
def test_write_kv_changes_the_named_slots_and_no_other_byte(
    case: Case, data: st.DataObject
) -> None:
    skipped = data.draw(st.lists(st.booleans(), min_size=len(case.key), max_size=len(case.key)))
    assert_write_kv(backend_of(case), case, skipped)


@pytest.mark.parametrize("store", [store_on_host, store_without_sync])
@pytest.mark.parametrize("slots", [[3, -1, 0, -1, 9], [-1, -1, 5], [-1, -1], [2], [-1]])
def test_both_ways_to_store_skip_the_same_slots(store: Store, slots: list[int]) -> None:
    caches = torch.randn(10, 2, 8), torch.randn(10, 2, 4)
    caches[0][0] = float("nan")
    new = torch.randn(len(slots), 2, 8), torch.randn(len(slots), 2, 4)
    expected = caches[0].clone(), caches[1].clone()
    for index, slot in enumerate(slots):
        if slot != -1:
            expected[0][slot], expected[1][slot] = new[0][index], new[1][index]
    store(caches, torch.tensor(slots), new)
    assert same_bytes(caches[0], expected[0])
    assert same_bytes(caches[1], expected[1])


def test_a_plan_serves_many_layers_and_outlives_the_next_plan() -> None:
    spec = AttentionSpec(6, 2, 32, 32, 0.2, torch.float32)
    small = make_case(spec, make_batch([5, 20], [1, 3], 4, 20), 4, 20, seed=1)
    large = make_case(spec, make_batch([40, 33], [40, 1], 4, 20), 4, 20, seed=2)
    backend = backend_of(small)
    plans = backend.plan(small.batch), backend.plan(large.batch)
    for _ in range(2):
        for case, plan in zip((small, large), plans, strict=True):
            out = torch.full((len(case.query), 6, 32), UNTOUCHED)
            backend.forward(case.query, case.cache, plan, out)
            assert_meaning(case, out, None)


def test_what_inference_mode_makes_works_outside_of_it() -> None:
    spec = AttentionSpec(3, 1, 16, 16, 0.25, torch.float32)
    case = make_case(spec, make_batch([9, 20], [1, 1], 4, 8), 4, 8)
    backend = backend_of(case)
    outs = torch.zeros(2, len(case.query), 3, 16)
    with torch.inference_mode():
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, outs[0])
    backend.forward(case.query, case.cache, plan, outs[1])
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("with_lse", [True, False])
def test_rows_without_a_visible_key_are_zero(causal: bool, with_lse: bool) -> None:
    """Two rows of a sequence of no tokens at all, in a batch with a usual one."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32, causal=causal)
    case = make_case(spec, make_batch([0, 5], [0, 2], 4, 8), 4, 8)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    case = replace(
        case,
        batch=replace(case.batch, query_start_loc=starts, query_start_loc_cpu=starts),
    )
    out, lse = attend(backend_of(case), case, with_lse=with_lse)
    assert bool((out[:2] == 0).all())
    assert_meaning(case, out, lse if with_lse else None)
    if with_lse:
        assert bool((lse[:2] == -torch.inf).all())


@pytest.mark.parametrize("features", [{}, {"sliding_window": 300}, {"causal": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_prompts_in_tiles(features: dict[str, Any], dtype: torch.dtype) -> None:
    """Rows past the first tile, where queries are not folded, beside a decoding sequence."""
    spec = AttentionSpec(3, 1, 64, 64, 0.125, dtype, **features)
    case = make_case(spec, make_batch([330, 47, 290], [300, 1, 290], 16, 50), 16, 50)
    out, _ = attend(backend_of(case), case)
    assert_meaning(case, out, None)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sliding_window": 7},
        {"sliding_window": 7, "alibi_slopes": (0.1, 0.2, 0.3, 0.4)},
        {"sliding_window": 7, "logits_soft_cap": 3.0, "sinks": True},
        {"causal": False, "sliding_window": 7, "alibi_slopes": (0.1, 0.2, 0.3, 0.4), "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("scores", [1, 150, 700])
def test_explicit_attention_in_runs_of_rows(features: dict[str, Any], scores: int) -> None:
    """Runs of rows in the middle of a prompt, whose first key is not the sequence's."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32, **features)
    case = make_case(spec, make_batch([24, 30], [24, 11], 4, 20), 4, 20)
    out, lse = attend(backend_of(case, max_score_elements=scores), case, with_lse=True)
    assert_meaning(case, out, lse)
