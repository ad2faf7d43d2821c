"""The calls that flex plans: tiles list the blocks that their rows see, and lengths stay dynamic.

These hold for the compiled kernel, which needs a GPU, but are checked on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import CPU, Case, bounds, cases, make_batch, make_case, visible_keys
from torch._dynamo.testing import CompileCounterWithBackend

from jackfield.backends._flex_calls import CallStyle, FlexCall, Geometry, PagedMask, build_calls
from jackfield.backends._flex_kernel import FlexKernel, compiled, tile_options
from jackfield.conformance.attention.oracle import attention_oracle
from jackfield.core.attention import AttentionSpec

few = settings(max_examples=100, deadline=None)


def calls_of(case: Case, style: CallStyle) -> tuple[FlexCall, ...]:
    spec, cache = case.spec, case.cache_spec
    geometry = Geometry(
        spec.causal, spec.sliding_window, spec.num_heads, cache.block_size, cache.num_blocks
    )
    return build_calls(case.batch, geometry, style, CPU)


def seen_slots(call: FlexCall, mask: PagedMask, row: int, block_size: int) -> list[int]:
    """Cache slots that a row of a call sees: what the mask lets through of its tile's blocks."""
    tile, found = row // mask.tile_rows, []
    listed = mask.kv_indices[0, 0, tile, : int(mask.kv_num_blocks[0, 0, tile])].tolist()
    assert len(set(listed)) == len(listed)
    for block in listed:
        logical = int(mask.logical_of[block])
        if int(mask.block_table[mask.piece[row], logical]) != block:
            continue
        for offset in range(block_size):
            place = logical * block_size + offset
            if int(mask.first_key[row]) <= place < int(mask.end_key[row]):
                slot = block * block_size + offset
                found.append(slot if call.slots is None else int(call.slots[slot]))
    return found


@few
@given(
    cases(),
    st.sampled_from([(False, ()), (False, (4, 64)), (True, (4, 64)), (True, (1,))]),
    st.sampled_from([None, 1, 600]),
)
def test_every_row_sees_its_keys_in_order_and_no_others(
    case: Case, places: tuple[bool, tuple[int, ...]], max_scores: int | None
) -> None:
    block_size, batch = case.cache_spec.block_size, case.batch
    found: list[list[int]] = []
    for call in calls_of(case, CallStyle(*places, max_scores)):
        assert call.rows.start == len(found)
        count = call.rows.stop - call.rows.start
        if call.mask is None:
            found += [[] for _ in range(count)]
            continue
        rows = range(count) if call.result_rows is None else call.result_rows.tolist()
        if call.query_rows is not None:
            packed = call.query_rows[call.result_rows].tolist()
            assert packed == list(range(call.rows.start, call.rows.stop))
        found += [seen_slots(call, call.mask, row, block_size) for row in rows]
    starts = batch.query_start_loc_cpu.tolist()
    expected = []
    for index, length in enumerate(batch.seq_lens_cpu.tolist()):
        table = batch.block_table_cpu[index].tolist()
        for row in range(starts[index], starts[index + 1]):
            keys = visible_keys(case.spec, length, length - starts[index + 1] + row)
            expected.append(
                [table[key // block_size] * block_size + key % block_size for key in keys]
            )
    assert found == expected


def test_rows_and_scores_of_a_call_are_bounded() -> None:
    spec = AttentionSpec(4, 1, 16, 16, 0.25, torch.float32)
    case = make_case(spec, make_batch([40, 5, 3, 200], [40, 5, 1, 1], 4, 70), 4, 70)
    spans = [
        (call.rows.start, call.rows.stop)
        for call in calls_of(case, CallStyle(False, (), max_score_elements=1700))
    ]
    assert spans == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 46), (46, 47)]


def test_decoding_beside_a_long_prompt_does_not_take_large_tiles() -> None:
    spec = AttentionSpec(4, 1, 16, 16, 0.25, torch.float32)
    lengths = [33] * 30
    for query_lens, tile_rows in (([1] * 30, 16), ([33] * 30, 64), ([33, *[1] * 29], 16)):
        case = make_case(spec, make_batch(lengths, query_lens, 16, 90), 16, 90)
        (call,) = calls_of(case, CallStyle(True, (16, 64), None))
        assert call.mask is not None
        assert call.mask.tile_rows == tile_rows


