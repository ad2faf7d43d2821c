"""Narrow backends: whatever is declared is exercised, and nothing else is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.odd_backends import NarrowBackend

from jackfield.conformance.attention.axes import (
    SCALES,
    Axes,
    axis_names,
    parse_only,
    representatives,
)
from jackfield.conformance.attention.refusals import declared
from jackfield.conformance.attention.strategies import directed_cases, few_cases, plain_case
from jackfield.conformance.attention.subject import Subject
from jackfield.conformance.attention.suite import (
    ALL_LAWS,
    PROFILES,
    Profile,
    SuiteOptions,
    SuiteRun,
    run_suite,
)
from jackfield.conformance.results import Status
from jackfield.core.attention import SizeSet
from jackfield.core.errors import ConfigError

CPU = torch.device("cpu")
FLOAT16 = frozenset({torch.float16})


def declaring(**declared: object) -> type[NarrowBackend]:
    """A right backend that declares these fields of its capabilities."""
    return type("Declaring", (NarrowBackend,), {"declared": declared})


NARROW = {
    "float16 only": declaring(
        dtypes=FLOAT16, kv_dtypes=FLOAT16, different_kv_dtype=False, block_sizes=SizeSet.of(256)
    ),
    "HND": declaring(kv_layout="HND"),
    "no mixed batches": declaring(mixed_batches=False),
    "no LSE": declaring(lse=False),
    "blocks of 1": declaring(block_sizes=SizeSet.of(1)),
    "blocks of 16": declaring(block_sizes=SizeSet.of(16)),
    "groups of 7": declaring(group_sizes=SizeSet.of(7)),
    "multiples of 8": declaring(head_sizes=SizeSet(multiple_of=8, minimum=8, maximum=256)),
    "one head size": declaring(head_sizes=SizeSet.of(64)),
    "one v_head_size": declaring(different_v_head_size=False),
    "one kv_dtype": declaring(different_kv_dtype=False),
    "little": declaring(
        dtypes=FLOAT16,
        kv_dtypes=FLOAT16,
        different_kv_dtype=False,
        different_v_head_size=False,
        non_causal=False,
        sliding_window=False,
        logits_soft_cap=False,
        alibi=False,
        sinks=False,
        lse=False,
        mixed_batches=False,
        nonfinite_safe=False,
        batch_invariant=False,
        block_sizes=SizeSet.of(32),
        kv_layout="HND",
    ),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NARROW)
def test_fixed_cases_have_everything_that_is_declared(name: str, scale: str) -> None:
    run = SuiteRun.unprobed(Subject(NARROW[name], CPU), SuiteOptions(scale=scale))
    assert run.uncovered_by_directed_cases() == ()


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize(
    ("dtypes", "kv_dtypes"),
    [
        ((F32, BF16), (BF16, FP8)),
        ((F32, BF16), (F32, BF16, FP8)),
        ((F32, F16, BF16), (F16, BF16)),
        ((F64, F32), (FP8,)),
        ((F16,), (F64, F16)),
    ],
)
def test_no_fixed_case_is_refused(
    dtypes: tuple[torch.dtype, ...], kv_dtypes: tuple[torch.dtype, ...], different: bool
) -> None:
    backend = declaring(
        dtypes=frozenset(dtypes), kv_dtypes=frozenset(kv_dtypes), different_kv_dtype=different
    )
    subject = Subject(backend, CPU)
    everything = Axes.of(subject.capabilities, SCALES["small"]).matched()
    assert everything.dtype
    narrowed = [replace(everything, dtype=(dtype,)) for dtype in everything.dtype]
    for axes in (everything, *narrowed):
        fixed = [*few_cases(axes), *directed_cases(axes)]
        assert not [case for case in fixed if subject.refuses(case)]
        assert {case.kv_dtype for case in fixed} <= set(everything.kv_dtype)
    run = SuiteRun.unprobed(subject, SuiteOptions(scale="small"))
    assert run.uncovered_by_directed_cases() == ()
    plain = plain_case(everything)
    for request in declared(subject.capabilities, everything, plain):
        subject.construct(*request.applied(plain))


def test_dtypes_without_a_partner_have_no_plain_case() -> None:
    axes = Axes.of(NARROW["one kv_dtype"].capabilities(CPU), SCALES["tiny"])
    with pytest.raises(ConfigError, match=r"\(float32\) may go with one of the cache \(float16\)"):
        plain_case(replace(axes, dtype=(F32,), kv_dtype=(F16,)))


@pytest.mark.parametrize("name", ["little", "blocks of 1", "groups of 7"])
def test_a_right_backend_passes_whatever_it_declares(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile(examples=2, seconds=0.2, scale="tiny"))
    options = SuiteOptions(scale="tiny", laws=tuple(law.name for law in ALL_LAWS if not law.once))
    if name != "little":
        options = SuiteOptions(scale="tiny", laws=options.laws, only={"dtype": ("float32",)})
    report = run_suite(Subject(NARROW[name], CPU), options)
    assert [one for one in report.results if one.status is Status.FAILED] == []
    assert any(one.status is Status.PASSED and one.examples for one in report.results)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (SizeSet.of(7, 3), (3, 7)),
        (SizeSet(), (4, 16, 71)),
        (SizeSet(maximum=20), (4, 16, 20)),
        (SizeSet(multiple_of=8, minimum=8, maximum=100), (8, 16, 96)),
        (SizeSet(minimum=70), (70, 71)),
        (SizeSet(multiple_of=48), (48, 96)),
    ],
)
def test_a_rule_has_its_ends_and_the_usual_sizes_it_allows(
    sizes: SizeSet, expected: tuple[int, ...]
) -> None:
    assert representatives(sizes, (4, 16, 71)) == expected
    assert all(size in sizes for size in expected)


def plain_axes() -> Axes:
    return Axes.of(Subject(NarrowBackend, CPU).capabilities, SCALES["tiny"])


def test_axes_are_narrowed_to_what_was_asked_for() -> None:
    only = {"head_size": ("71", "64"), "alibi": ("on",), "dtype": ("float16",)}
    axes = plain_axes().narrowed(only)
    assert (axes.head_size, axes.alibi, axes.dtype) == ((71, 64), (True,), (torch.float16,))
    assert axes.block_size == plain_axes().block_size


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"head_sizes": ("64",)}, r"head_sizes=\.\.\. names no axis.*head_size"),
        ({"scale": ("tiny",)}, "names no axis"),
        ({"head_size": ("64", "63")}, "63 is not among what the backend declares: 8, 16"),
        ({"alibi": ("yes",)}, "yes is not among what the backend declares: off, on"),
    ],
)
def test_unknown_axes_and_values_are_refused(
    wanted: dict[str, tuple[str, ...]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plain_axes().narrowed(wanted)


def test_only_is_read_as_on_the_command_line() -> None:
    items = ["head_size=64, 128", "alibi=on", "head_size=64,8"]
    assert parse_only(items) == {"head_size": ("64", "128", "8"), "alibi": ("on",)}


@pytest.mark.parametrize("item", ["", "head_size", "head_size=", "=64", "head_size=64,,8"])
def test_malformed_items_are_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="malformed: write AXIS=VALUE,VALUE"):
        parse_only([item])


def test_every_axis_can_be_named() -> None:
    assert {"dtype", "kv_dtype", "v_head_size", "batch", "distribution"} <= set(axis_names())
    assert not {"scale", "different_kv_dtype"} & set(axis_names())
