"""What cases may vary in: everything that a backend declares, narrowed by what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ...core.attention import Capabilities, SizeSet, dtype_name
from ...core.errors import ConfigError
from ...plugins.validation import did_you_mean
from .generate import DISTRIBUTIONS

#: Sizes that are tried where a backend declares a range.
HEAD_SIZES = (8, 16, 24, 32, 40, 64, 71, 72, 80, 96, 112, 128, 160, 192, 256, 320)
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 40)
BLOCK_SIZES = (1, 2, 4, 5, 8, 16, 24, 32, 64, 128, 256)
BATCH_KINDS = ("decode", "prefill", "chunk", "mixed")


@dataclass(frozen=True)
class Scale:
    """How large cases become.

    Attributes:
        max_seq_len: tokens of a sequence.
        max_seqs: sequences of an ordinary batch.
        many_seqs: sequences of a batch of hundreds; 0 leaves such batches out.
        max_heads: query heads.
        max_elements: query heads times head size.
        long_seq_lens: lengths that fixed cases try beyond ``max_seq_len``, with few heads.
    """

    max_seq_len: int
    max_seqs: int
    many_seqs: int
    max_heads: int
    max_elements: int
    long_seq_lens: tuple[int, ...] = ()


#: Past where positions in 16 bits end, and where a query has several tiles of rows.
_LONG = (66_000, 1100, 300)

SCALES: Mapping[str, Scale] = {
    "tiny": Scale(max_seq_len=20, max_seqs=3, many_seqs=0, max_heads=8, max_elements=512),
    "small": Scale(
        max_seq_len=70,
        max_seqs=5,
        many_seqs=80,
        max_heads=32,
        max_elements=4096,
        long_seq_lens=_LONG,
    ),
    "large": Scale(
        max_seq_len=1500,
        max_seqs=12,
        many_seqs=300,
        max_heads=64,
        max_elements=8192,
        long_seq_lens=_LONG,
    ),
}


@dataclass(frozen=True)
class Axes:
    """The values that each axis of a case may take.

    Attributes:
        dtype, kv_dtype: dtypes of query and cache.
        different_kv_dtype: whether they may differ where the cache has 16 bits or more.
        head_size, group_size, block_size: sizes.
        v_head_size: sizes of a value head where it may differ, else empty.
        causal, sliding_window, logits_soft_cap, alibi, sinks: whether the feature is off, on.
        batch: kinds of batches.
        distribution: of the numbers.
        scale: how large cases become.
    """

    dtype: tuple[torch.dtype, ...]
    kv_dtype: tuple[torch.dtype, ...]
    different_kv_dtype: bool
    head_size: tuple[int, ...]
    v_head_size: tuple[int, ...]
    group_size: tuple[int, ...]
    block_size: tuple[int, ...]
    causal: tuple[bool, ...]
    sliding_window: tuple[bool, ...]
    logits_soft_cap: tuple[bool, ...]
    alibi: tuple[bool, ...]
    sinks: tuple[bool, ...]
    batch: tuple[str, ...]
    distribution: tuple[str, ...]
    scale: Scale

    @staticmethod
    def of(capabilities: Capabilities, scale: Scale) -> Axes:
        """Everything that is declared."""

        def switch(declared: bool) -> tuple[bool, ...]:
            return (False, True) if declared else (False,)

        head_sizes = representatives(capabilities.head_sizes, HEAD_SIZES)
        block_sizes = representatives(capabilities.block_sizes, BLOCK_SIZES)
        return Axes(
            dtype=_sorted(capabilities.dtypes),
            kv_dtype=_sorted(capabilities.kv_dtypes),
            different_kv_dtype=capabilities.different_kv_dtype,
            head_size=head_sizes,
            v_head_size=head_sizes if capabilities.different_v_head_size else (),
            group_size=representatives(capabilities.group_sizes, GROUP_SIZES),
            block_size=block_sizes,
            causal=(True, False) if capabilities.non_causal else (True,),
            sliding_window=switch(capabilities.sliding_window),
            logits_soft_cap=switch(capabilities.logits_soft_cap),
            alibi=switch(capabilities.alibi),
            sinks=switch(capabilities.sinks),
            batch=BATCH_KINDS if capabilities.mixed_batches else BATCH_KINDS[:3],
            distribution=tuple(
                name
                for name in DISTRIBUTIONS
                if name != "far_below_zero" or capabilities.lowest_score is None
            ),
            scale=replace(scale, max_seq_len=max(scale.max_seq_len, 2 * min(block_sizes) + 2)),
        )

    def narrowed(self, wanted: Mapping[str, Sequence[str]]) -> Axes:
        """Only some values of some axes.

        Args:
            wanted: axis to values, as on the command line: ``{"head_size": ["64", "128"]}``;
                features take ``on`` and ``off``.

        Raises:
            ConfigError: an axis or a value is unknown, or the backend does not declare it.
        """
        axes = self
        for name, values in wanted.items():
            if name not in axis_names():
                hint = did_you_mean(name, axis_names())
                raise ConfigError(
                    f"--only {name}=... names no axis{hint or '.'} Axes: {', '.join(axis_names())}"
                )
            known = {value_name(value): value for value in getattr(self, name)}
            missing = [value for value in values if value not in known]
            if missing:
                raise ConfigError(
                    f"--only {name}={','.join(values)}: {', '.join(missing)} is not among what the "
                    f"backend declares: {', '.join(known) or 'nothing'}"
                )
            chosen: dict[str, Any] = {name: tuple(known[value] for value in values)}
            axes = replace(axes, **chosen)
        return axes

    def matched(self) -> Axes:
        """Without the dtypes that have no partner: unless query and cache may differ, a cache has
        the dtype of the query, or 8 bits. Both axes may be empty then."""
        if self.different_kv_dtype:
            return self
        own = tuple(dtype for dtype in self.dtype if dtype in self.kv_dtype)
        narrow = tuple(dtype for dtype in self.kv_dtype if dtype.itemsize == 1)
        return replace(
            self,
            dtype=self.dtype if narrow else own,
            kv_dtype=tuple(dict.fromkeys((*own, *narrow))),
        )

    def partners(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Cache dtypes that a query of this dtype may go with: its own first, then the others in
        their order. Empty if it has none."""
        own = tuple(one for one in self.kv_dtype if one == dtype)
        others = tuple(
            one
            for one in self.kv_dtype
            if one != dtype and (self.different_kv_dtype or one.itemsize == 1)
        )
        return (*own, *others)

    @property
    def max_heads(self) -> int:
        """Query heads; at least the largest group."""
        return max(self.scale.max_heads, min(self.group_size))


