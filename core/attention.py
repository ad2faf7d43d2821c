"""The attention contract: what an attention backend is given and what it owes.

Symbols used for shapes, here and in every backend:

====================  ============================================================
``S``                 number of sequences in the batch
``T``                 number of query tokens in the batch, all sequences packed
``P``                 number of blocks in the KV cache
``B``                 block size, in tokens
``N``                 number of query heads (``num_heads``)
``K``                 number of key/value heads (``num_kv_heads``); ``N % K == 0``
``H``, ``Hv``         size of a query/key head and of a value head
====================  ============================================================

**Meaning.** For query row ``i`` of a sequence with ``n`` tokens, ``q`` of them new, the row stands
at position ``p = n - q + i`` and sees the keys ``j <= p`` and, with a window ``W``,
``j > p - W``: exactly ``W`` keys, the row itself counted. Without ``causal`` it sees every
``j < n`` (and, with a window, ``j > p - W``). For the visible keys::

    s_j   = scale * <query, key_j>
    s_j   = cap * tanh(s_j / cap)              if logits_soft_cap is set
    s_j   = s_j - slope_head * (p - j)         if alibi_slopes are set
    out   = sum_j exp(s_j) * value_j / (sum_j exp(s_j) + exp(sink_head))   (the sink only if set)
    lse   = log(sum_j exp(s_j))                natural logarithm, the sink not included

Query head ``h`` reads key/value head ``h // (N // K)``. A row with no visible key is 0, its LSE is
``-inf``.

**Nothing else is touched.** ``write_kv`` changes the named slots and no other byte, slot ``-1``
writes nothing; ``forward`` writes every row of ``out`` that belongs to a query and no other row,
and never the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .errors import UnsupportedError
from .options import NoOptions, PartOptions

KVLayout = Literal["NHD", "HND"]


@dataclass(frozen=True)
class AttentionSpec:
    """What is constant for an attention layer; layers with an equal spec share one backend.

    Attributes:
        num_heads: query heads, ``N``.
        num_kv_heads: key/value heads, ``K``; divides ``num_heads``.
        head_size: elements of a query or key head, ``H``.
        v_head_size: elements of a value head, ``Hv``; usually equal to ``head_size``.
        scale: factor on the dot products, usually ``head_size ** -0.5``.
        dtype: dtype of query, key, value and output.
        causal: whether a row sees no key behind its own position.
        sliding_window: number of visible keys, the row itself counted; None is unlimited.
        logits_soft_cap: ``cap`` of ``cap * tanh(score / cap)``; None is off.
        alibi_slopes: one slope per query head (https://arxiv.org/abs/2108.12409); None is off.
        sinks: whether ``forward`` is given one learned sink logit per query head.

    Raises:
        ValueError: a number is out of range, or the head counts do not divide.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    dtype: torch.dtype
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_size, self.v_head_size) < 1:
            raise ValueError(f"head counts and sizes must be at least 1: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1, or None")
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap={self.logits_soft_cap} must be above 0, or None")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(
                f"{len(self.alibi_slopes)} alibi_slopes for num_heads={self.num_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class KVCacheSpec:
    """Size and dtype of one layer's KV cache.

    Attributes:
        num_blocks: physical blocks, ``P``.
        block_size: tokens a block holds, ``B``.
        num_kv_heads: ``K``.
        head_size: elements of a key head, ``H``.
        v_head_size: elements of a value head, ``Hv``.
        dtype: dtype of the stored keys and values.
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer, keys and values together."""
        elements = self.block_size * self.num_kv_heads * (self.head_size + self.v_head_size)
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values.

    The logical shape is the same for every backend; the physical order (``Capabilities.kv_layout``)
    shows in the strides only, so swapping, copying and tests work on any backend. The engine
    allocates the cache filled with zeros, packed; a backend that cannot address other strides
    raises ``ValueError`` when it is given them.

    Attributes:
        k: keys, ``[P, B, K, H]``, ``KVCacheSpec.dtype``, on the backend's device.
        v: values, ``[P, B, K, Hv]``, same dtype and device.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The lengths and places of one step: built once, shared by all layers.

    A sequence has at most as many new tokens as tokens; one without any token may still have query
    rows, which see nothing: so a captured graph's batch is padded. Rows of the query at or past
    ``query_start_loc[S]`` are padding. Entries of a block table row at
    or past ``ceil(seq_len / B)`` are undefined and must not be read as block ids. The ``_cpu``
    twins hold the same values on the host, so that planning never waits for the device.

    Attributes:
        query_start_loc: first query row of each sequence, then their total: ``[S + 1]``, int32.
        seq_lens: tokens of each sequence, context and new ones together: ``[S]``, int32.
        block_table: physical block of each logical one: ``[S, max_blocks]``, int32.
        slot_mapping: ``block_id * B + offset`` where each new token's key and value go, or -1 for
            nowhere: ``[T]``, int64.
        max_query_len: the largest number of new tokens of a sequence; 0 for an empty batch.
        max_seq_len: the largest ``seq_lens``; 0 for an empty batch.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    query_start_loc_cpu: Tensor
    seq_lens_cpu: Tensor
    block_table_cpu: Tensor
    slot_mapping_cpu: Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        """``S``."""
        return self.seq_lens_cpu.shape[0]

    @property
    def num_tokens(self) -> int:
        """``T``: query rows that belong to a sequence (padding rows are not counted)."""
        return int(self.query_start_loc_cpu[-1])

    @staticmethod
    def from_host(
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Build a batch from host tensors: the short way for tests and examples.

        Args:
            query_start_loc: ``[S + 1]``, int32, cpu.
            seq_lens: ``[S]``, int32, cpu.
            block_table: ``[S, max_blocks]``, int32, cpu.
            slot_mapping: ``[T]``, int64, cpu.
            device: where the device copies go.
        """
        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        return AttentionBatch(
            query_start_loc=query_start_loc.to(device),
            seq_lens=seq_lens.to(device),
            block_table=block_table.to(device),
            slot_mapping=slot_mapping.to(device),
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
            block_table_cpu=block_table,
            slot_mapping_cpu=slot_mapping,
            max_query_len=int(query_lens.max()) if len(query_lens) else 0,
            max_seq_len=int(seq_lens.max()) if len(seq_lens) else 0,
        )


class AttentionPlan:
    """What a backend worked out from a batch; opaque to everybody else, subclassed by backends."""


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
        kv_dtypes: dtypes of the cache.
        different_kv_dtype: whether the cache may be of another dtype than the query.
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
    not_bitwise: frozenset[str] = frozenset()
    kv_layout: KVLayout = "NHD"
    auto_priority: int = 0
    missing: str | None = None

    def unsupported(
        self, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot serve the layer; an empty list means that it can."""
        if self.missing is not None:
            return [self.missing]
        reasons = self._unsupported_device(device)
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
                cache.dtype != spec.dtype,
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
        if device.type == "cuda" and self.compute_capability is not None:
            found = torch.cuda.get_device_capability(device)
            if found < self.compute_capability:
                needed = ".".join(map(str, self.compute_capability))
                return [f"compute capability {found[0]}.{found[1]} is below the needed {needed}"]
        return []


class AttentionBackend(ABC):
    """Paged attention for all layers of one spec.

    A subclass sets ``name``, declares ``capabilities`` and implements ``plan``, ``write_kv`` and
    ``forward``. It is registered by name through the hook ``jackfield_attention_backends`` and
    constructed by the engine; it keeps no state between steps other than buffers of its own.
    """

    name: ClassVar[str]
    Options: ClassVar[type[PartOptions]] = NoOptions

    @classmethod
    @abstractmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """What this backend can do on ``device``. Cheap; imports its library here, never at import.

        It must not raise: an absent library is declared as ``Capabilities.missing``.
        """

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        """Refuse what is not declared.

        Raises:
            UnsupportedError: with every reason, each naming the offending value.
        """
        reasons = self.capabilities(device).unsupported(spec, cache, device)
        if reasons:
            raise UnsupportedError(f"attention backend {self.name!r}", reasons)
        self.spec = spec
        self.cache_spec = cache
        self.device = device
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        """Do the work that depends on lengths only: once a step, shared by all layers of the spec.

        Args:
            batch: this step's lengths and places. Read from the ``_cpu`` twins.
            into: a plan of an earlier step with the same shapes, to be updated in place and
                returned, so that a captured CUDA graph replays with new lengths. Only backends that
                declare ``cuda_graphs`` are given one.

        Several plans may be alive at a time: one for each captured graph, say. A plan stays good
        until it is updated, whatever else is planned and computed meanwhile.
        """

    @abstractmethod
    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store new keys and values.

        Args:
            key: ``[T, K, H]``, ``spec.dtype``; rows may be strided (a slice of a fused projection).
            value: ``[T, K, Hv]``, likewise.
            cache: the layer's cache; slot ``s`` is block ``s // B``, offset ``s % B``.
            slot_mapping: ``[T]``, int64, on the device; rows with -1 are not stored.
        """

    @abstractmethod
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
        """Attend: every query row over the visible keys of its sequence.

        Args:
            query: ``[T or more, N, H]``, ``spec.dtype``; rows may be strided.
            cache: the layer's cache, which already holds the keys of this step.
            plan: what ``plan`` returned for this step.
            out: ``[T or more, N, Hv]``, ``spec.dtype``: rows that belong to a query are written,
                all others left alone.
            sinks: ``[N]``, float32: the layer's sink logits; given exactly if ``spec.sinks``.
            lse: ``[T or more, N]``, float32: if given, filled with the natural-log LSE per row
                (only where ``Capabilities.lse``).

        Returns:
            ``out``.
        """


def allocate_kv_cache(spec: KVCacheSpec, layout: KVLayout, device: torch.device) -> KVCache:
    """A zero-filled cache for one layer, in the physical order that the backend wants.

    Zeros, because several libraries multiply masked values by a weight of zero, and a NaN left in
    memory by somebody else would survive that.
    """

    def one(head_size: int) -> Tensor:
        if layout == "NHD":
            shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, head_size)
            return torch.zeros(shape, dtype=spec.dtype, device=device)
        shape = (spec.num_blocks, spec.num_kv_heads, spec.block_size, head_size)
        return torch.zeros(shape, dtype=spec.dtype, device=device).transpose(1, 2)

    return KVCache(k=one(spec.head_size), v=one(spec.v_head_size))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: the spelling of every setting and message."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: frozenset[torch.dtype] | Sequence[torch.dtype]) -> str:
    """The names of several dtypes, sorted, separated by commas."""
    return ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
