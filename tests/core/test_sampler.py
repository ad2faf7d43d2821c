"""The sampler: exact greedy, the filters against a plain reference, independence of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda import no_synchronisation
from torch import Tensor

from jackfield.core import sampler
from jackfield.core.random_stream import child_seed, derive_seed, uniforms
from jackfield.core.sampler import SamplingBatch, sample


@dataclass(frozen=True)
class Row:
    """The settings of one row; the defaults filter nothing."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


GREEDY = Row(temperature=0.0)


def batch_of(rows: list[Row], device: str = "cpu") -> SamplingBatch:
    return SamplingBatch.from_host(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int64),
        top_p=np.array([row.top_p for row in rows], np.float64),
        min_p=np.array([row.min_p for row in rows], np.float64),
        seeds=np.array([row.seed for row in rows], np.uint64),
        positions=np.array([row.position for row in rows], np.int64),
        device=device,
    )


def draws(logits: Tensor, row: Row, count: int) -> list[int]:
    """The tokens at positions 0 to count-1 of the row's stream, all from the same logits."""
    rows = [replace(row, position=position) for position in range(count)]
    return sample(logits.expand(count, -1), batch_of(rows)).tolist()


def reference_distribution(logits: Tensor, row: Row) -> np.ndarray:
    """Probabilities after all filters, in float64, by sorting and looping."""
    values = logits.double().numpy()
    scaled = (values - values.max()) / float(np.float32(row.temperature))
    weights = np.exp(scaled)
    order = sorted(range(len(values)), key=lambda token: (-scaled[token], token))
    if 0 < row.top_k < len(order):
        order = order[: row.top_k]
    if row.top_p < 1:
        total, reached, kept = math.fsum(weights[order]), 0.0, []
        for token in order:
            if reached >= row.top_p * total:
                break
            kept.append(token)
            reached += weights[token]
        order = kept
    order = [token for token in order if weights[token] >= row.min_p]
    probabilities = np.zeros(len(values))
    probabilities[order] = weights[order] / weights[order].sum()
    return probabilities


def reference_token(logits: Tensor, row: Row) -> int:
    """The draw by inversion over token ids; exact unless it falls on a border."""
    uniform = uniforms(np.array([row.seed], np.uint64), np.array([row.position]))[0]
    cumulative = np.cumsum(reference_distribution(logits, row))
    return int(np.searchsorted(cumulative, uniform, side="right"))


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


row_strategy = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 10, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.1, 1e-4]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
)


