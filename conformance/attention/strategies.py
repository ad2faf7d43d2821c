"""Hypothesis strategies for cases: whatever a backend declares, small and plain cases first.

Every choice lists its plainest value first, because that is where Hypothesis shrinks to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from hypothesis import strategies as st

from ...core.attention import AttentionSpec, dtype_names
from ...core.errors import ConfigError
from .axes import Axes, Scale
from .cases import AttentionCase, SequenceShape
from .laws import Kind

#: Sequences of a mixed batch; an idle one has no new token in this step.
_MIXED = ("decode", "chunk", "prefill", "decode", "chunk", "prefill", "idle")
#: Scales of a cache of 8 bits: none, any, powers of two.
_SCALES = (1.0, 0.37, 3.1, 0.25, 4.0)
#: What a block table holds where nothing may be read.
TABLE_GARBAGE = (-1, 2**31 - 1, 0, -(2**31))


@st.composite
def cases(draw: st.DrawFn, axes: Axes, kind: Kind) -> AttentionCase:
    """Any case that the axes allow and a law of this kind can use."""
    spec = draw(specs(axes))
    block_size = draw(st.sampled_from(axes.block_size))
    kv_dtype = draw(_kv_dtypes(axes, spec))
    scales = st.sampled_from(_SCALES if kv_dtype.itemsize == 1 else _SCALES[:1])
    return AttentionCase(
        spec=spec,
        kv_dtype=kv_dtype,
        k_scale=draw(scales),
        v_scale=draw(scales),
        block_size=block_size,
        sequences=draw(batches(axes, kind, block_size, spec.sliding_window)),
        spare_blocks=draw(st.integers(1, 4)),
        shuffle=draw(st.integers(0, 50)),
        extra_columns=draw(st.integers(0, 3)),
        table_garbage=draw(st.sampled_from(TABLE_GARBAGE)),
        padding_rows=draw(st.integers(0, 4)),
        unstored_every=draw(st.sampled_from((0, 0, 0, 3, 2))),
        fused=draw(st.booleans()),
        distribution=draw(st.sampled_from(axes.distribution)),
        seed=draw(st.integers(0, 10_000)),
    )


@st.composite
def specs(draw: st.DrawFn, axes: Axes) -> AttentionSpec:
    """Any layer that the axes allow."""
    head_size = draw(st.sampled_from(axes.head_size))
    v_head_size = head_size
    if axes.v_head_size and draw(st.integers(0, 4)) == 4:
        v_head_size = draw(st.sampled_from(axes.v_head_size))
    largest = max(head_size, v_head_size)
    most_heads = max(1, min(axes.max_heads, axes.scale.max_elements // largest))
    groups = [size for size in axes.group_size if size <= most_heads] or [min(axes.group_size)]
    group_size = draw(st.sampled_from(groups))
    num_kv_heads = draw(st.integers(1, max(1, min(4, most_heads // group_size))))
    num_heads = num_kv_heads * group_size
    window = None
    if draw(_switch(axes.sliding_window)):
        window = draw(st.sampled_from((1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 100)))
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        v_head_size=v_head_size,
        scale=draw(st.sampled_from((head_size**-0.5, 0.05, 0.3))),
        dtype=draw(st.sampled_from(axes.dtype)),
        causal=draw(st.sampled_from(axes.causal)),
        sliding_window=window,
        logits_soft_cap=(
            draw(st.sampled_from((30.0, 5.0, 50.0, 1.5)))
            if draw(_switch(axes.logits_soft_cap))
            else None
        ),
        alibi_slopes=(
            draw(st.sampled_from((_standard_slopes(num_heads), _even_slopes(num_heads))))
            if draw(_switch(axes.alibi))
            else None
        ),
        sinks=draw(_switch(axes.sinks)),
    )


def _switch(values: tuple[bool, ...]) -> st.SearchStrategy[bool]:
    """A feature; where it may be off, it is so in two of three cases."""
    if len(values) == 1:
        return st.just(values[0])
    return st.sampled_from((False, False, True))


def _kv_dtypes(axes: Axes, spec: AttentionSpec) -> st.SearchStrategy[torch.dtype]:
    same = [dtype for dtype in axes.kv_dtype if dtype == spec.dtype]
    others = [dtype for dtype in axes.kv_dtype if axes.different_kv_dtype or dtype.itemsize == 1]
    return st.sampled_from([*same, *same, *same, *others])


def _standard_slopes(num_heads: int) -> tuple[float, ...]:
    """The geometric series of https://arxiv.org/abs/2108.12409, rounded to 16 bits."""
    exponents = (8 * (head + 1) / num_heads for head in range(num_heads))
    return tuple(round(2.0**-exponent * 65536) / 65536 for exponent in exponents)


