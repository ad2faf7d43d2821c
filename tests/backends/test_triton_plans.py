"""Plans of the triton backend: updated in place, reused by layers, split by lengths alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case
from support.triton_cases import (
    DEVICE,
    attend,
    backend_of,
    empty_results,
    interpreted,
    layer,
    placed,
    small_tiles,
)

from jackfield.backends.triton_paged.layer import group_reciprocal
from jackfield.backends.triton_paged.planning import Geometry, Int32, WorkLists, build_work
from jackfield.core.attention import AttentionPlan

__all__ = ["interpreted"]


def decode_case(seq_lens: list[int], seed: int = 0, columns: int = 8) -> Case:
    """Decoding sequences with a block table of so many columns."""
    needed = -(-max(seq_lens) // 8)
    batch = make_batch(
        seq_lens, [1] * len(seq_lens), 8, 40, seed=seed, extra_columns=columns - needed
    )
    return placed(make_case(layer(), batch, 8, 40, seed=seed))


def test_a_plan_that_is_updated_in_place_gives_the_same_bits() -> None:
    """Also with shorter and longer sequences than the first, and ones without tokens."""
    first = decode_case([1, 64, 20, 1])
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    kept = plan.buffer.data_ptr()
    for seed, lengths in enumerate(([64, 64, 64, 64], [1, 1, 1, 1], [0, 33, 0, 17]), 1):
        case = decode_case(lengths, seed)
        assert backend.plan(case.batch, into=plan) is plan
        assert plan.buffer.data_ptr() == kept
        out, lse = empty_results(case)
        backend.forward(case.query, case.cache, plan, out, lse=lse)
        expected, expected_lse = attend(backend, case)
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(lse.cpu(), expected_lse)


def test_a_narrower_table_fits_and_a_wider_one_does_not() -> None:
    first, narrow, wide = (decode_case([9, 30], columns=columns) for columns in (6, 4, 7))
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    backend.plan(narrow.batch, into=plan)
    out, lse = empty_results(narrow)
    backend.forward(narrow.query, narrow.cache, plan, out, lse=lse)
    assert torch.equal(out.cpu(), attend(backend, narrow)[0])
    with pytest.raises(ValueError, match="up to 6 columns, not for 7"):
        backend.plan(wide.batch, into=plan)


def test_other_query_lengths_do_not_fit() -> None:
    case = decode_case([9, 30])
    backend = backend_of(case)
    plan = backend.plan(case.batch)
    other = make_batch([9, 30], [2, 1], 8, 40)
    with pytest.raises(ValueError, match=r"query_start_loc=\[0, 1, 2\], not for \[0, 2, 3\]"):
        backend.plan(other, into=plan)
    with pytest.raises(TypeError, match="cannot use a plan of type AttentionPlan"):
        backend.plan(case.batch, into=AttentionPlan())


def test_a_mixed_batch_is_updated_in_place_too() -> None:
    cases = [
        placed(make_case(layer(), make_batch(lengths, [1, 13, 2], 8, 40, seed=seed), 8, 40))
        for seed, lengths in enumerate(([40, 45, 33], [9, 13, 40]))
    ]
    backend = backend_of(cases[0])
    plan = backend.plan(cases[0].batch)
    backend.plan(cases[1].batch, into=plan)
    out, lse = empty_results(cases[1])
    backend.forward(cases[1].query, cases[1].cache, plan, out, lse=lse)
    assert torch.equal(out.cpu(), attend(backend, cases[1])[0])


def test_a_plan_serves_many_layers_and_outlives_the_next_plan() -> None:
    small = placed(make_case(layer(), make_batch([5, 20], [1, 3], 8, 40), 8, 40, seed=1))
    large = placed(make_case(layer(), make_batch([60, 33], [40, 1], 8, 40), 8, 40, seed=2))
    backend = backend_of(small)
    expected = attend(backend, small)[0], attend(backend, large)[0]
    plans = backend.plan(small.batch), backend.plan(large.batch)
    for _ in range(2):
        for case, plan, wanted in zip((small, large), plans, expected, strict=True):
            out, _ = empty_results(case)
            backend.forward(case.query, case.cache, plan, out)
            assert torch.equal(out.cpu(), wanted)


def test_what_inference_mode_makes_works_outside_of_it() -> None:
    case = decode_case([9, 30])
    backend = backend_of(case)
    out, _ = empty_results(case)
    with torch.inference_mode():
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, out)
    backend.plan(case.batch, into=plan)
    again, _ = empty_results(case)
    backend.forward(case.query, case.cache, plan, again)
    assert torch.equal(out, again)


@pytest.mark.parametrize("features", [{"sliding_window": 200}, {"sinks": True}], ids=str)
def test_how_work_is_spread_over_programs_changes_no_bit(features: dict[str, Any]) -> None:
    """Single chunks, groups of them, and several groups of one program."""
    batch = make_batch([130, 5, 256], [1, 1, 2], 8, 60)
    case = placed(make_case(layer(**features), batch, 8, 60))
    results = []
    seen = []
    for resident, rounds in ((200, 1), (2, 64), (2, 1), (14, 1)):
        backend = backend_of(case, small_tiles(resident, rounds))
        plan = backend.plan(case.batch)
        seen.append((plan.num_programs, plan.num_decode_items))
        results.append(attend(backend, case))
    assert seen[0][0] == seen[0][1] > seen[1][1] == seen[1][0] > seen[2][0] == 1
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_programs_without_work_write_nothing() -> None:
    """As in a captured graph, which starts as many programs as the largest batch needs."""
    case = decode_case([64, 3, 20])
    backend = backend_of(case, small_tiles(200))
    expected, _ = attend(backend, case)
    plan = backend.plan(case.batch)
    assert plan.num_programs < plan.most_programs
    plan.num_programs = plan.most_programs
    out, _ = empty_results(case)
    backend.forward(case.query, case.cache, plan, out)
    assert torch.equal(out.cpu(), expected)


lengths = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), max_size=8)


@given(
    lengths,
    st.none() | st.integers(1, 200),
    st.sampled_from([1, 3, 7]),
    st.integers(16, 64),
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 3),
)
def test_work_covers_every_row_and_every_visible_key_once(
    pairs: list[tuple[int, int]],
    window: int | None,
    group_size: int,
    chunk_keys: int,
    max_chunks: int,
    group_chunks: int,
    resident: int,
    rounds: int,
) -> None:
    seq_lens = [max(pair) for pair in pairs]
    query_lens = [min(pair) for pair in pairs]
    batch = make_batch(seq_lens, query_lens, 16, 400)
    geometry = Geometry(
        causal=True,
        sliding_window=window,
        block_size=16,
        group_size=group_size,
        prefill_rows=32,
        prefill_keys=16,
        decode_rows=16,
        decode_keys=16,
        chunk_keys=chunk_keys,
        max_chunks=max_chunks,
        group_chunks=group_chunks,
        resident=resident,
        programs=resident * rounds,
    )
    work = build_work(batch, geometry)
    starts = batch.query_start_loc_cpu.tolist()
    covered = dict.fromkeys(range(batch.num_tokens), 0)
    for first_row, query_len, seq_len, _, token, head, first_tile, _ in work.prefill.tolist():
        index = starts.index(first_row)
        assert (query_len, seq_len) == (query_lens[index], seq_lens[index])
        assert head < group_size
        first_packed = token * group_size + head
        assert first_packed % 32 == 0
        first_key = 0 if window is None else max(0, seq_len - query_len + token - window + 1)
        assert first_tile == first_key // 16
        for packed in range(first_packed, min(first_packed + 32, query_len * group_size)):
            covered[first_row + packed // group_size] += 1
    items = items_by_program(work)
    for index, (start, query_len, seq_len) in enumerate(
        zip(starts[:-1], query_lens, seq_lens, strict=True)
    ):
        own = items[items[:, 0] == start]
        if query_len * group_size > 16:
            assert not len(own)
            continue
        own = own[np.argsort(own[:, 4])]
        first_visible = 0 if window is None else max(0, seq_len - query_len - window + 1)
        assert own[0, 4] == first_visible // 16
        assert own[-1, 5] == seq_len
        assert (own[1:, 4] * 16 == own[:-1, 5]).all()
        assert (own[:, 4] * 16 < own[:, 5]).all()
        assert (own[:, 3] == index * batch.block_table_cpu.shape[1]).all()
        assert len(set(own[:, 8])) == 1
        assert -(-(seq_len // 16 - own[0, 4]) // own[0, 8]) <= max_chunks
        assert_folded(own, group_chunks)
        for row in range(start, start + query_len):
            covered[row] += group_size
    assert set(covered.values()) <= {group_size}


def items_by_program(work: WorkLists) -> Int32:
    """Every decode item that some program reaches, each once."""
    order: list[int] = []
    for program in range(work.programs):
        place = program
        while place or program == 0:
            order.append(place)
            place = int(work.decode[place, 7])
            if not place:
                break
    assert sorted(order) == list(range(len(work.decode)))
    return work.decode[order]


def assert_folded(own: Int32, group_chunks: int) -> None:
    """Each item knows its group, and each group its sequence: they are whole items or chunks."""
    if len(own) == 1:
        assert own[0, 6] == -1
        return
    slots = own[:, 6]
    assert slots.tolist() == list(range(slots[0], slots[0] + len(own)))
    assert (own[:, 11] == slots[0]).all()
    apart = int(own[0, 13])
    assert (own[:, 13] == apart).all()
    assert apart in (1, group_chunks)
    firsts = list(range(0, len(own), apart))
    assert (own[:, 12] == len(firsts)).all()
    chunk_keys = 16 * own[0, 8]
    for first in firsts:
        members = own[first : first + apart]
        assert (members[:, 9] == members[0, 6]).all()
        assert (members[:, 10] == len(members)).all()
        keys = members[-1, 5] - members[0, 4] * 16
        assert keys <= group_chunks * chunk_keys
        assert keys == group_chunks * chunk_keys or first == firsts[-1]
        assert apart == 1 or len(members) == -(-keys // chunk_keys)


def test_division_by_the_group_size_is_exact_for_all_rows_of_a_tile() -> None:
    for group_size in range(1, 129):
        rows = np.arange(group_size - 1 + 256, dtype=np.int32)
        quotient = (rows * np.int32(group_reciprocal(group_size))) >> 16
        assert (quotient == rows // group_size).all()


def test_no_program_is_left_counted() -> None:
    """Whatever decoded last leaves the counters as it found them: 0."""
    case = decode_case([64, 3, 40])
    backend = backend_of(case, small_tiles(200))
    plan = backend.plan(case.batch)
    out, _ = empty_results(case)
    for _ in range(2):
        backend.forward(case.query, case.cache, plan, out)
        assert plan.num_decode_items > 3
        assert not plan.arrivals.any()


def test_padding_rows_are_not_written() -> None:
    case = decode_case([9, 30])
    out, lse = attend(backend_of(case), case)
    assert bool((out[2:] == UNTOUCHED).all())
    assert bool((lse[2:] == UNTOUCHED).all())
    assert len(out) > 2
    assert replace(case).query.device.type == DEVICE.type