class TestRandomStream:
    def test_follows_the_published_generator(self) -> None:
        # SplitMix64 from state 0 begins with these numbers; mixing the seed 0 gives the state 0.
        published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        got = uniforms(np.zeros(3, np.uint64), np.arange(3))
        assert got.tolist() == [(number >> 11) * 2.0**-53 for number in published]

    def test_a_number_depends_on_its_own_seed_and_position_only(self) -> None:
        seeds = np.array([7, 2**64 - 1, 0, 7], np.uint64)
        positions = np.array([5, 0, 2**50, 6])
        together = uniforms(seeds, positions)
        alone = [
            uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in reversed(range(len(seeds)))
        ]
        assert together.tolist() == alone[::-1]

    @pytest.mark.parametrize("vary", ["seed", "position"])
    def test_is_uniform(self, vary: str) -> None:
        counting, fixed = np.arange(200_000), np.full(200_000, 3)
        seeds, positions = (counting, fixed) if vary == "seed" else (fixed, counting)
        numbers = uniforms(seeds.astype(np.uint64), positions)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((observed - 2000) ** 2 / 2000).sum() < 148.2  # chi-square, 99 degrees, p = 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01

    def test_streams_do_not_overlap(self) -> None:
        seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
        assert len(np.unique(uniforms(seeds.ravel(), positions.ravel()))) == 200 * 200

    def test_child_seeds_are_distinct_and_reproducible(self) -> None:
        seeds = [child_seed(seed, index) for seed in range(-20, 20) for index in range(20)]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**64 for seed in seeds)
        assert child_seed(42, 0) != 42
        assert child_seed(-1, 3) == child_seed(2**64 - 1, 3)

    def test_derived_seeds_are_distinct(self) -> None:
        seeds = {derive_seed(e, a, i) for e in range(8) for a in range(30) for i in range(8)}
        assert len(seeds) == 8 * 30 * 8
        assert all(0 <= seed < 2**64 for seed in seeds)


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_is_the_first_largest_logit(self, dtype: torch.dtype) -> None:
        logits = random_logits(9, 300).to(dtype)
        logits[3, [20, 10, 299]] = 50.0
        tokens = sample(logits, batch_of([GREEDY] * 9))
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == [int(np.argmax(row)) for row in logits.float().numpy()]
        assert tokens[3] == 10

    def test_is_exact_beside_random_rows(self) -> None:
        logits = random_logits(6, 300, scale=0.01)
        rows = [GREEDY, Row(top_k=5), GREEDY, Row(top_p=0.5), Row(top_k=1), Row(min_p=0.1)]
        tokens = sample(logits, batch_of(rows))
        greedy = logits.argmax(-1)
        assert tokens[[0, 2, 4]].tolist() == greedy[[0, 2, 4]].tolist()

    def test_copies_nothing_to_the_device(self) -> None:
        batch = batch_of([GREEDY, Row(top_k=1, top_p=0.3, min_p=0.2)])
        assert batch.all_greedy
        assert batch.packed.numel() == 0
        assert not any((batch.any_top_k, batch.any_top_p, batch.any_min_p))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize(
        "row",
        [
            Row(temperature=1e-4),
            Row(temperature=1e-5),
            Row(temperature=1e-6),
            Row(temperature=1e-10),
            Row(temperature=1e-4, top_k=50, top_p=0.9, min_p=0.1),
            Row(top_p=1e-4),
            Row(top_k=1),
            Row(min_p=1.0),
        ],
        ids=str,
    )
    def test_what_comes_close_to_greedy_is_greedy(self, row: Row, dtype: torch.dtype) -> None:
        # Logits of up to +-60 divided by 1e-4 or less overflow float16.
        generator = torch.Generator().manual_seed(1)
        values = torch.linspace(-60, 60, 481)
        logits = torch.stack([values[torch.randperm(481, generator=generator)] for _ in range(4)])
        logits = logits.to(dtype)
        rows = [replace(row, seed=seed) for seed in range(4)]
        assert sample(logits, batch_of(rows)).tolist() == logits.argmax(-1).tolist()

    def test_vanishing_top_p_among_equal_logits_takes_the_greedy_token(self) -> None:
        logits = torch.full((1, 64), -1.0)
        logits[0, [40, 7, 63]] = 2.0
        assert set(draws(logits, Row(top_p=1e-9), 50)) == {7}
        assert set(draws(logits, Row(top_p=0.0), 50)) == {7}


