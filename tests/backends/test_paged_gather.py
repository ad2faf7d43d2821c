"""How a batch is cut into groups and tiles: complete, bounded and without much padding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import CPU, make_batch

from jackfield.backends._paged_gather import Geometry, KeyGroup, Limits, Tile, build_groups

NUM_HEADS, ELEMENTS = 6, 128
UNBOUNDED = Limits(score_elements=1 << 60, gathered_elements=1 << 60, call_cost=0)


def geometry(causal: bool = True, window: int | None = None) -> Geometry:
    return Geometry(causal, window, 4, NUM_HEADS, NUM_HEADS, ELEMENTS)


def groups_of(
    seq_lens: list[int], query_lens: list[int], shape: Geometry, limits: Limits
) -> tuple[KeyGroup, ...]:
    batch = make_batch(seq_lens, query_lens, 4, sum(-(-length // 4) for length in seq_lens) + 1)
    groups, blind_rows = build_groups(batch, shape, limits, torch.float32, CPU)
    assert blind_rows is None
    return groups


def rows_of(tile: Tile) -> list[int]:
    if isinstance(tile.rows, slice):
        return list(range(tile.rows.start, tile.rows.stop))
    return tile.rows.tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), max_size=8),
    st.booleans(),
    st.none() | st.integers(1, 40),
    st.integers(1, 5000),
    st.integers(1, 20000),
    st.integers(0, 20000),
)
def test_every_row_is_in_one_tile_within_the_limits(
    lengths: list[tuple[int, int]],
    causal: bool,
    window: int | None,
    scores: int,
    gathered: int,
    call_cost: int,
) -> None:
    seq_lens = [max(pair) for pair in lengths]
    query_lens = [min(pair) for pair in lengths]
    limits = Limits(scores, gathered, call_cost)
    groups = groups_of(seq_lens, query_lens, geometry(causal, window), limits)
    covered = [row for group in groups for tile in group.tiles for row in rows_of(tile)]
    assert sorted(covered) == list(range(sum(query_lens)))
    assert sum(group.num_seqs for group in groups) == len(lengths)
    for group in groups:
        assert len(group.slots) == group.num_seqs * group.num_keys
        assert group.num_seqs == 1 or len(group.slots) * ELEMENTS <= gathered
        for tile in group.tiles:
            assert 0 <= tile.first_key < tile.end_key <= group.num_keys
            width = tile.end_key - tile.first_key
            size = group.num_seqs * tile.num_rows * width * NUM_HEADS
            assert (group.num_seqs == 1 and tile.num_rows == 1) or size <= scores
            if window is not None and causal:
                assert width <= tile.num_rows + window - 1


def test_a_sequence_is_gathered_once_for_all_its_tiles() -> None:
    limits = Limits(score_elements=NUM_HEADS * 80 * 10, gathered_elements=1, call_cost=0)
    (group,) = groups_of([80], [60], geometry(), limits)
    assert len(group.slots) == 80
    assert len(group.tiles) > 4
    assert [tile.end_key for tile in group.tiles] == [
        20 + last for last in (10, 20, 30, 40, 50, 60)
    ]


def test_a_window_gathers_what_some_row_sees_and_no_more() -> None:
    (group,) = groups_of([80, 90], [1, 1], geometry(window=16), UNBOUNDED)
    assert group.num_keys == 16
    (group,) = groups_of([80], [5], geometry(window=16), UNBOUNDED)
    assert group.num_keys == 20


def test_long_and_short_sequences_are_gathered_apart_where_that_is_cheaper() -> None:
    seq_lens = [500, 16, 490, 15, 16, 510]
    cheap_call = Limits(1 << 60, 1 << 60, call_cost=ELEMENTS * 100)
    groups = groups_of(seq_lens, [1] * 6, geometry(), cheap_call)
    assert sorted(group.num_keys for group in groups) == [16, 510]
    padded = sum(len(group.slots) for group in groups)
    assert padded <= 1.25 * sum(seq_lens)
    dear_call = Limits(1 << 60, 1 << 60, call_cost=ELEMENTS * 10_000)
    assert len(groups_of(seq_lens, [1] * 6, geometry(), dear_call)) == 1


def test_padding_repeats_a_visible_key() -> None:
    batch = make_batch([3, 6], [1, 1], 4, 4)
    limits = Limits(1 << 60, 1 << 60, call_cost=ELEMENTS * 100)
    (group,) = build_groups(batch, geometry(), limits, torch.float32, CPU)[0]
    short = int(batch.block_table_cpu[0, 0]) * 4
    assert group.slots.view(2, 6)[0].tolist() == [short] * 4 + [short + 1, short + 2]
    mask = group.tiles[0].mask
    assert mask is not None
    assert (mask[:, 0, 0] == 0).sum(dim=1).tolist() == [3, 6]


def test_equal_prompts_are_computed_together_and_decoding_rows_in_place() -> None:
    prompts = groups_of([40] * 3, [40] * 3, geometry(), UNBOUNDED)
    assert [group.num_seqs for group in prompts] == [3]
    decoding = groups_of([5, 9, 7], [1, 1, 1], geometry(), Limits(1 << 60, 1 << 60, 1 << 20))
    assert [tile.rows for group in decoding for tile in group.tiles] == [slice(0, 3)]
