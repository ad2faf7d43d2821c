"""Paged attention by torch's ``flex_attention``, for CPU and CUDA.

The block table becomes a ``BlockMask`` whose key blocks are the blocks of the cache, so that the
kernel reads the cache where it lies (https://arxiv.org/abs/2412.05496, section on paged attention).
Compiled, which is the default on CUDA, torch generates one Triton kernel for the spec. Eager, which
is the default on a CPU, it computes every score of a call: slow, and with a copy of the visible
keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

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
from ..core.errors import UnsupportedError
from ..core.options import PartOptions
from ._flex_calls import CallStyle, FlexCall, Geometry, build_calls
from ._flex_kernel import compiled, eager, tile_options
from ._nhd_cache import NhdCache

_CPU_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_CUDA_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CUDA_BLOCK_SIZES = SizeSet.of(16, 32, 64, 128, 256)
# The kernel computes addresses in 32 bits.
_MAX_KERNEL_ELEMENTS = 2**31


class FlexOptions(PartOptions):
    """How flex attention runs."""

    compile: bool | None = Field(
        default=None,
        description="Whether torch compiles the kernel. False is slow and needs much memory. "
        "Default: true on CUDA, false on a CPU, where torch cannot compile all of it.",
    )
    max_score_elements: int = Field(
        default=1 << 22,
        ge=1,
        description="Most attention scores that are computed at a time without compile. A single "
        "query row may exceed it.",
    )


@dataclass(frozen=True)
class FlexPlan(AttentionPlan):
    """A step's calls.

    Attributes:
        calls: together they compute every row.
        num_tokens: query rows that belong to a sequence.
    """

    calls: tuple[FlexCall, ...]
    num_tokens: int


class FlexBackend(AttentionBackend):
    """Every feature of ``AttentionSpec`` by ``flex_attention``; ``auto`` never chooses it.

    On CUDA, a cache whose dtype is not the layer's, or of 2**31 elements and up, is not read in
    place: its visible blocks are copied in every call.
    """

    name: ClassVar[str] = "flex"
    Options: ClassVar[type[PartOptions]] = FlexOptions

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Everything but CUDA graphs and batch invariance; on CUDA, no float64 and no safety from
        NaN and Inf, since the kernel multiplies values of masked keys by 0."""
        on_cuda = device.type == "cuda"
        return Capabilities(
            device_types=frozenset({"cpu", "cuda"}),
            dtypes=_CUDA_DTYPES if on_cuda else _CPU_DTYPES,
            kv_dtypes=_CUDA_DTYPES if on_cuda else _CPU_DTYPES,
            different_kv_dtype=True,
            head_sizes=SizeSet(minimum=16, maximum=256) if on_cuda else SizeSet(),
            block_sizes=_CUDA_BLOCK_SIZES if on_cuda else SizeSet(),
            preferred_block_size=64 if on_cuda else 16,
            compute_capability=(8, 0),
            different_v_head_size=True,
            non_causal=True,
            sliding_window=True,
            logits_soft_cap=True,
            alibi=True,
            sinks=True,
            lse=True,
            nonfinite_safe=not on_cuda,
            kv_layout="NHD",
            auto_priority=0,
        )

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        chosen = own_options(self, FlexOptions)
        on_cuda = device.type == "cuda"
        if chosen.compile and not on_cuda:
            raise UnsupportedError(
                f"attention backend {self.name!r}",
                [
                    "option compile=true is not supported on device=cpu, where torch compiles "
                    "neither the log-sum-exp nor float64; leave it out or set it to false"
                ],
            )
        self._compiled = on_cuda and chosen.compile is not False
        self._exact_dtype = torch.float64 if spec.dtype == torch.float64 else torch.float32
        # Eager flex attention rounds in between unless it is given what it computes in.
        # Rounding a wider cache to the query's dtype would cost what it was made wider for.
        common = torch.promote_types(spec.dtype, cache.dtype)
        self._dtype = common if self._compiled else self._exact_dtype
        self._geometry = Geometry(
            causal=spec.causal,
            sliding_window=spec.sliding_window,
            num_heads=spec.num_heads,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
        )
        self._cache = NhdCache(self.name, cache, device)
        slopes = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=self._exact_dtype, device=device)
        if self._compiled:
            tiles = tile_options(spec, cache.block_size, common)
            largest = max(math.prod(self._cache.k_shape), math.prod(self._cache.v_shape))
            in_place = cache.dtype == spec.dtype and largest < _MAX_KERNEL_ELEMENTS
            self._style = CallStyle(in_place, tuple(tiles), None)
            self._kernel = compiled(spec, cache.block_size, slopes, self._exact_dtype, tiles)
        else:
            self._style = CallStyle(False, (), chosen.max_score_elements)
            self._kernel = eager(spec, cache.block_size, slopes, self._exact_dtype)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> FlexPlan:
        """Make the block masks from the block table.

        Raises:
            ValueError: ``into`` is given: plans are not updated in place (no CUDA graphs); or the
                batch sees more keys than the compiled kernel can address.
        """
        refuse_update(self, into)
        with torch.inference_mode(mode=False):
            calls = tuple(
                replace(call, mask=self._kernel.prepare(call.mask)) if call.mask else call
                for call in build_calls(batch, self._geometry, self._style, self.device)
            )
        if self._compiled:
            self._check_addresses(calls)
        return FlexPlan(calls, batch.num_tokens)

    def _check_addresses(self, calls: tuple[FlexCall, ...]) -> None:
        per_token = max(math.prod(self._cache.k_shape[1:]), math.prod(self._cache.v_shape[1:]))
        for call in calls:
            if call.slots is not None and len(call.slots) * per_token >= _MAX_KERNEL_ELEMENTS:
                raise ValueError(
                    f"attention backend {self.name!r} cannot compile attention to "
                    f"{len(call.slots)} keys of {per_token} elements at once, only to 2**31 "
                    f"elements; set its option compile to false"
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
            ValueError: sinks are given to a spec without them, or missing, or the rows are too few.
        """
        plan = own_plan(self, plan, FlexPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        keys, values = self._cache.by_token(cache)
        for call in plan.calls:
            self._run(call, query, keys, values, out, sinks, lse)
        return out

    def _run(
        self,
        call: FlexCall,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        """Compute the rows of one call; keys and values are those of the whole cache, by token."""
        if call.mask is None:
            out[call.rows] = 0.0
            if lse is not None:
                lse[call.rows] = -torch.inf
            return
        if call.query_rows is None:
            rows = query[call.rows]
        else:
            rows = query.index_select(0, call.query_rows)
        if call.slots is not None:
            keys, values = keys.index_select(0, call.slots), values.index_select(0, call.slots)
        result, sums = self._kernel.attend(
            rows.to(self._dtype),
            keys.to(self._dtype),
            values.to(self._dtype),
            call.mask,
            lse is not None or sinks is not None,
        )
        if call.result_rows is not None:
            result = result.index_select(0, call.result_rows)
            sums = None if sums is None else sums.index_select(0, call.result_rows)
        if sums is not None and sinks is not None:
            # A sink takes exp(sink) of the weight; a row that sees no key has none to give.
            share = torch.sigmoid(sums - sinks.to(sums.dtype))
            result = result * torch.where(sums == -torch.inf, 0.0, share).unsqueeze(-1)
        out[call.rows].copy_(result)
        if sums is not None and lse is not None:
            lse[call.rows].copy_(sums)