class TestDistribution:
    @pytest.mark.parametrize(
        "row",
        [
            Row(),
            Row(temperature=0.5),
            Row(temperature=3.0),
            Row(top_k=4),
            Row(top_p=0.8),
            Row(min_p=0.3),
            Row(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
        ],
        ids=str,
    )
    def test_draws_follow_the_probabilities(self, row: Row) -> None:
        logits = random_logits(1, 12, seed=5, scale=1.0)
        count = 20_000
        observed = np.bincount(draws(logits, replace(row, seed=11), count), minlength=12)
        expected = reference_distribution(logits[0], row) * count
        possible = expected > 0
        assert observed[~possible].sum() == 0
        statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
        # The 0.999 quantile of chi-square with up to 11 degrees of freedom is at most 31.3.
        assert statistic < 31.3

    @given(
        logits=st.lists(
            st.one_of(st.floats(-20, 20, width=16), st.sampled_from([0.0, 1.0, -math.inf])),
            min_size=1,
            max_size=40,
        ).filter(lambda values: max(values) > -math.inf),
        row=row_strategy.filter(lambda row: row.temperature > 0),
    )
    @settings(deadline=None, max_examples=300)
    def test_only_tokens_of_the_filtered_set_are_drawn(self, logits: list[float], row: Row) -> None:
        tensor = torch.tensor([logits], dtype=torch.float32)
        # A border exactly on top_p or min_p may fall to either side: allow both sets.
        sets = [
            replace(row, top_p=row.top_p * factor, min_p=row.min_p / factor)
            for factor in (1 - 1e-6, 1.0, 1 + 1e-6)
        ]
        allowed = np.sum([reference_distribution(tensor[0], each) for each in sets], axis=0)
        assert all(allowed[token] > 0 for token in draws(tensor, row, 20))

    @given(row=row_strategy.filter(lambda row: row.temperature >= 0.3), seed=st.integers(0, 50))
    @settings(deadline=None, max_examples=200)
    def test_the_drawn_token_is_the_reference_s(self, row: Row, seed: int) -> None:
        logits = random_logits(1, 200, seed=seed)
        expected = int(logits.argmax()) if row.top_k == 1 else reference_token(logits[0], row)
        token = int(sample(logits, batch_of([row]))[0])
        assert token == expected

    def test_top_k_keeps_k_of_equal_logits(self) -> None:
        logits = torch.zeros(1, 30)
        assert set(draws(logits, Row(top_k=3), 300)) == {0, 1, 2}

    @pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.3, 3), (0.7, 7), (0.75, 8)])
    def test_top_p_keeps_the_smallest_sufficient_set(self, top_p: float, kept: int) -> None:
        logits = torch.zeros(1, 10)
        assert set(draws(logits, Row(top_p=top_p), 400)) == set(range(kept))

    def test_top_p_counts_what_top_k_left(self) -> None:
        logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
        assert set(draws(logits, Row(top_p=0.6), 200)) == {0, 1}
        assert set(draws(logits, Row(top_k=2, top_p=0.6), 200)) == {0}

    def test_min_p_is_relative_to_the_largest_after_temperature(self) -> None:
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        assert set(draws(logits, Row(min_p=0.25), 300)) == {0, 1, 2}
        assert set(draws(logits, Row(temperature=0.5, min_p=0.25), 300)) == {0, 1}
        assert set(draws(logits, Row(temperature=10.0, min_p=0.25), 300)) == {0, 1, 2, 3}

    def test_top_k_sees_differences_that_a_high_temperature_flattens(self) -> None:
        logits = torch.arange(50, dtype=torch.float32)[None]
        assert set(draws(logits, Row(temperature=1e12, top_k=2), 60)) == {48, 49}

    def test_large_vocabulary_is_sampled_without_bias(self) -> None:
        vocab_size = 151_936
        tokens = draws(torch.zeros(1, vocab_size), Row(seed=3), 40)
        uniform = uniforms(np.full(40, 3, np.uint64), np.arange(40))
        assert tokens == np.floor(uniform * vocab_size).astype(int).tolist()

    def test_many_tokens_of_tiny_probability_keep_their_share(self) -> None:
        logits = torch.zeros(1, 151_936)
        logits[0, 0] = 16.0  # all others together have 1.7 %, each of them 1e-7
        every = np.arange(2000)
        positions = every[uniforms(np.full(2000, 9, np.uint64), every) > 0.985][:20]
        rows = [Row(seed=9, position=int(position)) for position in positions]
        tokens = sample(logits.expand(len(rows), -1), batch_of(rows)).tolist()
        expected = [reference_token(logits[0], row) for row in rows[:3]]
        assert min(tokens) > 0
        assert max(abs(a - b) for a, b in zip(tokens, expected, strict=False)) <= 1

    @pytest.mark.parametrize("row", [Row(), Row(top_k=9), Row(top_p=0.9999), Row(min_p=1e-9)])
    def test_the_smallest_and_the_largest_random_number(self, row: Row) -> None:
        logits = torch.full((2, 100), -math.inf)
        logits[:, [3, 20, 41]] = torch.tensor([0.3, 0.0, 0.2])
        batch = batch_of([row, row])
        numbers = batch.packed.view(torch.float64)
        numbers[5] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
        assert batch.uniform.squeeze(1).tolist() == [0.0, 1 - 2.0**-53]
        assert sample(logits, batch).tolist() == [3, 41]

    def test_last_token_of_a_large_vocabulary_can_be_drawn_and_no_other_behind_it(self) -> None:
        logits = torch.full((1, 151_936), -math.inf)
        logits[0, -1] = -3.0
        assert set(draws(logits, Row(), 8)) == {151_935}
        logits[0, :-1] = -30.0
        assert max(draws(logits, Row(), 8)) < 151_936

    @pytest.mark.parametrize("vocab_size", [1, 7, 511, 512, 513, 1024, 1025, 50_257])
    def test_a_draw_is_that_of_one_long_cumulative_sum(self, vocab_size: int) -> None:
        """Rows of many zeros, rows with the largest total there is, the extreme random numbers."""
        random = torch.Generator().manual_seed(vocab_size)
        largest = 2**62 // vocab_size
        units = torch.randint(0, largest, (64, vocab_size), generator=random)
        units[torch.rand(64, vocab_size, generator=random) < 0.8] = 0
        units[:32, -1] = largest
        units[32:, 0] = 1
        units[::4] = largest
        assert int(units[0].sum()) > 2**62 - vocab_size
        uniform = torch.rand(64, 1, generator=random, dtype=torch.float64)
        uniform[::8], uniform[1::8] = 0.0, 1 - 2.0**-53
        cumulative = units.cumsum(dim=-1)
        total = cumulative[:, -1:]
        target = torch.minimum((uniform * total).long(), total - 1)
        expected = torch.searchsorted(cumulative, target, right=True)
        assert torch.equal(sampler._draw(units, uniform), expected)

    def test_logits_are_not_changed(self) -> None:
        logits = random_logits(3, 50)
        before = logits.clone()
        sample(logits, batch_of([Row(0.7, 5, 0.9, 0.1, seed) for seed in range(3)]))
        assert torch.equal(logits, before)


