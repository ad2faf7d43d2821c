"""Attention of many query rows: prefill and the continuation of a chunked one."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from .device_code import (
    LN_2,
    NUMBERS,
    as_operand,
    finished_scores,
    index_of_block,
    log2_sum,
    normalised,
    offset_in_block,
    rounded,
    softmax_weights,
    tokens_of,
    widened,
    with_sink,
)


@triton.jit
def _walk(
    state,
    q,
    first,
    end,
    visible,
    cache,
    scoring,
    masked: tl.constexpr,
    windowed: tl.constexpr,
    folded: tl.constexpr,
    one_layout: tl.constexpr,
    padded: tl.constexpr,
    cache_unit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    block_size: tl.constexpr,
    head_width: tl.constexpr,
    v_head_width: tl.constexpr,
    wide: tl.constexpr,
):
    """Add the key tiles ``[first, end)`` to the softmax.

    Args:
        state: accumulated values, largest scores, sums of exponentials, and the block ids of the
            first tile: each tile fetches those of the next one.
        visible: position of the first row, the tile's item, ``reciprocal`` and ``causal`` of the
            kernel, tokens, first and end key of all rows, window.
        cache: block table of the sequence, places of the keys and values of this head, strides of
            their blocks and tokens, head sizes, ``log2_block``.
        scoring: factor, cap, slopes.
        masked: whether some row may not see some key of these tiles.
    """
    acc, top, total, pages = state
    first_position, item, reciprocal, causal, seq_len, first_key, end_key, window = visible
    table, k_head, v_head, k_block, k_token, v_block, v_token, k_size, v_size, log2_block = cache
    factor, cap, slopes = scoring
    if masked or not folded:
        # Loaded again: see the kernel's end.
        packed = tl.load(item + 5, volatile=True) + tl.arange(0, tile_rows)
        position = first_position + tokens_of(packed, reciprocal)
        last_visible = tl.zeros([tile_rows], tl.int32) + (seq_len - 1)
        if causal:
            last_visible = tl.minimum(last_visible, position)
    columns = tl.arange(0, tile_keys)
    k_inside = (tl.arange(0, head_width) < k_size)[None, :]
    v_inside = (tl.arange(0, v_head_width) < v_size)[None, :]
    k_columns = k_head + tl.arange(0, head_width)
    v_columns = v_head + tl.arange(0, v_head_width)
    for tile in range(first, end):
        keys = tile * tile_keys + columns
        in_block = offset_in_block(tile, columns, tile_keys, block_size, log2_block)
        k_rows = pages * k_block + in_block * k_token
        v_rows = k_rows if one_layout else pages * v_block + in_block * v_token
        pages = tl.load(
            table + index_of_block(tile + 1, columns, tile_keys, block_size, log2_block)
        )
        k_pointers = k_columns[None, :] + (k_rows.to(tl.int64) * cache_unit)[:, None]
        v_pointers = v_columns[None, :] + (v_rows.to(tl.int64) * cache_unit)[:, None]
        seen = keys < end_key
        if windowed:
            seen &= keys >= first_key
        seen = seen[:, None]
        if masked:
            k = tl.load(k_pointers, mask=(seen & k_inside) if padded else seen, other=0.0)
        elif padded:
            k = tl.load(k_pointers, mask=k_inside, other=0.0)
        else:
            k = tl.load(k_pointers)
        k = as_operand(k, q.dtype, wide)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if not folded:
            distance = position[:, None] - keys[None, :]
            products = finished_scores(products, factor, cap, slopes, distance)
        if masked:
            sees = keys[None, :] <= last_visible[:, None]
            if windowed:
                sees &= keys[None, :] > (position - window)[:, None]
            products = tl.where(sees, products, float("-inf"))
        weights, shrink, top, total = softmax_weights(
            products, top, total, factor if folded else 1.0, masked
        )
        acc = acc * shrink[:, None]
        if masked:
            v = tl.load(v_pointers, mask=(seen & v_inside) if padded else seen, other=0.0)
        elif padded:
            v = tl.load(v_pointers, mask=v_inside, other=0.0)
        else:
            v = tl.load(v_pointers)
        v = as_operand(v, q.dtype, wide)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total, pages


@triton.jit
def _places(first_token, first_head, kv_head, group_size, reciprocal, tile_rows: tl.constexpr):
    """Token within the sequence and query head of each row of a tile."""
    packed = first_head + tl.arange(0, tile_rows)
    tokens = tokens_of(packed, reciprocal)
    heads = kv_head * group_size + packed - tokens * group_size
    return first_token + tokens, heads


@triton.jit(do_not_specialize=NUMBERS)
def prefill_kernel(
    query,
    k_cache,
    v_cache,
    out,
    lse,
    sinks,
    slopes,
    items,
    table,
    factor,
    cap,
    v_scale,
    query_token,
    query_head,
    out_token,
    out_head,
    lse_token,
    lse_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    num_kv_heads,
    group_size,
    reciprocal,
    head_size,
    v_head_size,
    window,
    causal,
    write_lse,
    log2_block,
    unit: tl.constexpr,
    windowed: tl.constexpr,
    folded: tl.constexpr,
    one_layout: tl.constexpr,
    padded: tl.constexpr,
    cache_unit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    block_size: tl.constexpr,
    head_width: tl.constexpr,
    v_head_width: tl.constexpr,
    wide: tl.constexpr,
    has_sinks: tl.constexpr,
    quantised: tl.constexpr,
):
    """One row tile of one sequence and key/value head; the grid is ``(items * num_kv_heads,)``.

    Row ``r`` of a sequence is head ``r % group_size`` of its token ``r // group_size``, so that a
    tile is full whatever the group size, and few keys lie on its causal edge.

    Args:
        items: ``[items, 8]``, see ``planning``: first query row, query rows, tokens, first table
            entry, token and head of the first row of the tile, first tile of keys.
        factor, cap: as in ``finished_scores``; the scale of the keys is part of the factor.
        v_scale: see ``KVCache``.
        folded: whether the factor is positive and all there is, so that it need not be applied
            before the softmax.
        query_token ... out_head: strides in units of ``unit`` elements.
        k_block ... v_head: strides in units of ``cache_unit`` elements.
        reciprocal: of the group size, see ``tokens_of``.
        head_size, v_head_size: in units of 8 elements.
        padded: whether a width, a power of two, is larger than the size.
        log2_block, block_size: see ``index_of_block``.
        one_layout: whether the strides of the keys are those of the values.
        quantised: whether the cache is one of 8 bits.
    """
    program = tl.program_id(0)
    item = items + (program // num_kv_heads) * 8
    kv_head = program % num_kv_heads
    first_row = tl.load(item).to(tl.int64)
    query_len = tl.load(item + 1)
    seq_len = tl.load(item + 2)
    pages_of = table + tl.load(item + 3)
    first_token = tl.load(item + 4)
    first_head = tl.load(item + 5)
    first_tile = tl.load(item + 6)

    # Block ids before the query: keys wait for them.
    columns = tl.arange(0, tile_keys)
    pages = tl.load(
        pages_of + index_of_block(first_tile, columns, tile_keys, block_size, log2_block)
    )
    tokens, heads = _places(first_token, first_head, kv_head, group_size, reciprocal, tile_rows)
    owned = tokens < query_len
    dims = tl.arange(0, head_width)
    tokens_64 = first_row + tokens
    q_pointers = query + (tokens_64 * query_token + heads * query_head)[:, None] * unit
    q_mask = owned[:, None]
    if padded:
        q_mask = q_mask & (dims < head_size * 8)[None, :]
    q = tl.load(q_pointers + dims[None, :], mask=q_mask, other=0.0)
    if wide:
        q = widened(q)
    row_slopes = 0.0
    if not folded:
        row_slopes = tl.load(slopes + heads, mask=owned, other=0.0)

    # Keys that some row sees, and keys that all rows see.
    context = seq_len - query_len
    last_token = first_token + tokens_of(first_head + tile_rows - 1, reciprocal)
    last_position = context + tl.minimum(last_token, query_len - 1)
    first_position = context + first_token
    first_key = 0
    first_full = 0
    end_key = seq_len
    end_full = seq_len
    if causal:
        end_key = tl.minimum(seq_len, tl.maximum(last_position + 1, 0))
        end_full = tl.minimum(seq_len, tl.maximum(first_position + 1, 0))
    if windowed:
        first_key = tl.maximum(first_position - window + 1, 0)
        first_full = tl.maximum(last_position - window + 1, 0)
    end_tile = (end_key + tile_keys - 1) // tile_keys
    # Every row sees every key of the tiles between these two.
    full_start = tl.minimum((first_full + tile_keys - 1) // tile_keys, end_tile)
    full_end = end_full // tile_keys

    acc = tl.zeros([tile_rows, v_head_width], tl.float32)
    top = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    state = (acc, top, total, pages)
    visible = (first_position, item, reciprocal, causal, seq_len, first_key, end_key, window)
    cache = (
        pages_of,
        k_cache + kv_head.to(tl.int64) * k_head * cache_unit,
        v_cache + kv_head.to(tl.int64) * v_head * cache_unit,
        k_block,
        k_token,
        v_block,
        v_token,
        head_size * 8,
        v_head_size * 8,
        log2_block,
    )
    scoring = (factor, cap, row_slopes)
    if windowed:
        state = _walk(
            state,
            q,
            first_tile,
            full_start,
            visible,
            cache,
            scoring,
            True,
            windowed,
            folded,
            one_layout,
            padded,
            cache_unit,
            tile_rows,
            tile_keys,
            block_size,
            head_width,
            v_head_width,
            wide,
        )
        first_tile = tl.maximum(full_start, first_tile)
    state = _walk(
        state,
        q,
        first_tile,
        full_end,
        visible,
        cache,
        scoring,
        False,
        windowed,
        folded,
        one_layout,
        padded,
        cache_unit,
        tile_rows,
        tile_keys,
        block_size,
        head_width,
        v_head_width,
        wide,
    )
    state = _walk(
        state,
        q,
        tl.maximum(first_tile, full_end),
        end_tile,
        visible,
        cache,
        scoring,
        True,
        windowed,
        folded,
        one_layout,
        padded,
        cache_unit,
        tile_rows,
        tile_keys,
        block_size,
        head_width,
        v_head_width,
        wide,
    )
    acc, top, total, pages = state
    # Loaded again, so that no register holds what follows from it during the loops.
    first_head = tl.load(item + 5, volatile=True)
    tokens, heads = _places(first_token, first_head, kv_head, group_size, reciprocal, tile_rows)
    owned = tokens < query_len
    tokens_64 = first_row + tokens
    if write_lse:
        lse_rows = tokens_64 * lse_token + heads * lse_head
        tl.store(lse + lse_rows, log2_sum(top, total) * LN_2, mask=owned)
    if has_sinks:
        sink = tl.load(sinks + heads, mask=owned, other=0.0)
        total = with_sink(total, top, sink)
    result = normalised(acc, total)
    if quantised:
        result *= v_scale
    v_dims = tl.arange(0, v_head_width)
    out_pointers = out + (tokens_64 * out_token + heads * out_head)[:, None] * unit
    out_mask = owned[:, None]
    if padded:
        out_mask = out_mask & (v_dims < v_head_size * 8)[None, :]
    tl.store(
        out_pointers + v_dims[None, :], rounded(result, out.dtype.element_ty, wide), mask=out_mask
    )