def test_a_block_at_two_places_is_copied_even_if_others_are_read_in_place() -> None:
    spec = AttentionSpec(4, 1, 16, 16, 0.25, torch.float32)
    case = make_case(spec, make_batch([48, 40], [1, 1], 16, 8), 16, 8)
    style = CallStyle(True, (16,), None)
    assert calls_of(case, style)[0].slots is None
    case.batch.block_table_cpu[1, 1] = case.batch.block_table_cpu[0, 0]
    assert calls_of(case, style)[0].slots is not None


FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 7, "logits_soft_cap": 5.0, "alibi_slopes": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)},
]


@pytest.fixture
def count_graphs(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Trace as for a GPU, but run what was traced without compiling it."""
    counter = CompileCounterWithBackend("eager")
    real: Callable[..., Any] = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: real(function, backend=counter, **how)
    )
    return counter


def attend_in_tiles(kernel: FlexKernel, case: Case, in_place: bool, tiles: tuple[int, ...]) -> None:
    """Run a traced kernel and compare with the oracle."""
    (call,) = calls_of(case, CallStyle(in_place, tiles, None))
    assert call.mask is not None
    assert call.query_rows is not None
    assert call.result_rows is not None
    keys, values = case.cache.k.flatten(0, 1), case.cache.v.flatten(0, 1)
    if call.slots is not None:
        keys, values = keys[call.slots], values[call.slots]
    mask = kernel.prepare(call.mask)
    out, lse = kernel.attend(case.query[call.query_rows], keys, values, mask, True)
    assert lse is not None
    expected, expected_lse = attention_oracle(case.spec, case.query, case.cache, case.batch)
    owned, (out_bound, lse_bound) = case.batch.num_tokens, bounds(case)
    for found, wanted, bound in (
        (out, expected, out_bound),
        (lse, expected_lse, lse_bound),
    ):
        torch.testing.assert_close(
            found[call.result_rows].double(), wanted[:owned], rtol=0, atol=bound
        )


@pytest.mark.parametrize("features", FEATURES, ids=["plain", "all"])
@pytest.mark.parametrize("in_place", [True, False])
def test_lengths_do_not_compile_anew(
    features: dict[str, Any], in_place: bool, count_graphs: CompileCounterWithBackend
) -> None:
    """One graph for small tiles and one for large ones, whatever the batch."""
    spec = AttentionSpec(6, 2, 32, 16, 0.2, torch.float32, **features)
    tiles = tile_options(spec, 16, spec.dtype)
    slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)
    kernel = compiled(spec, 16, slopes, torch.float32, tiles)
    for seq_lens, query_lens in (
        ([1, 15, 16, 17, 33], [1, 1, 1, 1, 1]),
        ([5], [1]),
        ([100, 30, 7], [1, 1, 1]),
        ([60], [60]),
        ([100, 160, 70], [100, 120, 1]),
        ([40, 33], [5, 7]),
    ):
        case = make_case(spec, make_batch(seq_lens, query_lens, 16, 40), 16, 40)
        attend_in_tiles(kernel, case, in_place, tuple(tiles))
    assert count_graphs.frame_count == 2


def test_many_layers_of_different_specs_in_one_process(
    count_graphs: CompileCounterWithBackend,
) -> None:
    """Torch gives up on a function that it compiled too often; each spec has one of its own."""
    for index in range(9):
        spec = AttentionSpec(2, 1, 16, 16, 0.1 + 0.1 * index, torch.float32)
        tiles = tile_options(spec, 16, spec.dtype)
        kernel = compiled(spec, 16, None, torch.float32, tiles)
        case = make_case(spec, make_batch([20, 3], [1, 3], 16, 4), 16, 4)
        attend_in_tiles(kernel, case, True, tuple(tiles))
    assert count_graphs.frame_count == 9


@pytest.mark.parametrize("head_size", [16, 72, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_tiles_fit_into_shared_memory(head_size: int, dtype: torch.dtype, block_size: int) -> None:
    spec = AttentionSpec(2, 1, head_size, head_size, 0.1, dtype)
    options = tile_options(spec, block_size, dtype)
    assert list(options) in ([16], [16, 64])
    for tile, chosen in options.items():
        assert block_size % chosen["BLOCK_N"] == 0
        rounded = 1 << (head_size - 1).bit_length()
        rows = tile + 2 * chosen["num_stages"] * chosen["BLOCK_N"]
        assert rows * rounded * dtype.itemsize <= 96 * 1024
