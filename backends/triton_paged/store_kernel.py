"""Writing new keys and values to the paged cache."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from .device_code import quantised, rounded, widened


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "key_token",
        "key_head",
        "value_token",
        "value_head",
        "k_block",
        "k_token",
        "k_head",
        "v_block",
        "v_token",
        "v_head",
        "head_size",
        "v_head_size",
        "log2_block",
        "k_scale",
        "v_scale",
    ]
)
def store_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slots,
    num_tokens,
    key_token,
    key_head,
    value_token,
    value_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    head_size,
    v_head_size,
    log2_block,
    k_scale,
    v_scale,
    unit: tl.constexpr,
    cache_unit: tl.constexpr,
    tile_tokens: tl.constexpr,
    head_width: tl.constexpr,
    v_head_width: tl.constexpr,
    convert: tl.constexpr,
    quantise: tl.constexpr,
):
    """Store some tokens of one head; the grid is ``(token tiles, num_kv_heads)``.

    Args:
        slots: ``[num_tokens]``, int64; a negative one stores nothing.
        key_token ... value_head: strides in units of ``unit`` elements.
        k_block ... v_head: strides in units of ``cache_unit`` elements, like the head sizes.
        k_scale, v_scale: see ``KVCache``.
        convert: whether the cache has another dtype.
        quantise: whether that is float8_e4m3fn, given as uint8.
    """
    tokens = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    stored = slot >= 0
    block = slot >> log2_block
    offset = slot & ((1 << log2_block) - 1)
    tokens_64 = tokens.to(tl.int64)

    dims = tl.arange(0, head_width)
    mask = stored[:, None] & (dims < head_size * cache_unit)[None, :]
    source = (tokens_64 * key_token + head * key_head)[:, None] * unit + dims[None, :]
    target = (block * k_block + offset * k_token + head * k_head)[:, None] * cache_unit + dims[
        None, :
    ]
    new = tl.load(key + source, mask=mask)
    if quantise:
        new = quantised(widened(new), k_scale)
    elif convert:
        new = rounded(widened(new), k_cache.dtype.element_ty, True)
    tl.store(k_cache + target, new, mask=mask)

    dims = tl.arange(0, v_head_width)
    mask = stored[:, None] & (dims < v_head_size * cache_unit)[None, :]
    source = (tokens_64 * value_token + head * value_head)[:, None] * unit + dims[None, :]
    target = (block * v_block + offset * v_token + head * v_head)[:, None] * cache_unit + dims[
        None, :
    ]
    new = tl.load(value + source, mask=mask)
    if quantise:
        new = quantised(widened(new), v_scale)
    elif convert:
        new = rounded(widened(new), v_cache.dtype.element_ty, True)
    tl.store(v_cache + target, new, mask=mask)
