"""Paged attention by the library flash-attn-4, whose kernels are compiled on the spot, for Hopper.

One call of ``flash_attn.cute.flash_attn_varlen_func`` computes a batch, whatever is in it. The
library shares its top-level name, ``flash_attn``, with flash-attn 2, which brings an older module
``flash_attn.cute`` along.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
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
from ._library import Library
from ._lse import apply_sinks, blank_rows
from ._nhd_cache import NhdCache
from ._packed_arrays import Array, PackedArrays

LIBRARY = Library(
    distribution="flash-attn-4",
    module="flash_attn.cute",
    extra="flash-attn-4",
    at_least="4.0.0b36",
    below="4.1",
)
_DTYPES = frozenset({torch.float16, torch.bfloat16})
_HOPPER = 9


@dataclass(frozen=True)
class FlashAttn4Plan(AttentionPlan):
    """A step's call: ``S`` sequences that have query rows. All tensors are on the device.

    Attributes:
        query_start_loc: first row of each sequence, then their total: ``[S + 1]``, int32.
        key_lens: keys that are read of each sequence: ``[S]``, int32. One without tokens reads as
            many as it has rows.
        block_table: ``[S, blocks of the longest]``, int32, with block 0 where nothing may be read.
        blind_rows: query rows of sequences without tokens, int64; None if there are none.
        num_tokens: query rows that belong to a sequence.
        max_query_len, max_key_len: the largest of each.
    """

    query_start_loc: Tensor
    key_lens: Tensor
    block_table: Tensor
    blind_rows: Tensor | None
    num_tokens: int
    max_query_len: int
    max_key_len: int


class FlashAttn4Backend(AttentionBackend):
    """Paged attention in 16 bits on Hopper; ``auto`` never chooses it.

    Every head size, dtype and feature is a kernel of its own, which takes seconds to compile when
    it is first used.
    """

    name: ClassVar[str] = "flash_attn_4"

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """What the library does with a paged cache on Hopper.

        No soft cap: the library's ``tanh`` is the hardware's, good to 11 bits, and was not tried.
        """
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            head_sizes=SizeSet.of(64, 80, 96, 112, 128, 192, 256),
            preferred_block_size=128,
            compute_capability=(_HOPPER, 0),
            non_causal=True,
            sliding_window=True,
            sinks=True,
            lse=True,
            kv_layout="NHD",
            auto_priority=0,
            missing=_missing(device),
        )

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot serve the layer; an empty list means that it can."""
        reasons = super().unsupported(spec, cache, device)
        if not spec.scale > 0:
            reasons.append(f"scale={spec.scale} is not supported (supported: above 0)")
        if device.type == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            if major > _HOPPER:
                reasons.append(
                    f"compute capability {major}.{minor} is not supported (supported: {_HOPPER}.x)"
                )
        return reasons

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        own_options(self, self.Options)
        self._library: Any = LIBRARY.require(self.name, device)
        self._cache = NhdCache(self.name, cache, device)
        self._block_size = cache.block_size

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> FlashAttn4Plan:
        """Copy lengths and blocks to the device.

        Raises:
            ValueError: ``into`` is given: plans are not updated in place (no CUDA graphs).
        """
        refuse_update(self, into)
        query_lens = np.diff(batch.query_start_loc_cpu.numpy())
        part = take_part(batch, np.flatnonzero(query_lens), self._block_size)
        # What the kernel makes of a sequence without keys is not documented. It reads as many keys
        # of block 0 as it has rows, and its results are overwritten.
        blind = part.seq_lens == 0
        key_lens = np.where(blind, part.query_lens, part.seq_lens)
        longest = int(key_lens.max(initial=0))
        arrays: list[Array] = [
            part.query_start_loc,
            key_lens,
            _table(part, -(-longest // self._block_size)),
        ]
        if blind.any():
            arrays.append(np.flatnonzero(np.repeat(blind, part.query_lens)))
        query_start_loc, lengths, table, *rows = PackedArrays(arrays, self.device).tensors
        return FlashAttn4Plan(
            query_start_loc=query_start_loc,
            key_lens=lengths,
            block_table=table,
            blind_rows=rows[0] if rows else None,
            num_tokens=part.num_rows,
            max_query_len=part.max_query_len,
            max_key_len=longest,
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
        plan = own_plan(self, plan, FlashAttn4Plan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        self._cache.by_token(cache)
        if not plan.num_tokens:
            return out
        spec = self.spec
        result: Tensor
        result, sums = self._library.flash_attn_varlen_func(
            query[: plan.num_tokens],
            cache.k,
            cache.v,
            cu_seqlens_q=plan.query_start_loc,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_key_len,
            seqused_k=plan.key_lens,
            page_table=plan.block_table,
            softmax_scale=float(spec.scale),
            causal=spec.causal,
            window_size=self._window_sides(plan.max_key_len),
            # The library's LSE has the sink in it: if it is asked for, sinks are applied here.
            learnable_sink=sinks if lse is None else None,
            # What a kernel for Hopper can do. It also makes results independent of the batch size.
            num_splits=1,
            return_lse=lse is not None,
        )
        if lse is not None:
            sums = sums.transpose(0, 1)
            if sinks is not None:
                apply_sinks(result, sums, sinks)
            lse[: plan.num_tokens].copy_(sums)
        out[: plan.num_tokens].copy_(result)
        if plan.blind_rows is not None:
            blank_rows(out, lse, plan.blind_rows)
        return out

    def _window_sides(self, max_key_len: int) -> tuple[int | None, int | None]:
        """Keys that a row sees to its left and right, itself not counted; None is all."""
        window = self.spec.sliding_window
        if window is None or window >= max_key_len:
            return None, None
        return window - 1, 0 if self.spec.causal else None


def _missing(device: torch.device) -> str | None:
    """Why the library cannot be used; None if it can."""
    reason = LIBRARY.missing(device)
    if reason is not None or device.type != "cuda":
        return reason
    function = LIBRARY.load().flash_attn_varlen_func
    if "num_splits" in inspect.signature(function).parameters:
        return None
    return (
        "the module flash_attn.cute is the older one that flash-attn 2 brings along, not that of "
        f"{LIBRARY.distribution}; install the latter again: pip install --force-reinstall "
        f"--no-deps '{LIBRARY.distribution}>={LIBRARY.at_least},<{LIBRARY.below}'"
    )


def _table(part: BatchPart, width: int) -> Array:
    """The part's block table, made as wide as that."""
    table = np.zeros((part.num_seqs, width), np.int32)
    columns = min(width, part.block_table.shape[1])
    table[:, :columns] = part.block_table[:, :columns]
    return table