class TestIndependence:
    @given(
        rows=st.lists(row_strategy, min_size=1, max_size=8),
        vocab_size=st.sampled_from([2, 37, 400]),
        data=st.data(),
    )
    @settings(deadline=None, max_examples=100)
    def test_a_row_is_the_same_alone_and_in_any_batch(
        self, rows: list[Row], vocab_size: int, data: st.DataObject
    ) -> None:
        logits = random_logits(len(rows), vocab_size, seed=vocab_size)
        alone = [int(sample(logits[i : i + 1], batch_of([row]))[0]) for i, row in enumerate(rows)]
        order = data.draw(st.permutations(range(len(rows))), label="order")
        together = sample(logits[order], batch_of([rows[i] for i in order]))
        assert together.tolist() == [alone[i] for i in order]

    def test_random_rows_survive_filters_of_others_with_a_large_vocabulary(self) -> None:
        logits = random_logits(6, 50_257)
        plain = [Row(seed=seed) for seed in range(5)]
        alone = sample(logits[:5], batch_of(plain)).tolist()
        others = [GREEDY, Row(top_k=40), Row(top_k=40_000), Row(top_p=0.9), Row(min_p=0.1)]
        for other in others:
            assert sample(logits, batch_of([*plain, other]))[:5].tolist() == alone

    def test_every_combination_of_filters_leaves_every_other_alone(self) -> None:
        kinds = [
            Row(top_k=top_k, top_p=top_p, min_p=min_p, seed=17)
            for top_k in (-1, 2, 10, 60)
            for top_p in (1.0, 0.9, 0.3)
            for min_p in (0.0, 0.2)
        ]
        logits = random_logits(1, 64, scale=1.0)
        alone = {kind: draws(logits, kind, 24) for kind in kinds}
        for kind in kinds:
            rows = [replace(kind, position=position) for position in range(24)]
            for mate in kinds:
                tokens = sample(logits.expand(25, -1), batch_of([*rows, mate]))
                assert tokens[:24].tolist() == alone[kind]

    @pytest.mark.parametrize("mates", [[], [Row(0.8, seed=7)], [GREEDY], [Row(0.8, seed=99)]])
    def test_seeded_stream_is_its_own(self, mates: list[Row]) -> None:
        logits = random_logits(1, 512, scale=1.0)

        def stream(seed: int, first: bool) -> list[int]:
            tokens = []
            for position in range(16):
                row = Row(0.8, seed=seed, position=position)
                rows = [row, *mates] if first else [*mates, row]
                drawn = sample(logits.expand(len(rows), -1), batch_of(rows))
                tokens.append(int(drawn[0 if first else -1]))
            return tokens

        alone = draws(logits, Row(0.8, seed=42), 16)
        assert stream(42, first=True) == alone
        assert stream(42, first=False) == alone
        assert stream(43, first=True) != alone

    def test_completions_of_a_seeded_request_differ_and_repeat(self) -> None:
        logits = random_logits(1, 512, scale=1.0)
        completions = [draws(logits, Row(seed=child_seed(5, i)), 12) for i in range(4)]
        assert len({tuple(tokens) for tokens in completions}) == 4
        assert completions == [draws(logits, Row(seed=child_seed(5, i)), 12) for i in range(4)]

    def test_large_batches_are_worked_off_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [Row(seed=1), Row(top_k=7, seed=2), Row(top_p=0.6, seed=3), GREEDY] * 5
        logits = random_logits(len(rows), 50)
        whole = sample(logits, batch_of(rows)).tolist()
        for rows_per_part in (1, 3, 19):
            monkeypatch.setattr("jackfield.core.sampler._MAX_ELEMENTS", 50 * rows_per_part)
            assert sample(logits, batch_of(rows)).tolist() == whole