def parse_only(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Axis to values, of items such as ``head_size=64,128``; an axis may come several times.

    Raises:
        ConfigError: an item has another form.
    """
    only: dict[str, dict[str, None]] = {}
    for item in items:
        axis, _, listed = item.partition("=")
        values = [value.strip() for value in listed.split(",")]
        if not axis.strip() or not all(values):
            raise ConfigError(
                f"--only {item!r} is malformed: write AXIS=VALUE,VALUE, such as head_size=64,128"
            )
        only.setdefault(axis.strip(), {}).update(dict.fromkeys(values))
    return {axis: tuple(values) for axis, values in only.items()}


_NO_AXES = ("scale", "different_kv_dtype")


def axis_names() -> tuple[str, ...]:
    """All axes, in the order of ``Axes``."""
    return tuple(field.name for field in fields(Axes) if field.name not in _NO_AXES)


def value_name(value: object) -> str:
    """How an axis value is written on the command line and in tables."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def representatives(sizes: SizeSet, candidates: Sequence[int]) -> tuple[int, ...]:
    """All sizes of a list; of a rule, the candidates that it allows, its smallest and its largest.

    Where a rule has no lower end, sizes below the candidates are left out: they do not occur.
    """
    if sizes.exactly is not None:
        return tuple(sorted(sizes.exactly))
    step = sizes.multiple_of
    smallest = -(-sizes.minimum // step) * step
    ends = [] if sizes.maximum is None else [sizes.maximum // step * step]
    if smallest > 1:
        ends += [smallest, smallest + step]
    return tuple(sorted({size for size in (*candidates, *ends) if size in sizes}))


def _sorted(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(dtypes, key=lambda dtype: (-dtype.itemsize, dtype_name(dtype))))
