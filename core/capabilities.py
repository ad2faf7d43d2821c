"""What an attention backend declares that it can do, and why it cannot do more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from .attention import AttentionSpec, KVCacheSpec

KVLayout = Literal["NHD", "HND"]

#: Whether what this machine lacks is no reason; set by ``as_if_present`` only.
_AS_IF_PRESENT: ContextVar[bool] = ContextVar("_AS_IF_PRESENT", default=False)

#: Values of the setting ``kv_cache_dtype``, besides ``auto``. Messages use torch's own names.
KV_CACHE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class SizeSet:
    """A set of sizes that a library supports: a list, or the multiples of a number in a range.

    Attributes:
        exactly: the supported sizes; None means that the rule below decides.
        multiple_of: supported sizes are multiples of this.
        minimum: the smallest supported size.
        maximum: the largest supported size; None is unlimited.
    """

    exactly: frozenset[int] | None = None
    multiple_of: int = 1
    minimum: int = 1
    maximum: int | None = None

    @staticmethod
    def of(*sizes: int) -> SizeSet:
        """The set of just these sizes."""
        return SizeSet(exactly=frozenset(sizes))

    def __contains__(self, size: int) -> bool:
        if self.exactly is not None:
            return size in self.exactly
        in_range = self.minimum <= size and (self.maximum is None or size <= self.maximum)
        return in_range and size % self.multiple_of == 0

    def __str__(self) -> str:
        if self.exactly is not None:
            return ", ".join(str(size) for size in sorted(self.exactly))
        upper = "" if self.maximum is None else f" to {self.maximum}"
        step = "" if self.multiple_of == 1 else f", multiples of {self.multiple_of}"
        return f"{self.minimum}{upper or ' and up'}{step}"


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do on a device. Declared means proved: the conformance suite exercises all
    of it, and everything undeclared is refused when the backend is constructed.

    Attributes:
        device_types: torch device types, such as ``{"cpu", "cuda"}``.
        dtypes: dtypes of query and output.
        kv_dtypes: dtypes of the cache. One of 8 bits goes with every dtype of the query.
        different_kv_dtype: whether a cache of 16 bits or more may be of another dtype than the
            query.
        head_sizes: supported ``H`` and ``Hv``.
        group_sizes: supported query heads per key/value head.
        block_sizes: supported ``B``.
        preferred_block_size: what ``auto`` takes for the block size.
        compute_capability: smallest CUDA compute capability; None is any.
        different_v_head_size: whether ``Hv`` may differ from ``H``.
        non_causal: whether ``causal=False`` works.
        sliding_window, logits_soft_cap, alibi, sinks: features of the spec.
        lse: whether ``forward`` may be given ``lse``.
        mixed_batches: whether prefill and decode may share a batch.
        cuda_graphs: whether ``forward`` may be captured and replayed after ``plan(into=...)``.
        nonfinite_safe: whether NaN and Inf in slots of no visible key leave results unchanged.
        batch_invariant: whether a sequence's result is bitwise independent of its batch.
        lowest_score: keys whose score is below this may count as hidden; None is no limit.
        not_bitwise: laws of equal bits that hold within the error bound only, by the names that
            the conformance suite gives them, such as ``block_permutation``.
        kv_layout: physical order inside a block: ``NHD`` (token, head, element) or ``HND``.
        auto_priority: ``auto`` tries higher numbers first; 0 or less is never chosen by ``auto``.
        missing: why the backend cannot run here at all (library absent, device too old), or None.
    """

    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]
    head_sizes: SizeSet = field(default_factory=SizeSet)
    group_sizes: SizeSet = field(default_factory=SizeSet)
    block_sizes: SizeSet = field(default_factory=SizeSet)
    preferred_block_size: int = 16
    compute_capability: tuple[int, int] | None = None
    different_v_head_size: bool = False
    different_kv_dtype: bool = False
    non_causal: bool = False
    sliding_window: bool = False
    logits_soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    mixed_batches: bool = True
    cuda_graphs: bool = False
    nonfinite_safe: bool = False
    batch_invariant: bool = False
    lowest_score: float | None = None
    not_bitwise: frozenset[str] = frozenset()
    kv_layout: KVLayout = "NHD"
    auto_priority: int = 0
    missing: str | None = None

    def unsupported(
        self, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """Every reason why these capabilities do not serve the layer; an empty list means that they
        do.

        What a layer asks for counts only where the backend could run at all: a backend that is
        ``missing`` or on another device declares nothing about it.
        """
        lacks = self.missing is not None and not _AS_IF_PRESENT.get()
        missing = [str(self.missing)] if lacks else []
        reasons = missing + self._unsupported_device(device)
        if missing:
            return reasons
        wanted = {
            "causal=False": (not spec.causal, self.non_causal),
            f"sliding_window={spec.sliding_window}": (
                spec.sliding_window is not None,
                self.sliding_window,
            ),
            f"logits_soft_cap={spec.logits_soft_cap}": (
                spec.logits_soft_cap is not None,
                self.logits_soft_cap,
            ),
            "alibi_slopes": (spec.alibi_slopes is not None, self.alibi),
            "sinks": (spec.sinks, self.sinks),
            f"kv_cache_dtype={dtype_name(cache.dtype)} with dtype={dtype_name(spec.dtype)}": (
                cache.dtype != spec.dtype and cache.dtype.itemsize > 1,
                self.different_kv_dtype,
            ),
            f"v_head_size={spec.v_head_size} with head_size={spec.head_size}": (
                spec.v_head_size != spec.head_size,
                self.different_v_head_size,
            ),
        }
        reasons += [
            f"{what} is not supported" for what, (asked, can) in wanted.items() if asked and not can
        ]
        sizes = (
            ("head_size", spec.head_size, self.head_sizes),
            ("v_head_size", spec.v_head_size, self.head_sizes),
            ("group size", spec.group_size, self.group_sizes),
            ("block_size", cache.block_size, self.block_sizes),
        )
        reasons += [
            f"{name}={size} is not supported (supported: {allowed})"
            for name, size, allowed in sizes
            if size not in allowed
            and not (name == "v_head_size" and spec.v_head_size == spec.head_size)
        ]
        dtypes = (
            ("dtype", spec.dtype, self.dtypes),
            ("kv_cache_dtype", cache.dtype, self.kv_dtypes),
        )
        reasons += [
            f"{name}={dtype_name(dtype)} is not supported (supported: {dtype_names(allowed)})"
            for name, dtype, allowed in dtypes
            if dtype not in allowed
        ]
        return reasons

    def _unsupported_device(self, device: torch.device) -> list[str]:
        if device.type not in self.device_types:
            supported = ", ".join(sorted(self.device_types))
            return [f"device={device.type} is not supported (supported: {supported})"]
        excused = self.missing is not None or _AS_IF_PRESENT.get()
        absent = excused and not torch.cuda.is_available()
        if device.type == "cuda" and self.compute_capability is not None and not absent:
            found = torch.cuda.get_device_capability(device)
            if found < self.compute_capability:
                needed = ".".join(map(str, self.compute_capability))
                return [f"compute capability {found[0]}.{found[1]} is below the needed {needed}"]
        return []


@contextmanager
def as_if_present() -> Iterator[None]:
    """Meanwhile ``Capabilities.unsupported`` overlooks what this machine lacks: what is
    ``missing``, and, where there is no GPU, the compute capability.

    So a backend can be asked about a device that is elsewhere, its own check included.
    """
    token = _AS_IF_PRESENT.set(True)
    try:
        yield
    finally:
        _AS_IF_PRESENT.reset(token)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: the spelling of every setting and message."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: frozenset[torch.dtype] | Sequence[torch.dtype]) -> str:
    """The names of several dtypes, sorted, separated by commas."""
    return ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))


def kv_cache_dtype_of(setting: str) -> torch.dtype | None:
    """The dtype that the setting ``kv_cache_dtype`` names; None for ``auto``, the layer's own."""
    return None if setting == "auto" else KV_CACHE_DTYPES[setting]
