"""Backends compared with each other, on batches that all of them take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from support.odd_backends import CUDAOnlyBackend, MissingBackend, NarrowBackend
from torch import Tensor

from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.conformance.attention import pairwise
from jackfield.conformance.attention.axes import SCALES, Axes
from jackfield.conformance.attention.cases import (
    AttentionCase,
    CaseData,
    SequenceShape,
    build,
    expect,
)
from jackfield.conformance.attention.generate import as_bytes
from jackfield.conformance.attention.pairwise import (
    Comparison,
    PairwiseOptions,
    shared_axes,
    shared_capabilities,
)
from jackfield.conformance.attention.pairwise_cases import drawn_cases, rehoused
from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.conformance.attention.strategies import plain_case
from jackfield.conformance.attention.subject import Subject, attend, share_of_bound
from jackfield.conformance.pairwise_report import (
    Member,
    Pair,
    PairwiseReport,
    render,
    to_json,
    to_markdown,
    worse,
)
from jackfield.core.attention import (
    AttentionBackend,
    AttentionPlan,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
    KVLayout,
    SizeSet,
)
from jackfield.core.errors import ConfigError

CPU = torch.device("cpu")
FLOAT32 = {"dtype": ("float32",), "head_size": ("16", "64")}


class WideBlocks(NarrowBackend):
    """As a library whose pages are multiples of 256 tokens."""

    name = "wide_blocks"
    declared: ClassVar[Mapping[str, object]] = {
        "block_sizes": SizeSet(multiple_of=256, minimum=256),
        "preferred_block_size": 256,
        "sinks": False,
        "kv_layout": "HND",
    }


class SmallBlocks(NarrowBackend):
    """Its blocks are none of ``WideBlocks``'s."""

    name = "small_blocks"
    declared: ClassVar[Mapping[str, object]] = {
        "block_sizes": SizeSet.of(8, 16),
        "alibi": False,
        "mixed_batches": False,
    }


