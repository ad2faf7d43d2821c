"""The call of torch's ``flex_attention`` for one spec: its mask, its score function, its options.

Compiled, the function is compiled once for each size of tile, with the LSE and without: lengths,
and nothing else, are dynamic.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from ..core.attention import AttentionSpec
from ._flex_calls import PagedMask

# The matrix instructions of a GPU take 16 rows at least.
_SMALL_TILE = 16
_LARGE_TILE = 64
_MAX_KEYS_PER_STEP = 64
# Bytes of shared memory that tiles of queries, keys and values may take together: every GPU since
# compute capability 8.0 has them.
_SHARED_MEMORY = 96 << 10
_STAGES = 2

Tiles = dict[int, Any]
"""Rows of a tile, ascending, and the kernel's options for it."""

Attend = Callable[[Tensor, Tensor, Tensor, PagedMask, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class FlexKernel:
    """Attention for one spec.

    Attributes:
        prepare: what is done to a mask once, for all layers.
        attend: query ``[R, N, H]``, keys ``[U * B, K, H]``, values ``[U * B, K, Hv]``, a prepared
            mask, and whether the LSE is wanted; returns ``[R, N, Hv]`` and the LSE ``[R, N]``. Rows
            that see no key are 0 and ``-inf``.
    """

    prepare: Callable[[PagedMask], PagedMask]
    attend: Attend


def tile_options(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> Tiles:
    """Sizes of a tile of query rows for a compiled kernel, ascending, each with its options."""
    sizes: Tiles = {}
    width = max(spec.head_size, spec.v_head_size)
    # The kernel rounds head sizes up to a power of two.
    row_bytes = (1 << (width - 1).bit_length()) * dtype.itemsize
    for tile in (_SMALL_TILE, _LARGE_TILE):
        keys = min(block_size, _MAX_KEYS_PER_STEP)
        while keys > 16 and (tile + 2 * _STAGES * keys) * row_bytes > _SHARED_MEMORY:
            keys //= 2
        if tile > _SMALL_TILE and (tile + 2 * _STAGES * keys) * row_bytes > _SHARED_MEMORY:
            continue
        sizes[tile] = {
            # Not TF32.
            "FLOAT32_PRECISION": "'ieee'",
            "BLOCK_M": tile,
            "BLOCK_N": keys,
            "num_warps": 4,
            "num_stages": _STAGES,
        }
    return sizes


def eager(
    spec: AttentionSpec, block_size: int, slopes: Tensor | None, exact_dtype: torch.dtype
) -> FlexKernel:
    """Attention that computes all scores of a call, in the dtype of its inputs.

    Args:
        spec: the layer.
        block_size: ``B``.
        slopes: ALiBi slopes, ``[N]``, ``exact_dtype``, on the device; None is off.
        exact_dtype: what scores are changed in.
    """
    function = _make(spec, block_size, slopes, exact_dtype, {})

    def prepare(mask: PagedMask) -> PagedMask:
        # Eager flex attention takes a millisecond for every look-up, in every layer.
        rows = torch.arange(len(mask.piece), device=mask.piece.device)
        keys = torch.arange(mask.kv_indices.numel() * block_size, device=rows.device)
        dense = _sees(_tensors(mask), rows[:, None], keys, block_size)
        return replace(mask, dense=dense)

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, mask: PagedMask, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        with _without_compilation():
            return function(
                query, keys, values, _tensors(mask), mask.dense, mask.tile_rows, with_lse
            )

    return FlexKernel(prepare, attend)


def compiled(
    spec: AttentionSpec,
    block_size: int,
    slopes: Tensor | None,
    exact_dtype: torch.dtype,
    tiles: Tiles,
) -> FlexKernel:
    """Attention by one compiled kernel; arguments are those of ``eager`` and ``tile_options``."""
    source = cast(types.FunctionType, _make(spec, block_size, slopes, exact_dtype, tiles))
    # Torch limits the compilations of one code object: each spec gets one of its own.
    own = types.FunctionType(
        source.__code__.replace(), source.__globals__, closure=source.__closure__
    )
    function = torch.compile(own, fullgraph=True, dynamic=False)

    def prepare(mask: PagedMask) -> PagedMask:
        for tensor in _tensors(mask):
            for dim in range(tensor.dim()):
                if tensor.shape[dim] > 1:
                    torch._dynamo.mark_dynamic(tensor, dim)
        return mask

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, mask: PagedMask, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        for tensor in (query, keys, values):
            torch._dynamo.mark_dynamic(tensor, 0)
        result = function(query, keys, values, _tensors(mask), None, mask.tile_rows, with_lse)
        return cast(tuple[Tensor, Tensor | None], result)

    return FlexKernel(prepare, attend)


Tensors = tuple[Tensor, ...]


def _tensors(mask: PagedMask) -> Tensors:
    return (
        mask.piece,
        mask.first_key,
        mask.end_key,
        mask.position,
        mask.block_table,
        mask.logical_of,
        mask.kv_num_blocks,
        mask.kv_indices,
    )


def _sees(mask: Tensors, row: Tensor, key: Tensor, block_size: int) -> Tensor:
    """Whether a row of a call sees a slot of its pool; integers of any shapes that broadcast."""
    piece, first_key, end_key, _, block_table, logical_of, _, _ = mask
    block = key // block_size
    logical = logical_of[block]
    place = logical * block_size + key % block_size
    own = block_table[piece[row], logical] == block
    return own & (place >= first_key[row]) & (place < end_key[row])


def _make(
    spec: AttentionSpec,
    block_size: int,
    slopes: Tensor | None,
    exact_dtype: torch.dtype,
    tiles: Tiles,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function to be called or compiled: everything that is constant for a spec is in it."""
    scale, cap = spec.scale, spec.logits_soft_cap
    changes_scores = cap is not None or slopes is not None

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensors,
        dense: Tensor | None,
        tile_rows: int,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        _, _, _, position, _, logical_of, kv_num_blocks, kv_indices = mask

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return _sees(mask, row, key, block_size) if dense is None else dense[row, key]

        def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            score = score.to(exact_dtype)
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                place = logical_of[key // block_size] * block_size + key % block_size
                score = score - slopes[head] * (position[row] - place).to(exact_dtype)
            return score

        block_mask = flex.BlockMask.from_kv_blocks(
            kv_num_blocks,
            kv_indices,
            BLOCK_SIZE=(tile_rows, block_size),
            mask_mod=is_visible,
            seq_lengths=(query.shape[0], keys.shape[0]),
            compute_q_blocks=False,
        )
        result, aux = flex.flex_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            score_mod=change if changes_scores else None,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=True,
            kernel_options=tiles.get(tile_rows),
            return_aux=flex.AuxRequest(lse=with_lse),
        )
        lse = aux.lse
        return result[0].transpose(0, 1), None if lse is None else lse[0].transpose(0, 1)

    return attend


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Have ``flex_attention`` compute eagerly, by torch's own switch, which also keeps it from
    warning that it does."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