class TestUnusualInput:
    @pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_k=3), Row(0.5, 7, 0.9, 0.1)], ids=str)
    def test_rows_without_a_distribution_are_greedy_and_leave_others_alone(self, row: Row) -> None:
        logits = random_logits(5, 100)
        others = sample(logits, batch_of([row] * 5))[[0, 4]].tolist()
        logits[1, 42] = math.nan
        logits[2, [77, 60]] = math.inf
        logits[3] = -math.inf
        tokens = sample(logits, batch_of([row] * 5)).tolist()
        assert tokens[1:4] == [42, 60, 0]
        assert [tokens[0], tokens[4]] == others

    def test_masked_logits_are_never_drawn(self) -> None:
        logits = torch.full((1, 1000), -math.inf)
        logits[0, [3, 500, 999]] = torch.tensor([0.0, 1.0, 0.5])
        for row in (Row(), Row(temperature=100.0), Row(top_k=50), Row(top_p=0.999)):
            assert set(draws(logits, row, 100)) == {3, 500, 999}

    def test_empty_batch(self) -> None:
        tokens = sample(torch.empty(0, 10), batch_of([]))
        assert tokens.shape == (0,)
        assert tokens.dtype == torch.int64

    def test_vocabulary_of_one(self) -> None:
        assert draws(torch.zeros(1, 1), Row(top_k=2, top_p=0.5, min_p=0.5), 3) == [0, 0, 0]

    def test_wrong_number_of_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="logits have 3 rows, the batch has 2"):
            sample(torch.zeros(3, 5), batch_of([GREEDY, Row()]))

    @pytest.mark.parametrize(
        ("row", "name"),
        [
            (Row(temperature=-0.1), "temperature"),
            (Row(temperature=math.inf), "temperature"),
            (Row(temperature=math.nan), "temperature"),
            (Row(top_p=-0.1), "top_p"),
            (Row(top_p=math.nan), "top_p"),
            (Row(min_p=1.5), "min_p"),
            (Row(position=-1), "positions"),
        ],
    )
    def test_settings_out_of_range_are_refused(self, row: Row, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}=.* is out of range"):
            batch_of([Row(), row])

    def test_arrays_of_different_lengths_are_refused(self) -> None:
        one, two = np.ones(1), np.ones(2)
        with pytest.raises(ValueError, match="one length"):
            SamplingBatch.from_host(
                temperature=one,
                top_k=two.astype(np.int64),
                top_p=one,
                min_p=one,
                seeds=one.astype(np.uint64),
                positions=one.astype(np.int64),
                device="cpu",
            )


@pytest.mark.gpu
class TestCuda:
    ROWS = (GREEDY, Row(), Row(top_k=40), Row(top_p=0.9), Row(0.7, 20, 0.9, 0.05), Row(min_p=0.1))

    def test_neither_batching_nor_sampling_waits_for_the_device(self) -> None:
        logits = random_logits(6, 50_257).cuda()
        batch_of(list(self.ROWS), "cuda")  # the first pinned allocation may wait
        torch.cuda.synchronize()
        with no_synchronisation():
            tokens = sample(logits, batch_of(list(self.ROWS), "cuda"))
        assert tokens.device.type == "cuda"

    @pytest.mark.parametrize("vocab_size", [1000, 32_000, 151_936])
    def test_a_row_is_the_same_alone_and_in_any_batch(self, vocab_size: int) -> None:
        rows = [replace(row, seed=seed) for seed in range(8) for row in self.ROWS]
        logits = random_logits(len(rows), vocab_size).cuda()
        together = sample(logits, batch_of(rows, "cuda")).tolist()
        again = sample(logits, batch_of(rows, "cuda")).tolist()
        alone = [
            int(sample(logits[i : i + 1], batch_of([row], "cuda"))[0]) for i, row in enumerate(rows)
        ]
        assert together == again == alone

    def test_rows_without_a_distribution_do_not_stop_the_device(self) -> None:
        logits = random_logits(len(self.ROWS), 100)
        logits[:, 42] = math.nan
        tokens = sample(logits.cuda(), batch_of(list(self.ROWS), "cuda"))
        assert tokens.tolist() == [42] * len(self.ROWS)
