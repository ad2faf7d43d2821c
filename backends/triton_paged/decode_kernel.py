"""Attention of a few query rows over many keys: decoding, the keys spread over programs."""

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
    merged,
    normalised,
    offset_in_block,
    rounded,
    softmax_weights,
    tokens_of,
    widened,
    with_sink,
)


@triton.jit
def _put(partials, slot, acc, top, total, owned, inside):
    """Write a partial result to its slot; ``partials`` as for ``_folded``."""
    out, sums, own_rows, rows_apart, row_size = partials
    rows = own_rows + slot.to(tl.int64) * rows_apart
    tl.store(sums + rows * 2, top, mask=owned)
    tl.store(sums + rows * 2 + 1, total, mask=owned)
    tl.store(out[None, :] + rows[:, None] * row_size, acc, mask=inside)


@triton.jit
def _is_last(place, number):
    """Count a program that has written a partial result: is it the last of so many?

    If so, all that the others have written can be read, and the count is 0 again.
    """
    tl.debug_barrier()
    last = tl.atomic_add(place, 1, sem="acq_rel") == number - 1
    if last:
        tl.store(place, 0)
    return last


@triton.jit
def _folded(
    partials, first_slot, number, slots_apart, owned, inside, like, loads_at_once: tl.constexpr
):
    """Partial results of some slots as one, merged in their order.

    Args:
        partials: places of the elements of the first row; sums; number of each row in the first
            slot; rows from slot to slot; elements of a row.
        like: of the shape of the result.
    """
    out, sums, own_rows, rows_apart, row_size = partials
    acc = tl.zeros(like.shape, tl.float32)
    total = tl.zeros([like.shape[0]], tl.float32)
    top = total + float("-inf")
    limit = tl.where(owned, number, 0)
    for start in tl.range(0, number, loads_at_once, num_stages=1):
        loaded = ()
        for index in tl.static_range(loads_at_once):
            slot = first_slot + (start + index) * slots_apart
            rows = own_rows + slot.to(tl.int64) * rows_apart
            there = start + index < limit
            more_acc = tl.load(
                out[None, :] + rows[:, None] * row_size, mask=there[:, None] & inside, other=0.0
            )
            more_top = tl.load(sums + rows * 2, mask=there, other=float("-inf"))
            more_total = tl.load(sums + rows * 2 + 1, mask=there, other=0.0)
            loaded += ((more_acc, more_top, more_total),)  # type: ignore[assignment]
        for index in tl.static_range(loads_at_once):
            more_acc, more_top, more_total = loaded[index]
            acc, top, total = merged(acc, top, total, more_acc, more_top, more_total)
    return acc, top, total


