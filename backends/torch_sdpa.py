"""Paged attention in plain torch, for CPU and CUDA: it works everywhere and supports every feature.

The visible keys and values of a few sequences at a time are gathered from the paged cache into one
rectangle (see ``_paged_gather``), then attended to by torch's fused
``scaled_dot_product_attention``; what that cannot express (soft cap, ALiBi, sinks, LSE) by matrix
products and an explicit softmax in float32. ``forward`` never waits for the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
)
from ..core.attention_checks import check_call, own_options, own_plan, refuse_update
from ..core.options import PartOptions
from ._explicit_attention import ExplicitAttention
from ._kv_store import bits
from ._nhd_cache import NhdCache
from ._paged_gather import Geometry, KeyGroup, Limits, Tile, build_groups
from ._views import part_of, put_rows, split, take_rows

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
# Torch's cuDNN kernel builds a graph on the host for every new shape, which takes 3 ms, and shapes
# change in every step.
_GPU_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Query rows times group size up to which the heads of a group are laid out as rows of one query on
# a CPU, whose kernel is slow for a few rows of many heads. On a GPU they always are: of the kernels
# above, only the slowest takes both a mask and grouped heads.
_MAX_FOLDED_ROWS = 32
# Numbers of query rows that the fused CPU kernel is slower for than for a larger one: pad to that.
_BETTER_ROWS = {
    torch.float32: {3: 4, 5: 8, 6: 8, 7: 8},
    torch.bfloat16: {1: 2, 3: 4},
}
# Rows of a tile. On a CPU: enough to fill a matrix product, few enough to skip most keys in the
# future. On a GPU the launches of another tile cost more than those keys.
_CPU_TILE_ROWS = 256
_GPU_TILE_ROWS = 4096
# Keys and values, in elements, that a CPU gathers and attends to in the fixed time of one call.
_CALL_COST = 1 << 18


# The scale of the scores, that of the keys included, and the scale of the values.
_Scales = tuple[float, float]


class TorchSdpaOptions(PartOptions):
    """Bounds on the memory that attention takes beside the cache."""

    max_score_elements: int | None = Field(
        default=None,
        ge=1,
        description="Most attention scores that are computed at a time; longer prefills are cut "
        "into tiles of query rows. A single row may exceed it. Default: 4194304 on a CPU, "
        "67108864 on a GPU.",
    )
    max_gathered_elements: int | None = Field(
        default=None,
        ge=1,
        description="Most key and value elements that are gathered from the cache at a time. A "
        "single sequence may exceed it. Default: 4194304 on a CPU, 67108864 on a GPU.",
    )


@dataclass(frozen=True)
class _TileWork:
    """A tile with all views that are the same in every layer.

    Attributes:
        tile: rows, columns and mask.
        keys, values: the tile's part of the gathered cache: ``[S, K, C, H]`` and ``[.., Hv]``.
        row_shape: ``(S, K, G, H)`` if every sequence has one row, else None.
        padded: such rows with zero rows below, ``[S, K, G or more, H]``; None where the kernel
            has no use for them.
        padded_rows: ``padded`` without the zero rows.
    """

    tile: Tile
    keys: Tensor
    values: Tensor
    row_shape: tuple[int, int, int, int] | None
    padded: Tensor | None
    padded_rows: Tensor | None


@dataclass(frozen=True)
class _GroupWork:
    """A group with the parts of the buffers that it is gathered into: ``[S * num_keys, K, H]``."""

    slots: Tensor
    k_target: Tensor
    v_target: Tensor
    tiles: tuple[_TileWork, ...]


@dataclass(frozen=True)
class TorchSdpaPlan(AttentionPlan):
    """A step's gathers and tiles.

    Attributes:
        groups: sequences that are computed together.
        blind_rows: query rows that see no key, int64, on the device; None if there are none.
        num_tokens: query rows that belong to a sequence.
    """

    groups: tuple[_GroupWork, ...]
    blind_rows: Tensor | None
    num_tokens: int


class TorchSdpaBackend(AttentionBackend):
    """The reference backend: every feature of ``AttentionSpec``, any head, group and block size."""

    name: ClassVar[str] = "torch_sdpa"
    Options: ClassVar[type[PartOptions]] = TorchSdpaOptions

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Everything but CUDA graphs and batch invariance."""
        return Capabilities(
            device_types=frozenset({"cpu", "cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES | {torch.float8_e4m3fn},
            different_kv_dtype=True,
            different_v_head_size=True,
            non_causal=True,
            sliding_window=True,
            logits_soft_cap=True,
            alibi=True,
            sinks=True,
            lse=True,
            nonfinite_safe=True,
            kv_layout="NHD",
            auto_priority=10,
        )

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        on_cpu = device.type == "cpu"
        limits = own_options(self, TorchSdpaOptions)
        default = 1 << 22 if on_cpu else 1 << 26
        self._limits = Limits(
            score_elements=limits.max_score_elements or default,
            gathered_elements=limits.max_gathered_elements or default,
            call_cost=_CALL_COST,
            tile_rows=_CPU_TILE_ROWS if on_cpu else _GPU_TILE_ROWS,
        )
        common = _common_dtype(spec.dtype, cache.dtype)
        exact_dtype = torch.float64 if common == torch.float64 else torch.float32
        self._explicit = ExplicitAttention(spec, exact_dtype, device, self._limits.score_elements)
        # The fused CPU kernel is several times slower in float16 than in float32.
        slow = on_cpu and common == torch.float16
        self._fused_dtype = torch.float32 if slow else common
        self._better_rows = _BETTER_ROWS.get(self._fused_dtype, {}) if on_cpu else {}
        self._fused = spec.logits_soft_cap is None and spec.alibi_slopes is None and not spec.sinks
        self._geometry = Geometry(
            causal=spec.causal,
            sliding_window=spec.sliding_window,
            block_size=cache.block_size,
            num_heads=spec.num_heads,
            # The fused CPU kernel keeps no scores; all that has their size is a mask for all heads.
            scores_per_key=1 if self._fused and on_cpu else spec.num_heads,
            elements_per_key=spec.num_kv_heads * (spec.head_size + spec.v_head_size),
        )
        self._cache = NhdCache(self.name, cache, device)
        self._k_buffer = torch.empty(0, dtype=cache.dtype, device=device)
        self._v_buffer = torch.empty(0, dtype=cache.dtype, device=device)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> TorchSdpaPlan:
        """Group the sequences and make all index tensors and masks.

        Raises:
            ValueError: ``into`` is given: plans are not updated in place (no CUDA graphs).
        """
        refuse_update(self, into)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            groups, blind_rows = build_groups(
                batch, self._geometry, self._limits, self._fused_dtype, self.device
            )
            works = tuple(self._prepare(group) for group in groups)
        return TorchSdpaPlan(works, blind_rows, batch.num_tokens)

    def _prepare(self, group: KeyGroup) -> _GroupWork:
        num_slots = group.num_seqs * group.num_keys
        self._k_buffer, k_target = part_of(self._k_buffer, (num_slots, *self._cache.k_shape[1:]))
        self._v_buffer, v_target = part_of(self._v_buffer, (num_slots, *self._cache.v_shape[1:]))
        keys = split(k_target, 0, group.num_seqs, -1).transpose(1, 2)
        values = split(v_target, 0, group.num_seqs, -1).transpose(1, 2)
        tiles = tuple(self._prepare_tile(group, tile, keys, values) for tile in group.tiles)
        return _GroupWork(group.slots, k_target, v_target, tiles)

    def _prepare_tile(self, group: KeyGroup, tile: Tile, keys: Tensor, values: Tensor) -> _TileWork:
        columns = slice(tile.first_key, tile.end_key)
        row_shape, padded, padded_rows = None, None, None
        if tile.num_rows == 1:
            heads = (self.spec.num_kv_heads, self.spec.group_size)
            row_shape = (group.num_seqs, *heads, self.spec.head_size)
            better = self._better_rows.get(heads[1])
            if better is not None:
                padded = torch.zeros(
                    (group.num_seqs, heads[0], better, self.spec.head_size),
                    dtype=self._fused_dtype,
                    device=self.device,
                )
                padded_rows = padded[:, :, : heads[1]]
        k, v = keys[:, :, columns], values[:, :, columns]
        return _TileWork(tile, k, v, row_shape, padded, padded_rows)

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
            ValueError: sinks are given to a spec without them, or missing.
        """
        plan = own_plan(self, plan, TorchSdpaPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        k_rows, v_rows = self._cache.by_token(cache)
        scales = (self.spec.scale * cache.k_scale, cache.v_scale)
        fused = self._fused and lse is None
        with sdpa_kernel(_GPU_KERNELS) if query.is_cuda else nullcontext():
            for group in plan.groups:
                torch.index_select(bits(k_rows), 0, group.slots, out=bits(group.k_target))
                torch.index_select(bits(v_rows), 0, group.slots, out=bits(group.v_target))
                for work in group.tiles:
                    if not fused:
                        self._attend_explicitly(query, work, scales, sinks, out, lse)
                    elif work.row_shape is not None:
                        self._attend_one_row(query, work, work.row_shape, scales, out)
                    else:
                        self._attend_fused(query, work, scales, out)
        if plan.blind_rows is not None:
            out.index_fill_(0, plan.blind_rows, 0.0)
            if lse is not None:
                lse.index_fill_(0, plan.blind_rows, -torch.inf)
        return out

    def _attend_one_row(
        self,
        query: Tensor,
        work: _TileWork,
        shape: tuple[int, int, int, int],
        scales: _Scales,
        out: Tensor,
    ) -> None:
        """A row of each sequence, by torch's own attention: the heads of a group are the rows."""
        tile = work.tile
        q = take_rows(query, tile.rows).view(shape)
        if work.padded is None or work.padded_rows is None:
            q = q.to(self._fused_dtype)
        else:
            work.padded_rows.copy_(q)
            q = work.padded
        k, v = work.keys.to(self._fused_dtype), work.values.to(self._fused_dtype)
        result = self._product(q, k, v, tile.mask, scales)[:, :, : shape[2]]
        if isinstance(tile.rows, slice):
            out[tile.rows].view(*shape[:3], -1).copy_(result)
        else:
            out.index_copy_(0, tile.rows, result.flatten(1, 2).to(out.dtype))

    def _attend_fused(self, query: Tensor, work: _TileWork, scales: _Scales, out: Tensor) -> None:
        """Several rows of each sequence, by torch's own attention."""
        tile, group_size = work.tile, self.spec.group_size
        k, v = work.keys.to(self._fused_dtype), work.values.to(self._fused_dtype)
        q = split(take_rows(query, tile.rows), 0, len(k), -1).to(self._fused_dtype)
        mask = tile.mask
        if not query.is_cuda and tile.num_rows * group_size > _MAX_FOLDED_ROWS:
            result = self._product(q.transpose(1, 2), k, v, mask, scales, group_size > 1)
            put_rows(out, tile.rows, result.transpose(1, 2))
            return
        folded = split(q, 2, -1, group_size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, group_size, 1)
        result = self._product(folded, k, v, mask, scales)
        result = split(result, 2, group_size, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
        put_rows(out, tile.rows, result)

    def _product(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scales: _Scales,
        grouped: bool = False,
    ) -> Tensor:
        """Torch's own attention, ``[S, heads, rows, elements]``."""
        scale, v_scale = scales
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
        return result if v_scale == 1.0 else result.mul_(v_scale)

    def _attend_explicitly(
        self,
        query: Tensor,
        work: _TileWork,
        scales: _Scales,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """A tile, with every feature."""
        rows = work.tile.rows
        q = split(take_rows(query, rows), 0, len(work.keys), -1)
        scale, v_scale = scales
        result, sums = self._explicit.attend(q, work.keys, work.values, work.tile, sinks, scale)
        if v_scale != 1.0:
            result *= v_scale
        put_rows(out, rows, result)
        if lse is not None:
            put_rows(lse, rows, sums)


def _common_dtype(query: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """What keys, values and query are converted to, exactly: rounding a wider cache to the query's
    dtype would cost what it was made wider for.

    Results for a cache of 8 bits still have to be multiplied by the scale of its values, so they
    must not have been rounded to 16 bits.
    """
    if stored.itemsize == 1:
        stored = torch.float32
    return torch.promote_types(query, stored)
