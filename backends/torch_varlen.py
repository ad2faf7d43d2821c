"""Attention by torch's own ``varlen_attn``, for CUDA.

It is the flash attention (https://arxiv.org/abs/2307.08691) that torch brings, for packed sequences
of different lengths. From torch 2.12 on it reads a paged cache by a block table; before, and where
blocks do not fit it, visible keys are copied out of the cache.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
    SizeSet,
)
from ..core.attention_checks import check_call, own_options, own_plan, refuse_update
from ..core.options import PartOptions
from ._batch_parts import BatchPart, take_part
from ._gathered_parts import (
    GatheredPart,
    KeyGather,
    aligned,
    gathered_parts,
    refuse_large_caches,
    split_blind,
)
from ._lse import apply_sinks, blank_rows
from ._nhd_cache import NhdCache
from ._packed_arrays import Array, PackedArrays
from ._views import take_rows

_MODULE = "torch.nn.attention.varlen"
_DTYPES = frozenset({torch.float16, torch.bfloat16})
# The kernel's tiles of keys must not cross the border of a block.
_PAGED_UNIT = 256
_PAGED_PARAMETERS = frozenset({"seqused_k", "block_table", "num_splits"})


class TorchVarlenOptions(PartOptions):
    """A bound on the memory that attention takes beside the cache."""

    max_gathered_elements: int = Field(
        default=1 << 27,
        ge=1,
        description="Most key and value elements that are copied out of the cache at a time. A "
        "single sequence may exceed it. Blocks that are read in place are not copied.",
    )


@dataclass(frozen=True)
class VarlenCall:
    """One call.

    Attributes:
        rows: rows of the packed query that it computes: a slice, or int64, on the device.
        query_start_loc, key_start_loc: first row and first key of each sequence, then the total:
            ``[S + 1]``, int32, on the device.
        max_query_len, max_key_len: the largest of a sequence.
        slots: cache slot of each key: int32, on the device; None if blocks are read in place.
        room: where keys and values are copied to; None likewise.
        seq_lens: tokens of each sequence: ``[S]``, int32, on the device; None if keys are copied.
        block_table: ``[S, max_blocks]``, int32, on the device; None likewise.
    """

    rows: slice | Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor
    max_query_len: int
    max_key_len: int
    slots: Tensor | None
    room: tuple[Tensor, Tensor] | None
    seq_lens: Tensor | None
    block_table: Tensor | None


@dataclass(frozen=True)
class TorchVarlenPlan(AttentionPlan):
    """A step's calls.

    Attributes:
        calls: together they compute every row that sees a key.
        blind_rows: all others, int64, on the device; None if there are none.
        num_tokens: query rows that belong to a sequence.
    """

    calls: tuple[VarlenCall, ...]
    blind_rows: Tensor | None
    num_tokens: int


class TorchVarlenBackend(AttentionBackend):
    """``torch.nn.attention.varlen.varlen_attn``; ``auto`` never chooses it."""

    name: ClassVar[str] = "torch_varlen"
    Options: ClassVar[type[PartOptions]] = TorchVarlenOptions

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Attention in 16 bits, with or without causality and a window."""
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            head_sizes=SizeSet(multiple_of=8, minimum=8, maximum=256),
            preferred_block_size=_PAGED_UNIT if cls._can_page() else 16,
            compute_capability=(8, 0),
            non_causal=True,
            sliding_window=True,
            sinks=True,
            lse=True,
            nonfinite_safe=True,
            kv_layout="NHD",
            auto_priority=0,
            missing=cls._missing(),
        )

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        chosen = own_options(self, TorchVarlenOptions)
        refuse_large_caches(self.name, cache)
        varlen: Any = self._module()
        self._attend = varlen.varlen_attn
        self._with_lse = varlen.AuxRequest(lse=True)
        self._cache = NhdCache(self.name, cache, device)
        self._gather = KeyGather(spec, cache, device, repeat=1)
        self._max_keys = max(1, chosen.max_gathered_elements // self._gather.elements_per_key)
        # With a window, a tile in place holds keys that nobody sees, and a NaN there would survive
        # its weight of 0.
        self._paged = (
            self._can_page() and cache.block_size % _PAGED_UNIT == 0 and spec.sliding_window is None
        )
        self._constants = {"scale": float(spec.scale), "window_size": _window(spec)}
        if "enable_gqa" in self._parameters():
            self._constants["enable_gqa"] = spec.group_size > 1

    @classmethod
    def _module(cls) -> ModuleType:
        return importlib.import_module(_MODULE)

    @classmethod
    def _parameters(cls) -> frozenset[str]:
        """Names of what this torch's function takes; empty if it has none."""
        try:
            function = cls._module().varlen_attn
        except (ImportError, AttributeError):
            return frozenset()
        return frozenset(inspect.signature(function).parameters)

    @classmethod
    def _can_page(cls) -> bool:
        return cls._parameters() >= _PAGED_PARAMETERS

    @classmethod
    def _missing(cls) -> str | None:
        if "window_size" in cls._parameters():
            return None
        return (
            f"torch {torch.__version__} has no {_MODULE}.varlen_attn with a window_size; install "
            "one that has: pip install 'torch>=2.11'"
        )

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> TorchVarlenPlan:
        """Copy lengths, and blocks or slots, to the device at once.

        Raises:
            ValueError: ``into`` is given: plans are not updated in place (no CUDA graphs).
        """
        refuse_update(self, into)
        with_rows = np.flatnonzero(np.diff(batch.query_start_loc_cpu.numpy()) > 0)
        seeing, blind = split_blind(batch, with_rows)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            if self._paged:
                calls, blind_rows = self._plan_pages(batch, seeing, blind)
            else:
                calls, blind_rows = self._plan_copies(batch, seeing, blind)
        return TorchVarlenPlan(calls, blind_rows if len(blind) else None, batch.num_tokens)

    def _plan_pages(
        self, batch: AttentionBatch, sequences: Array, blind: Array
    ) -> tuple[tuple[VarlenCall, ...], Tensor]:
        """At most one call, and the rows that see nothing."""
        part = take_part(batch, sequences, self.cache_spec.block_size)
        key_starts = np.zeros(part.num_seqs + 1, np.int32)
        np.cumsum(part.seq_lens, out=key_starts[1:])
        packed = PackedArrays(
            [
                blind,
                part.query_start_loc,
                key_starts,
                part.seq_lens,
                part.block_table,
                _row_index(part),
            ],
            self.device,
        )
        blind_rows, starts, keys, seq_lens, table, rows = packed.tensors
        call = VarlenCall(
            rows=part.rows if isinstance(part.rows, slice) else rows,
            query_start_loc=starts,
            key_start_loc=keys,
            max_query_len=part.max_query_len,
            max_key_len=part.max_seq_len,
            slots=None,
            room=None,
            seq_lens=seq_lens,
            block_table=table,
        )
        return (call,) if part.num_seqs else (), blind_rows

    def _plan_copies(
        self, batch: AttentionBatch, sequences: Array, blind: Array
    ) -> tuple[tuple[VarlenCall, ...], Tensor]:
        """A call for each run of sequences, and the rows that see nothing."""
        parts = gathered_parts(
            batch,
            sequences,
            self.cache_spec.block_size,
            self.spec.sliding_window,
            self._max_keys,
        )
        arrays: list[Array] = [blind]
        for one in parts:
            arrays += [
                one.part.query_start_loc,
                one.keys.key_start_loc,
                one.keys.slots.astype(np.int32),
                _row_index(one.part),
            ]
        tensors = iter(PackedArrays(arrays, self.device).tensors)
        blind_rows = next(tensors)
        calls = tuple(self._copying_call(one, *(next(tensors) for _ in range(4))) for one in parts)
        return calls, blind_rows

    def _copying_call(
        self, one: GatheredPart, starts: Tensor, keys: Tensor, slots: Tensor, rows: Tensor
    ) -> VarlenCall:
        return VarlenCall(
            rows=one.part.rows if isinstance(one.part.rows, slice) else rows,
            query_start_loc=starts,
            key_start_loc=keys,
            max_query_len=one.part.max_query_len,
            max_key_len=one.keys.max_key_len,
            slots=slots,
            room=self._gather.room(len(slots)),
            seq_lens=None,
            block_table=None,
        )

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store new keys and values; see ``AttentionBackend.write_kv``."""
        self._cache.write(key, value, cache, slot_mapping)

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
        """Attend; see ``AttentionBackend.forward``.

        Raises:
            TypeError: the plan is of another backend.
            ValueError: sinks are given to a spec without them, or missing, or the rows are too few;
                or the cache has another size or order.
        """
        plan = own_plan(self, plan, TorchVarlenPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        caches = self._cache.by_token(cache)
        wants_sums = lse is not None or sinks is not None
        for call in plan.calls:
            result, sums = self._run(call, query, cache, caches, wants_sums)
            if sums is not None and sinks is not None:
                apply_sinks(result, sums, sinks)
            out[call.rows] = result
            if sums is not None and lse is not None:
                lse[call.rows] = sums
        if plan.blind_rows is not None:
            blank_rows(out, lse, plan.blind_rows)
        return out

    def _run(
        self,
        call: VarlenCall,
        query: Tensor,
        cache: KVCache,
        caches: tuple[Tensor, Tensor],
        wants_sums: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, ``[R, N, H]``, and the LSE, ``[R, N]``, if it is wanted."""
        arguments: dict[str, Any] = dict(self._constants)
        if call.slots is not None and call.room is not None:
            keys, values = self._gather.gather(caches, call.slots, call.room)
        else:
            keys, values = cache.k, cache.v
            arguments["seqused_k"] = call.seq_lens
            arguments["block_table"] = call.block_table
            # More splits write only the first sequence: pytorch/pytorch#194167.
            arguments["num_splits"] = 1
        result = self._attend(
            aligned(take_rows(query, call.rows)),
            keys,
            values,
            call.query_start_loc,
            call.key_start_loc,
            call.max_query_len,
            call.max_key_len,
            return_aux=self._with_lse if wants_sums else None,
            **arguments,
        )
        if not wants_sums:
            return result, None
        result, sums = result
        heads_first = (self.spec.num_heads, len(result))
        if sums.shape != heads_first:
            # Torch's page on it says [rows, heads], its code has always returned the other order.
            raise RuntimeError(
                f"varlen_attn of torch {torch.__version__} returned an LSE of shape "
                f"{tuple(sums.shape)}, not {heads_first}; use another attention backend"
            )
        return result, sums.t()


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Keys before and behind a row's own that it sees, -1 for all; here the row is not counted."""
    left = -1 if spec.sliding_window is None else spec.sliding_window - 1
    return (left, 0 if spec.causal else -1)


def _row_index(part: BatchPart) -> Array:
    """Packed rows, or nothing if a slice will do."""
    return np.zeros(0, np.int64) if isinstance(part.rows, slice) else part.rows