class Slanted(PlainBackend):
    """Wrong where there is a window."""

    name = "slanted"

    def forward(
        self,
        query: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """A hundredth too much."""
        super().forward(query, cache, plan, out, sinks=sinks, lse=lse)
        return out.mul_(1.01 if self.spec.sliding_window else 1.0)


class Picky(PlainBackend):
    """Refuses two features together, and fails at a third."""

    name = "picky"

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """A window beside a soft cap."""
        both = spec.sliding_window is not None and spec.logits_soft_cap is not None
        reasons = super().unsupported(spec, cache, device)
        return [*reasons, "sliding_window with logits_soft_cap"] if both else reasons

    def __init__(self, spec: AttentionSpec, *arguments: object) -> None:
        super().__init__(spec, *arguments)  # type: ignore[arg-type]
        if spec.sinks:
            raise RuntimeError("no sinks today")


def compare(
    *backends: type[AttentionBackend], batches: int = 12, **only: tuple[str, ...]
) -> PairwiseReport:
    """A small comparison in float32."""
    options = PairwiseOptions(batches, scale="tiny", only={**FLOAT32, **only}, command="typed")
    comparison = Comparison([Subject(one, CPU) for one in backends], options)
    assert list(comparison.run()) == list(range(1, comparison.done + 1))
    return comparison.report()


def test_the_number_of_processes_does_not_matter() -> None:
    options = PairwiseOptions(17, scale="tiny", only=FLOAT32)
    reports = []
    for jobs in (1, 2):
        subjects = [Subject(one, CPU) for one in (TorchSdpaBackend, PlainBackend)]
        comparison = Comparison(subjects, options)
        done = list(comparison.run(jobs))
        assert done[-1] == 17
        if jobs > 1:
            # It may be left while batches are handed out, before any is computed.
            assert done[0] == 0
        reports.append(comparison.report())
    assert reports[0] == reports[1]


@pytest.mark.parametrize("jobs", [0, -2])
def test_no_process_is_too_few(jobs: int) -> None:
    subjects = [Subject(one, CPU) for one in (TorchSdpaBackend, PlainBackend)]
    comparison = Comparison(subjects, PairwiseOptions(3, scale="tiny", only=FLOAT32))
    with pytest.raises(ConfigError, match=f"--jobs {jobs}: .* at least one process"):
        comparison.run(jobs)


@pytest.mark.parametrize("number", [0.0, 0.3, math.inf])
def test_nothing_is_worse_than_nan(number: float) -> None:
    assert worse(math.nan, number)
    assert not worse(number, math.nan)
    assert not worse(math.nan, math.nan)
    assert worse(number + 1, number) is math.isfinite(number)
    shares = (math.nan, number)
    for first, second in (shares, shares[::-1]):
        names = [str(share) for share in (first, second)]
        one, other = (
            Member("a", "", error=share, worst_case=name)
            for share, name in zip((first, second), names, strict=True)
        )
        member = one.joined(other)
        assert math.isnan(member.error)
        assert member.worst_case == "nan"
        pair = Pair("a", "b", difference=first, worst_case=names[0]).joined(
            Pair("a", "b", difference=second, worst_case=names[1])
        )
        assert math.isnan(pair.difference)
        assert pair.worst_case == "nan"


@pytest.mark.parametrize("shares", [(math.nan, 0.3), (0.3, math.nan)])
def test_nan_is_kept_while_batches_are_added(
    shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = [Subject(one, CPU) for one in (TorchSdpaBackend, PlainBackend)]
    comparison = Comparison(subjects, PairwiseOptions(2, scale="tiny", only=FLOAT32))
    case = plain_case(comparison.axes)
    for share in shares:
        monkeypatch.setattr(pairwise, "share_of_bound", lambda *_, share=share: share)
        comparison.compute(case)
    report = comparison.report()
    assert all(math.isnan(member.error) for member in report.members)
    assert all(math.isnan(pair.difference) for pair in report.pairs)
    assert not report.ok


def test_right_backends_agree() -> None:
    report = compare(TorchSdpaBackend, PlainBackend, WideBlocks)
    assert report.ok
    assert report.batches == 12
    assert [one.batches for one in report.members] == [12] * 3
    assert len(report.pairs) == 3
    for pair in report.pairs:
        assert pair.batches == 12
        assert 0 <= pair.difference <= 1
        errors = [one.error for one in report.members if one.name in (pair.first, pair.second)]
        # Each bound is one half of the sum that a difference is measured by.
        assert pair.difference <= sum(errors) / 2 + 1e-12
    assert report.pair("plain", "torch_sdpa") == report.pair("torch_sdpa", "plain")
    assert report.pair("plain", "plain") is None
    assert report.rows > 12
    assert report.elements > report.rows


def test_a_backend_without_common_blocks_has_a_cache_of_its_own() -> None:
    report = compare(SmallBlocks, WideBlocks, batches=20)
    assert report.ok
    assert {one.name: one.block_sizes for one in report.members} == {
        "small_blocks": (16,),
        "wide_blocks": (256,),
    }
    assert report.axes["block_size"] == ("16", "256")
    assert report.axes["alibi"] == report.axes["sinks"] == ("off",)
    assert "mixed" not in report.axes["batch"]
    (pair,) = report.pairs
    # The same arithmetic on the same numbers.
    assert (pair.equal, pair.difference) == (20, 0)


def test_a_wrong_backend_is_beyond_the_bound() -> None:
    report = compare(PlainBackend, TorchSdpaBackend, Slanted, sliding_window=("on",))
    assert not report.ok
    off = {one.name for one in report.members if one.error > 1}
    assert off == {"slanted"}
    right = report.pair("plain", "torch_sdpa")
    assert right is not None
    assert right.difference <= 1
    wrong = report.pair("plain", "slanted")
    assert wrong is not None
    assert wrong.difference > 1
    assert "sliding_window" in wrong.worst_case
    text = to_markdown(report)
    assert "**NOT within the bounds**" in text
    assert re.search(r"^- slanted is off by \d+% of the bound from float64: heads", text, re.M)
    assert re.search(r"^- plain and slanted differ by \d+% of both bounds: heads", text, re.M)


def test_refusals_are_counted_and_failures_told() -> None:
    report = compare(PlainBackend, Picky, batches=40, logits_soft_cap=("on",))
    assert report.batches == 40
    assert report.skipped["picky"] > 0
    plain, picky = report.members
    assert (plain.failures, plain.batches) == (0, 40)
    assert picky.failures == 40 - picky.batches > 0
    assert picky.failure.startswith("RuntimeError: no sinks today: heads")
    assert not report.ok
    assert " left out, since picky refuses them" in to_markdown(report)
    assert f"picky failed in {picky.failures} batches, first: " in to_markdown(report)


def data_of(case: AttentionCase) -> CaseData:
    """Its tensors."""
    return build(case, "NHD", CPU)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_rehoused_keys_are_the_same(
    block_size: int, layout: KVLayout, kv_dtype: torch.dtype
) -> None:
    axes = Axes.of(PlainBackend.capabilities(CPU), SCALES["tiny"])
    shapes = (SequenceShape(20, 1), SequenceShape(19, 2, 1), SequenceShape(0, 1))
    case = replace(plain_case(axes), sequences=shapes, shuffle=3, kv_dtype=kv_dtype, block_size=16)
    if kv_dtype.itemsize == 1:
        case = replace(case, k_scale=0.25, v_scale=3.0)
    data = data_of(case)
    moved = rehoused(data, block_size, layout)
    assert moved.cache_spec.block_size == moved.cache.k.shape[1] == block_size
    assert (moved.cache.k_scale, moved.cache.v_scale) == (case.k_scale, case.v_scale)
    assert moved.cache.k.is_contiguous() is (layout == "NHD" or block_size == 1)
    for index in range(len(shapes)):
        for old, new in ((data.cache.k, moved.cache.k), (data.cache.v, moved.cache.v)):
            rows = [
                as_bytes(cache)[slots // size, slots % size]
                for cache, slots, size in (
                    (old, data.slots(index), 16),
                    (new, moved.slots(index), block_size),
                )
            ]
            assert torch.equal(*rows)
    if kv_dtype == torch.float32:
        subject = Subject(PlainBackend, CPU)
        expected = expect(data)
        out = attend(subject.instance(moved), moved).out[: case.num_tokens]
        assert share_of_bound(out, expected.out, expected.out_bound) <= 1


def test_what_is_shared() -> None:
    named = {one.name: one.capabilities(CPU) for one in (PlainBackend, WideBlocks)}
    shared = shared_capabilities(named)
    assert not shared.sinks
    assert shared.alibi
    assert 256 in shared.block_sizes
    assert 16 not in shared.block_sizes
    small = replace(
        named["plain"], head_sizes=SizeSet.of(48, 64), group_sizes=SizeSet(maximum=4), lse=False
    )
    both = shared_capabilities({"small": small, "plain": named["plain"]})
    assert str(both.head_sizes) == "48, 64"
    assert str(both.group_sizes) == "1, 2, 3, 4"
    assert not both.lse
    own = replace(small, different_kv_dtype=False, kv_dtypes=frozenset({torch.float16}))
    axes = shared_axes({"own": own, "plain": named["plain"]}, "tiny", {})
    assert axes.dtype == axes.kv_dtype == (torch.float16,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtypes": frozenset({torch.int8})}, r"no dtype in common \(plain: .*; other: int8\)"),
        ({"kv_dtypes": frozenset({torch.int8})}, "no cache dtype in common"),
        ({"head_sizes": SizeSet.of()}, "no head size in common"),
        ({"group_sizes": SizeSet.of()}, "no group size in common"),
        (
            {
                "dtypes": frozenset({torch.float16}),
                "kv_dtypes": frozenset({torch.float32}),
                "different_kv_dtype": False,
            },
            "no dtype of query and cache in common",
        ),
    ],
)
def test_nothing_in_common(changes: dict[str, object], message: str) -> None:
    plain = PlainBackend.capabilities(CPU)
    other = replace(plain, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        shared_axes({"plain": plain, "other": other}, "tiny", {})


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        ((PlainBackend,), "at least two different backends"),
        ((PlainBackend, PlainBackend), "at least two different backends"),
        ((PlainBackend, MissingBackend), "absent_kernels is not installed"),
        ((PlainBackend, CUDAOnlyBackend), "does not support --device cpu"),
    ],
)
def test_who_cannot_be_compared(
    backends: tuple[type[AttentionBackend], ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MissingBackend, "name", "missing")
    monkeypatch.setattr(CUDAOnlyBackend, "name", "cuda_only")
    with pytest.raises(ConfigError, match=message):
        Comparison([Subject(one, CPU) for one in backends], PairwiseOptions())


def test_batches_follow_from_the_seed() -> None:
    axes = shared_axes({"plain": PlainBackend.capabilities(CPU)}, "tiny", FLOAT32)
    first, again, other = (list(drawn_cases(axes, 8, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) == len(first) > 8


def test_json_and_tables() -> None:
    report = compare(PlainBackend, SmallBlocks, batches=5)
    content = json.loads(to_json(report))
    assert content["format"] == 1
    assert content["ok"] is True
    assert content["batches"] == 5
    assert content["pairs"][0]["first"] == "plain"
    console = Console(width=100, record=True)
    with console.capture() as shown:
        console.print(render(report))
    assert "within the bounds on cpu" in shown.get()
    assert "| `plain` | - | 0% | " in to_markdown(report)
    nothing = replace(report, batches=0)
    assert not nothing.ok