@triton.jit(do_not_specialize=[*NUMBERS, "slot_rows"])
def decode_kernel(
    query,
    k_cache,
    v_cache,
    out,
    lse,
    sinks,
    slopes,
    items,
    table,
    partial_out,
    partial_sums,
    arrivals,
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
    slot_rows,
    unit: tl.constexpr,
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
    loads_at_once: tl.constexpr,
):
    """Items of one key/value head, one after the other; the grid is ``(programs * num_kv_heads,)``.

    The first item of a program has its number, and each item names the next one. All rows of a
    sequence and head fit one tile: row ``r`` is head ``r % group_size`` of token
    ``r // group_size``. The keys of an item are folded chunk by chunk: a softmax of each, begun
    anew, is merged into that of the item. Of the items of a group, and then of the groups of a
    sequence, the last one to be finished folds them all, in their order: whichever it is, the
    result is the same.

    Args:
        items: ``[items, 16]``, see ``planning``.
        partial_out: ``[slots, num_kv_heads, slot_rows, v_head_size]``, float32: the unnormalised
            output of an item or, in its first slot, of a group.
        partial_sums: ``[slots, num_kv_heads, slot_rows, 2]``, float32: its largest score and sum of
            weights.
        arrivals: ``[slots, num_kv_heads, 2]``, int32: finished items of the group and groups of the
            sequence that begin at a slot; 0 before and after.
        loads_at_once: partial results that are loaded before the first of them is used.

    The other arguments are those of ``prefill_kernel``.
    """
    program = tl.program_id(0)
    kv_head = program % num_kv_heads
    packed = tl.arange(0, tile_rows)
    tokens = tokens_of(packed, reciprocal)
    heads = kv_head * group_size + packed - tokens * group_size
    columns = tl.arange(0, tile_keys)
    dims = tl.arange(0, head_width)
    v_dims = tl.arange(0, v_head_width)
    k_columns = k_cache + kv_head.to(tl.int64) * k_head * cache_unit + dims
    v_columns = v_cache + kv_head.to(tl.int64) * v_head * cache_unit + v_dims
    k_inside = (dims < head_size * 8)[None, :]
    v_inside = (v_dims < v_head_size * 8)[None, :]

    index = program // num_kv_heads
    more = True
    while more:
        item = items + index * 16
        first_row = tl.load(item).to(tl.int64)
        query_len = tl.load(item + 1)
        seq_len = tl.load(item + 2)
        pages_of = table + tl.load(item + 3)
        first = tl.load(item + 4)
        end = tl.load(item + 5)
        slot = tl.load(item + 6)
        index = tl.load(item + 7)
        chunk_tiles = tl.load(item + 8)
        group_slot = tl.load(item + 9)
        group_slots = tl.load(item + 10)
        sequence_slot = tl.load(item + 11)
        num_groups = tl.load(item + 12)
        slots_apart = tl.load(item + 13)
        more = index > 0

        pages = tl.load(
            pages_of + index_of_block(first, columns, tile_keys, block_size, log2_block)
        )
        owned = tokens < query_len
        position = seq_len - query_len + tokens
        last_visible = tl.zeros([tile_rows], tl.int32) + (end - 1)
        if causal:
            last_visible = tl.minimum(last_visible, position)
        first_visible = tl.maximum(seq_len - query_len - window + 1, 0)
        tokens_64 = first_row + tokens
        q_pointers = query + (tokens_64 * query_token + heads * query_head)[:, None] * unit
        q_mask = owned[:, None]
        if padded:
            q_mask = q_mask & k_inside
        q = tl.load(q_pointers + dims[None, :], mask=q_mask, other=0.0)
        if wide:
            q = widened(q)
        row_slopes = 0.0
        if not folded:
            row_slopes = tl.load(slopes + heads, mask=owned, other=0.0)

        acc = tl.zeros([tile_rows, v_head_width], tl.float32)
        top = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        chunk_acc = tl.zeros([tile_rows, v_head_width], tl.float32)
        chunk_top = tl.full([tile_rows], float("-inf"), tl.float32)
        chunk_total = tl.zeros([tile_rows], tl.float32)
        left = chunk_tiles
        for tile in range(first, (end + tile_keys - 1) // tile_keys):
            keys = tile * tile_keys + columns
            in_block = offset_in_block(tile, columns, tile_keys, block_size, log2_block)
            k_rows = pages * k_block + in_block * k_token
            v_rows = k_rows if one_layout else pages * v_block + in_block * v_token
            pages = tl.load(
                pages_of + index_of_block(tile + 1, columns, tile_keys, block_size, log2_block)
            )
            seen = (keys < end) & (keys >= first_visible)
            k_mask = seen[:, None]
            if padded:
                k_mask = k_mask & k_inside
            k_pointers = k_columns[None, :] + (k_rows.to(tl.int64) * cache_unit)[:, None]
            k = tl.load(k_pointers, mask=k_mask, other=0.0)
            k = as_operand(k, q.dtype, wide)
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            if not folded:
                distance = position[:, None] - keys[None, :]
                products = finished_scores(products, factor, cap, row_slopes, distance)
            visible = keys[None, :] <= last_visible[:, None]
            visible &= keys[None, :] > (position - window)[:, None]
            products = tl.where(visible, products, float("-inf"))
            weights, shrink, chunk_top, chunk_total = softmax_weights(
                products, chunk_top, chunk_total, factor if folded else 1.0, True
            )
            chunk_acc = chunk_acc * shrink[:, None]
            v_mask = seen[:, None]
            if padded:
                v_mask = v_mask & v_inside
            v_pointers = v_columns[None, :] + (v_rows.to(tl.int64) * cache_unit)[:, None]
            v = tl.load(v_pointers, mask=v_mask, other=0.0)
            v = as_operand(v, q.dtype, wide)
            chunk_acc = tl.dot(weights.to(v.dtype), v, chunk_acc, input_precision="ieee")
            left -= 1
            if left == 0:
                acc, top, total = merged(acc, top, total, chunk_acc, chunk_top, chunk_total)
                chunk_acc = tl.zeros([tile_rows, v_head_width], tl.float32)
                chunk_top = tl.full([tile_rows], float("-inf"), tl.float32)
                chunk_total = tl.zeros([tile_rows], tl.float32)
                left = chunk_tiles
        # The rest of the last chunk; merging nothing changes nothing.
        acc, top, total = merged(acc, top, total, chunk_acc, chunk_top, chunk_total)

        inside = owned[:, None]
        if padded:
            inside = inside & v_inside
        complete = slot < 0
        if slot >= 0:
            partials = (
                partial_out + v_dims,
                partial_sums,
                kv_head * slot_rows + packed,
                num_kv_heads * slot_rows,
                v_head_size * 8,
            )
            _put(partials, slot, acc, top, total, owned, inside)
            group_is_complete = group_slots == 1
            if group_slots > 1:
                place = arrivals + (group_slot * num_kv_heads + kv_head) * 2
                group_is_complete = _is_last(place, group_slots)
                if group_is_complete:
                    acc, top, total = _folded(
                        partials, group_slot, group_slots, 1, owned, inside, acc, loads_at_once
                    )
                    if num_groups > 1:
                        # All threads have read the slot that is written now.
                        tl.debug_barrier()
                        _put(partials, group_slot, acc, top, total, owned, inside)
            complete = group_is_complete & (num_groups == 1)
            if group_is_complete & (num_groups > 1):
                place = arrivals + (sequence_slot * num_kv_heads + kv_head) * 2 + 1
                complete = _is_last(place, num_groups)
                if complete:
                    acc, top, total = _folded(
                        partials,
                        sequence_slot,
                        num_groups,
                        slots_apart,
                        owned,
                        inside,
                        acc,
                        loads_at_once,
                    )
        if complete:
            if write_lse:
                lse_rows = tokens_64 * lse_token + heads * lse_head
                tl.store(lse + lse_rows, log2_sum(top, total) * LN_2, mask=owned)
            if has_sinks:
                sink = tl.load(sinks + heads, mask=owned, other=0.0)
                total = with_sink(total, top, sink)
            result = normalised(acc, total)
            if quantised:
                result *= v_scale
            out_pointers = out + (tokens_64 * out_token + heads * out_head)[:, None] * unit
            tl.store(
                out_pointers + v_dims[None, :],
                rounded(result, out.dtype.element_ty, wide),
                mask=inside,
            )