def _even_slopes(num_heads: int) -> tuple[float, ...]:
    return tuple((head + 1) / 8 for head in range(num_heads))


@st.composite
def batches(
    draw: st.DrawFn, axes: Axes, kind: Kind, block_size: int, window: int | None
) -> tuple[SequenceShape, ...]:
    """Any batch: decode, prefill, chunks, mixed ones; with and without a shared prefix."""
    scale = axes.scale
    if kind == "one":
        length = draw(seq_lens(scale, block_size, window))
        return (SequenceShape(length, length),)
    name = _batch_kind(draw, axes, kind)
    count = draw(st.integers(1, scale.max_seqs))
    if draw(st.integers(0, 19)) == 19:
        return ()
    if scale.many_seqs and name == "decode" and draw(st.integers(0, 15)) == 15:
        count = draw(st.integers(scale.many_seqs // 2, scale.many_seqs))
        scale = replace(scale, max_seq_len=12)
    lengths = seq_lens(scale, block_size, window)
    shapes = []
    for length in [draw(lengths) for _ in range(count)]:
        own = draw(st.sampled_from(_MIXED)) if name == "mixed" else name
        shapes.append(SequenceShape(length, draw(_query_lens(own, length))))
    if "mixed" not in axes.batch and name in ("prefill", "chunk"):
        # One new token is decoding, which may not stand beside these.
        shapes = [shape for shape in shapes if shape.query_len > 1]
    if len(shapes) > 1 and draw(st.booleans()):
        shapes = list(_with_shared_prefix(shapes, block_size))
    return tuple(shapes)


def _batch_kind(draw: st.DrawFn, axes: Axes, kind: Kind) -> str:
    if kind in ("decode", "prefill"):
        return kind
    return draw(st.sampled_from(axes.batch))


def seq_lens(scale: Scale, block_size: int, window: int | None) -> st.SearchStrategy[int]:
    """Lengths around the borders of blocks and windows, and any others."""
    edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1]
    if window is not None:
        edges += [window - 1, window, window + 1, window + block_size]
    edges += [63, 64, 65, 127, 129, 255, 256, 257, 512, 513, 1025]
    fitting = [edge for edge in dict.fromkeys(edges) if 1 <= edge <= scale.max_seq_len]
    return st.one_of(
        st.sampled_from(fitting), st.integers(1, scale.max_seq_len), st.sampled_from(fitting)
    )


def _query_lens(kind: str, length: int) -> st.SearchStrategy[int]:
    if kind in ("decode", "idle"):
        return st.just(1 if kind == "decode" else 0)
    if kind == "prefill":
        return st.just(length)
    edges = [new for new in (2, 3, 4, 5, 8, 15, 16, 17, 33, 65, 127, 129) if new <= length]
    return st.one_of(st.sampled_from([1, *edges]), st.integers(1, length))


def _with_shared_prefix(shapes: list[SequenceShape], block_size: int) -> Iterator[SequenceShape]:
    """Each sequence reads as much of its context as it can from the first one's full blocks."""
    first = shapes[0]
    yield first
    for shape in shapes[1:]:
        common = min(first.context_len, shape.context_len) // block_size
        yield replace(shape, shared_blocks=common)


#: Features with the value that is not the ordinary one.
_FEATURES = {
    "causal": False,
    "sliding_window": True,
    "logits_soft_cap": True,
    "alibi": True,
    "sinks": True,
}
_DIRECTED_AXES = (
    "head_size",
    "group_size",
    "block_size",
    "kv_dtype",
    "distribution",
    "batch",
    *_FEATURES,
)


def directed_cases(axes: Axes) -> Iterator[AttentionCase]:
    """Fixed cases for every value of every axis, so that none is left to chance."""
    for axis in _DIRECTED_AXES:
        for value in getattr(axes, axis):
            if axis == "kv_dtype" and not _goes_with_some_query(axes, value):
                continue
            narrow: dict[str, Any] = {axis: (value,)}
            case = plain_case(replace(axes, **narrow))
            yield case
            if case.kv_dtype != case.spec.dtype and "large" in axes.distribution:
                # Scores so large that it shows if keys of another dtype are rounded to the query's.
                yield replace(case, distribution="large")
    if True in axes.sliding_window:
        windowed = plain_case(replace(axes, sliding_window=(True,)))
        yield replace(windowed, spec=replace(windowed.spec, sliding_window=1))
    yield from _pairs_of_features(axes)
    yield from _value_head_sizes(axes)
    yield from _lengths(axes)
    plain = plain_case(axes)
    yield replace(plain, sequences=())
    small = plain_case(replace(axes, block_size=(min(axes.block_size),)))
    length, common = 2 * small.block_size + 1, 2
    if "decode" in axes.batch:
        sequences = (SequenceShape(length, 1), SequenceShape(length, 1, common))
    else:
        sequences = (SequenceShape(length + 1, 2), SequenceShape(length + 1, 2, common))
    yield replace(small, sequences=sequences, shuffle=0)
    if "mixed" in axes.batch:
        idle = (SequenceShape(3, 1), SequenceShape(length, 0), SequenceShape(2, 1))
        yield replace(plain, sequences=(*idle, SequenceShape(4, 0)))
    if axes.scale.many_seqs:
        group_size = max(
            size for size in axes.group_size if size <= 8 or size == min(axes.group_size)
        )
        heads = replace(plain.spec, num_heads=8 * group_size, num_kv_heads=8, alibi_slopes=None)
        if not axes.alibi[0]:
            yield replace(plain, spec=heads)
    if axes.scale.many_seqs and "decode" in axes.batch:
        many = tuple(SequenceShape(1 + index % 5, 1) for index in range(axes.scale.many_seqs))
        yield replace(plain, sequences=many)


def _goes_with_some_query(axes: Axes, kv_dtype: torch.dtype) -> bool:
    return axes.different_kv_dtype or kv_dtype in axes.dtype or kv_dtype.itemsize == 1


def _pairs_of_features(axes: Axes) -> Iterator[AttentionCase]:
    """Every two features together, and all of them, with a cache of 8 bits too."""
    on = [name for name in _FEATURES if getattr(axes, name)[-1:] == (_FEATURES[name],)]
    for names in [*combinations(on, 2), tuple(on)]:
        narrow: dict[str, Any] = {name: (_FEATURES[name],) for name in names}
        yield plain_case(replace(axes, **narrow))
    for dtype in axes.kv_dtype:
        if dtype.itemsize == 1 and on:
            narrow = {name: (_FEATURES[name],) for name in on}
            yield plain_case(replace(axes, kv_dtype=(dtype,), **narrow))


def _value_head_sizes(axes: Axes) -> Iterator[AttentionCase]:
    """Each size of a value head with another head size; and that of multi-head latent attention."""
    for size in axes.v_head_size:
        for head_size in [other for other in axes.head_size if other != size][:1]:
            plain = plain_case(replace(axes, head_size=(head_size,)))
            yield replace(plain, spec=replace(plain.spec, v_head_size=size))
    if 192 in axes.head_size and 128 in axes.v_head_size:
        eight_bits = [dtype for dtype in axes.kv_dtype if dtype.itemsize == 1]
        for kv_dtypes in (axes.kv_dtype, *((dtype,) for dtype in eight_bits)):
            plain = plain_case(replace(axes, head_size=(192,), kv_dtype=kv_dtypes))
            yield replace(plain, spec=replace(plain.spec, v_head_size=128))


def _lengths(axes: Axes) -> Iterator[AttentionCase]:
    """Decode around the end of a block, and far past everything; prefill of several row tiles."""
    for block_size in {min(axes.block_size), plain_case(axes).block_size}:
        plain = plain_case(replace(axes, block_size=(block_size,)))
        for length in (1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1):
            if length >= 1 and "decode" in axes.batch:
                yield replace(plain, sequences=(SequenceShape(length, 1),))
            elif length > 1:
                yield replace(plain, sequences=(SequenceShape(length, length),))
    narrow = replace(axes, head_size=(min(axes.head_size),), scale=replace(axes.scale, max_heads=1))
    few = plain_case(narrow)
    for length in axes.scale.long_seq_lens:
        if "decode" in axes.batch:
            yield replace(few, sequences=(SequenceShape(length, 1), SequenceShape(3, 1)))
        if length < 1000 and "prefill" in axes.batch:
            yield replace(few, sequences=(SequenceShape(length, length),))
        if length < 2000 and "chunk" in axes.batch:
            yield replace(few, sequences=(SequenceShape(length, 129),))


def few_cases(axes: Axes) -> Iterator[AttentionCase]:
    """A plain case for every kind of batch, and an empty one: every law is tried on these."""
    for kind in axes.batch:
        yield plain_case(replace(axes, batch=(kind,)))
    for dtype in axes.kv_dtype:
        if dtype.itemsize == 1:
            yield plain_case(replace(axes, kv_dtype=(dtype,)))
    # With no columns in its block table.
    yield replace(plain_case(axes), sequences=(), extra_columns=0)


def plain_case(axes: Axes) -> AttentionCase:
    """The plainest case of some axes: a feature is on only if it cannot be off.

    Its query has the first dtype that some cache dtype of the axes may go with.

    Raises:
        ConfigError: there is no such dtype.
    """
    group_size = min(axes.group_size, key=lambda size: (abs(size - 2), size))
    num_kv_heads = 2 if axes.scale.max_heads > 8 or 2 * group_size <= axes.max_heads else 1
    num_heads = num_kv_heads * group_size
    head_size = min(axes.head_size, key=lambda size: (abs(size - 64), size))
    block_size = min(axes.block_size, key=lambda size: (abs(size - 16), size))
    dtype, kv_dtype = _plain_dtypes(axes)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        v_head_size=head_size,
        scale=head_size**-0.5,
        dtype=dtype,
        causal=axes.causal[0],
        sliding_window=7 if axes.sliding_window[0] else None,
        # A small cap shows most: hidden keys that are capped too, and what is added after it.
        logits_soft_cap=1.5 if axes.logits_soft_cap[0] else None,
        alibi_slopes=_standard_slopes(num_heads) if axes.alibi[0] else None,
        sinks=axes.sinks[0],
    )
    longest = axes.scale.max_seq_len
    if axes.scale.long_seq_lens:
        longest = max(longest, block_size + 1)
    lengths = (min(max(block_size + 1, 4), longest), min(max(2 * block_size, 6), longest), 3)
    k_scale, v_scale = (0.37, 3.1) if kv_dtype.itemsize == 1 else (1.0, 1.0)
    return AttentionCase(
        spec=spec,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        block_size=block_size,
        sequences=tuple(
            SequenceShape(length, min(count, length))
            for length, count in zip(lengths, _new_tokens(axes, lengths), strict=True)
        ),
        shuffle=1,
        extra_columns=1,
        table_garbage=2**31 - 1,
        padding_rows=1,
        fused=True,
        distribution=axes.distribution[0],
    )


def _plain_dtypes(axes: Axes) -> tuple[torch.dtype, torch.dtype]:
    """Of query and cache; alike if the cache has the dtype of the query."""
    for dtype in axes.dtype:
        for kv_dtype in axes.partners(dtype):
            return dtype, kv_dtype
    raise ConfigError(
        f"no dtype of the query ({dtype_names(axes.dtype)}) may go with one of the cache "
        f"({dtype_names(axes.kv_dtype)}): without different_kv_dtype both are the same, or the "
        "cache has 8 bits"
    )


def _new_tokens(axes: Axes, lengths: tuple[int, int, int]) -> tuple[int, int, int]:
    """New tokens of the three sequences of a plain case."""
    by_kind = {
        "decode": (1, 1, 1),
        "prefill": lengths,
        "chunk": (2, 5, 2),
        "mixed": (1, lengths[1], 2),
    }
    return by_kind[axes.batch[-1]]
