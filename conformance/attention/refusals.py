"""Laws about capabilities: what is declared can be built, what is not is refused with its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.attention import (
    AttentionSpec,
    Capabilities,
    KVCacheSpec,
    SizeSet,
    dtype_name,
)
from ...core.errors import UnsupportedError
from .axes import SCALES, Axes
from .cases import AttentionCase
from .laws import Law
from .strategies import directed_cases, plain_case
from .subject import LawViolation, Subject

_ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
)


@dataclass(frozen=True)
class Request:
    """Something that a backend is asked for at construction.

    Attributes:
        axis, value: what is special about it, for reports.
        spec_changes, cache_changes: fields of ``AttentionSpec`` and ``KVCacheSpec`` that differ
            from a supported request.
        words: what a refusal has to mention, all of them.
    """

    axis: str
    value: str
    spec_changes: Mapping[str, Any]
    cache_changes: Mapping[str, Any]
    words: tuple[str, ...]

    def applied(self, case: AttentionCase) -> tuple[AttentionSpec, KVCacheSpec]:
        """The supported request of a case with this difference."""
        spec = case.spec
        cache = KVCacheSpec(
            4, case.block_size, spec.num_kv_heads, spec.head_size, spec.v_head_size, case.kv_dtype
        )
        return replace(spec, **self.spec_changes), replace(cache, **self.cache_changes)

    def together(self, other: Request) -> Request | None:
        """Both differences at once; None if they are about the same thing."""
        shared = {*self.spec_changes} & {*other.spec_changes}
        if shared or {*self.cache_changes} & {*other.cache_changes}:
            return None
        return Request(
            f"{self.axis}={self.value} and {other.axis}",
            other.value,
            {**self.spec_changes, **other.spec_changes},
            {**self.cache_changes, **other.cache_changes},
            (*self.words, *other.words),
        )


class Refusals(Law):
    """What is not declared is refused when the backend is built, by a message with the value.

    Head sizes, group sizes, block sizes, dtypes, cache dtypes, devices, non-causal layers, windows,
    soft caps, ALiBi, sinks, value heads of another size: an ``UnsupportedError`` that names the
    setting and the offending value, all of them if there are several; never a silent change of
    meaning.
    """

    name = "refusals"
    kind = "one"
    once = True
    every_dtype = False
    attends = False

    def check(self, subject: Subject, case: AttentionCase) -> float:
        requests = list(undeclared(subject.capabilities, case))
        pairs = (requests[0].together(other) for other in requests[1:])
        for request in [*requests, *[pair for pair in pairs if pair is not None][:1]]:
            self._check_refused(subject, case, request)
        self._check_combinations(subject)
        self._check_device(subject, case)
        return 0.0

    def _check_combinations(self, subject: Subject) -> None:
        """What ``unsupported`` names, though each part of it is declared, is refused."""
        for case in directed_cases(Axes.of(subject.capabilities, SCALES["small"])):
            if not subject.refuses(case):
                continue
            try:
                subject.construct(*_nothing_special().applied(case))
            except UnsupportedError:
                continue
            raise LawViolation(
                f"unsupported() names reasons against {case.spec}, but the constructor accepts it"
            )

    def _check_refused(self, subject: Subject, case: AttentionCase, request: Request) -> None:
        try:
            subject.construct(*request.applied(case))
        except UnsupportedError as refusal:
            missing = [word for word in request.words if word not in str(refusal)]
            if missing:
                raise LawViolation(
                    f"{request.axis}={request.value} is not declared and is refused, but the "
                    f"message does not say {' or '.join(map(repr, missing))}: {refusal}"
                ) from None
        else:
            raise LawViolation(
                f"{request.axis}={request.value} is not declared, but the constructor accepts it"
            )

    def _check_device(self, subject: Subject, case: AttentionCase) -> None:
        """A device of a type that no backend declares."""
        elsewhere = replace(subject, device=torch.device("meta"))
        try:
            declared = "meta" in elsewhere.capabilities.device_types
        except Exception as error:
            raise LawViolation(
                f"capabilities(device='meta') raises {type(error).__name__}: {error}; it has to "
                "answer for any device"
            ) from None
        if not declared:
            request = Request("device", "meta", {}, {}, ("device", "meta"))
            self._check_refused(elsewhere, case, request)


class Declared(Law):
    """What is declared can be built.

    Every declared head size, group size, block size, dtype, cache dtype and feature, alone.
    """

    name = "declared"
    kind = "one"
    once = True
    every_dtype = False
    attends = False

    def check(self, subject: Subject, case: AttentionCase) -> float:
        capabilities = subject.capabilities
        axes = Axes.of(capabilities, SCALES["small"])
        # Of all that is declared, whatever the run was narrowed to.
        plain = plain_case(axes)
        for request in declared(capabilities, axes, plain):
            try:
                subject.construct(*request.applied(plain))
            except UnsupportedError as refusal:
                raise LawViolation(
                    f"{request.axis}={request.value} is declared, but refused: {refusal}"
                ) from None
        return 0.0


def _nothing_special() -> Request:
    return Request("", "", {}, {}, ())


def undeclared(capabilities: Capabilities, case: AttentionCase) -> Iterator[Request]:
    """Requests that differ from a supported one in one undeclared thing."""
    spec = case.spec
    words = {
        "head_size": "head_size={}",
        "group_size": "group size={}",
        "block_size": "block_size={}",
    }
    sizes = {
        "head_size": capabilities.head_sizes,
        "group_size": capabilities.group_sizes,
        "block_size": capabilities.block_sizes,
    }
    for axis, allowed in sizes.items():
        for size in outside(allowed):
            yield Request(axis, str(size), *_resized(axis, size, spec), (words[axis].format(size),))
    for dtype in _ALL_DTYPES:
        name = dtype_name(dtype)
        if dtype not in capabilities.dtypes:
            yield Request("dtype", name, {"dtype": dtype}, {}, ("dtype", name))
        if dtype not in capabilities.kv_dtypes:
            yield Request("kv_dtype", name, {}, {"dtype": dtype}, ("kv_cache_dtype", name))
    if not capabilities.different_kv_dtype:
        wide = {dtype for dtype in capabilities.kv_dtypes if dtype.itemsize > 1}
        for dtype in sorted(wide - {spec.dtype}, key=dtype_name):
            name = dtype_name(dtype)
            yield Request("kv_dtype", name, {}, {"dtype": dtype}, ("kv_cache_dtype", name))
    for name, (word, changes) in _features(spec).items():
        if not getattr(capabilities, name):
            yield Request(name, "on", changes, {}, (word,))
    different = [2 * spec.head_size]
    if capabilities.different_v_head_size:
        different = outside(capabilities.head_sizes)
    for size in different:
        sizes_of = {"v_head_size": size}
        yield Request("v_head_size", str(size), sizes_of, sizes_of, (f"v_head_size={size}",))


def declared(capabilities: Capabilities, axes: Axes, case: AttentionCase) -> Iterator[Request]:
    """Requests that differ from a supported one in one declared thing."""
    spec = case.spec
    for axis in ("head_size", "group_size", "block_size"):
        for size in getattr(axes, axis):
            yield Request(axis, str(size), *_resized(axis, size, spec), ())
    for dtype in axes.dtype:
        # None is of a dtype that no cache goes with.
        for partner in axes.partners(dtype)[:1]:
            yield Request("dtype", dtype_name(dtype), {"dtype": dtype}, {"dtype": partner}, ())
    for dtype in axes.kv_dtype:
        if dtype.itemsize > 1 and not capabilities.different_kv_dtype:
            continue
        yield Request("kv_dtype", dtype_name(dtype), {}, {"dtype": dtype}, ())
    for name, (_, changes) in _features(spec).items():
        if getattr(capabilities, name):
            yield Request(name, "on", changes, {}, ())
    for size in axes.v_head_size:
        changes = {"v_head_size": size}
        yield Request("v_head_size", str(size), changes, changes, ())


def _features(spec: AttentionSpec) -> dict[str, tuple[str, dict[str, Any]]]:
    """For each feature of ``Capabilities``: a word of its refusal, the fields that ask for it."""
    return {
        "non_causal": ("causal", {"causal": False}),
        "sliding_window": ("sliding_window=5", {"sliding_window": 5}),
        "logits_soft_cap": ("logits_soft_cap=30.0", {"logits_soft_cap": 30.0}),
        "alibi": ("alibi", {"alibi_slopes": (0.5,) * spec.num_heads}),
        "sinks": ("sinks", {"sinks": True}),
    }


def outside(sizes: SizeSet) -> list[int]:
    """A few sizes that a set does not hold: beside its members, below and above them."""
    if sizes.exactly is not None:
        near = {size + step for size in sizes.exactly for step in (-1, 1)}
        candidates = {*near, 2 * max(sizes.exactly)}
    else:
        step = sizes.multiple_of
        smallest = -(-sizes.minimum // step) * step
        candidates = {sizes.minimum - 1, smallest - step, smallest + 1, smallest + step // 2}
        candidates |= {smallest + step + step // 2}
        if sizes.maximum is not None:
            candidates |= {sizes.maximum + 1, sizes.maximum + step}
    return sorted(size for size in candidates if size >= 1 and size not in sizes)


def _resized(axis: str, size: int, spec: AttentionSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """One size changed, and what depends on it."""
    if axis == "head_size":
        changes = {"head_size": size, "v_head_size": size}
        return changes, changes
    if axis == "block_size":
        return {}, {"block_size": size}
    num_heads = spec.num_kv_heads * size
    slopes = None if spec.alibi_slopes is None else (0.5,) * num_heads
    return {"num_heads": num_heads, "alibi_slopes": slopes}, {}


CAPABILITY_LAWS: tuple[Law, ...] = (Refusals(), Declared())
