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

``key_j`` and ``value_j`` are what the cache stands for: the stored numbers, and in a cache of 8
bits those times ``KVCache.k_scale`` and ``KVCache.v_scale``. Query head ``h`` reads key/value head
``h // (N // K)``. A row with no visible key is 0, its LSE is ``-inf``.

**Nothing else is touched.** ``write_kv`` changes the named slots and no other byte, slot ``-1``
writes nothing; ``forward`` writes every row of ``out`` that belongs to a query and no other row,
and never the cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .capabilities import Capabilities, KVLayout, SizeSet, dtype_name, dtype_names
from .errors import UnsupportedError
from .options import NoOptions, PartOptions

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionPlan",
    "AttentionSpec",
    "Capabilities",
    "KVCache",
    "KVCacheSpec",
    "KVLayout",
    "SizeSet",
    "allocate_kv_cache",
    "dtype_name",
    "dtype_names",
]


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

    A cache of 8 bits has a scale for its keys and one for its values: a stored number ``x`` stands
    for ``x * scale``. The scales are constants of the layer.

    Attributes:
        k: keys, ``[P, B, K, H]``, ``KVCacheSpec.dtype``, on the backend's device.
        v: values, ``[P, B, K, Hv]``, same dtype and device.
        k_scale: what a stored key is multiplied by; other than 1 only in a cache of 8 bits.
        v_scale: what a stored value is multiplied by; likewise.

    Raises:
        ValueError: a scale is not a finite number above 0, or is not 1 in a wider cache.
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, scale, stored in (
            ("k_scale", self.k_scale, self.k),
            ("v_scale", self.v_scale, self.v),
        ):
            if not 0.0 < scale < math.inf:
                raise ValueError(f"{name}={scale} must be a finite number above 0")
            if scale != 1.0 and stored.dtype.itemsize > 1:
                raise ValueError(
                    f"{name}={scale} is for a cache of 8 bits; one of {dtype_name(stored.dtype)} "
                    "has a scale of 1"
                )


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

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot serve the layer; an empty list means that it can.

        A subclass adds what no single capability says, such as two features that exclude each
        other. Each reason names the setting and its value.
        """
        return cls.capabilities(device).unsupported(spec, cache, device)

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
        reasons = self.unsupported(spec, cache, device)
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

        In a cache of another dtype than the query's they are rounded to nearest, ties to even. One
        of 8 bits stores ``number / scale``, computed in float32, and its largest finite number in
        place of a larger one, infinity too; NaN stays NaN.

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


def allocate_kv_cache(
    spec: KVCacheSpec,
    layout: KVLayout,
    device: torch.device,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> KVCache:
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

    return KVCache(one(spec.head_size), one(spec.v_head_size), k_scale, v_scale)
