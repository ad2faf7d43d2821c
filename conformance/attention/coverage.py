"""Counts how often each declared capability was exercised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from ...core.attention import Capabilities
from .axes import Axes, axis_names, value_name
from .cases import AttentionCase


class Coverage:
    """Examples per axis and value; what is declared starts at zero."""

    def __init__(self, axes: Axes, capabilities: Capabilities) -> None:
        self._counts: dict[str, Counter[str]] = {}
        for axis in axis_names():
            values = getattr(axes, axis)
            if values:
                self._counts[axis] = Counter({value_name(value): 0 for value in values})
        if "v_head_size" in self._counts and len(axes.head_size) == 1:
            # A value head of the only head size does not differ from it.
            del self._counts["v_head_size"][value_name(axes.head_size[0])]
        self._counts["lengths"] = Counter(dict.fromkeys(_LENGTHS, 0))
        if "decode" not in axes.batch:
            del self._counts["lengths"]["one token"]
        self._counts["batches"] = Counter(dict.fromkeys(_BATCHES, 0))
        if not axes.scale.many_seqs or "decode" not in axes.batch:
            del self._counts["batches"]["dozens of sequences"]
        if any(_differ(dtype, one) for dtype in axes.dtype for one in axes.partners(dtype)):
            self._counts["different_kv_dtype"] = Counter({"on": 0})
        if capabilities.lse:
            self._counts["lse"] = Counter({"on": 0})

    def add(self, case: AttentionCase, law: str) -> None:
        """Count a case that a law was tried on."""
        spec = case.spec
        seen: list[tuple[str, object]] = [
            ("dtype", spec.dtype),
            ("kv_dtype", case.kv_dtype),
            ("head_size", spec.head_size),
            ("group_size", spec.group_size),
            ("block_size", case.block_size),
            ("causal", spec.causal),
            ("sliding_window", spec.sliding_window is not None),
            ("logits_soft_cap", spec.logits_soft_cap is not None),
            ("alibi", spec.alibi_slopes is not None),
            ("sinks", spec.sinks),
            ("distribution", case.distribution),
        ]
        if spec.v_head_size != spec.head_size:
            seen.append(("v_head_size", spec.v_head_size))
        if _differ(spec.dtype, case.kv_dtype):
            seen.append(("different_kv_dtype", True))
        if law == "lse":
            seen.append(("lse", True))
        kind = kind_of(case)
        if kind is not None:
            seen.append(("batch", kind))
        seen += [("lengths", name) for name in _lengths(case)]
        seen += [("batches", name) for name in _batches(case)]
        for axis, value in seen:
            counts = self._counts.get(axis)
            if counts is not None and (name := value_name(value)) in counts:
                counts[name] += 1

    def merge(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add what another process counted."""
        for axis, values in counts.items():
            self._counts[axis].update(values)

    def table(self) -> dict[str, dict[str, int]]:
        """Axis, then value, then number of examples."""
        return {axis: dict(counts) for axis, counts in self._counts.items()}


def _differ(dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether a backend must declare ``different_kv_dtype`` for these; not for 8 bits."""
    return dtype != kv_dtype and kv_dtype.itemsize > 1


_LENGTHS = ("one token", "block_size - 1", "one block", "block_size + 1", "several blocks")
_BATCHES = (
    "empty",
    "one sequence",
    "several sequences",
    "dozens of sequences",
    "shared prefix",
    "shuffled blocks",
    "strided rows",
    "padding rows",
)


def kind_of(case: AttentionCase) -> str | None:
    """Decode (one new token each), prefill, chunk or mixed; None for a batch without rows."""
    kinds = set()
    for shape in case.sequences:
        if shape.query_len:
            several = "prefill" if shape.query_len >= shape.seq_len else "chunk"
            kinds.add("decode" if shape.query_len == 1 else several)
    if not kinds:
        return None
    if kinds == {"prefill", "chunk"}:
        return "chunk"
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _lengths(case: AttentionCase) -> set[str]:
    names = set()
    for shape in case.sequences:
        length, block_size = shape.seq_len, case.block_size
        edges = {
            "one token": length == 1,
            "block_size - 1": length == max(1, block_size - 1),
            "one block": length == block_size,
            "block_size + 1": length == block_size + 1,
            "several blocks": length > 2 * block_size,
        }
        names |= {name for name, holds in edges.items() if holds}
    return names


def _batches(case: AttentionCase) -> set[str]:
    count = len(case.sequences)
    facts = {
        "empty": count == 0,
        "one sequence": count == 1,
        "several sequences": 1 < count <= 24,
        "dozens of sequences": count > 24,
        "shared prefix": any(shape.shared_blocks for shape in case.sequences),
        "shuffled blocks": case.shuffle > 0,
        "strided rows": case.fused,
        "padding rows": case.padding_rows > 0,
    }
    return {name for name, holds in facts.items() if holds}
