"""Device functions that the attention kernels share.

Softmax is computed in base 2: scores carry the factor ``log2(e)``, which costs nothing because it
is folded into the scale, and ``exp2`` is what the hardware computes.

In Triton's interpreter (numpy) arithmetic on bfloat16 is wrong, a conversion to it or to 8 bits
truncates, and conversions lose NaN and the smallest numbers. There, ``wide`` makes the kernels
compute in float32, and ``widened`` and ``rounded`` convert by hand. ``quantised`` does so
everywhere: devices before compute capability 8.9 have no 8-bit floating point.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

#: Arguments of both attention kernels that compile nothing, whatever their value.
NUMBERS = [
    "factor",
    "cap",
    "v_scale",
    "query_token",
    "query_head",
    "out_token",
    "out_head",
    "lse_token",
    "lse_head",
    "k_block",
    "k_token",
    "k_head",
    "v_block",
    "v_token",
    "v_head",
    "num_kv_heads",
    "group_size",
    "reciprocal",
    "head_size",
    "v_head_size",
    "window",
    "causal",
    "write_lse",
    "log2_block",
]

#: Whether the kernels run in the interpreter. Triton decides that when it is imported itself, for
#: its own functions, and when this module is, for ours.
INTERPRETED: bool = triton.knobs.runtime.interpret and not isinstance(tl.max, triton.JITFunction)


@triton.jit
def hyperbolic_tangent(x):
    """``tanh``: from ``exp`` where the result is far from 0, else by its series.

    The interpreter has no ``tanh`` of its own.
    """
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    # The next term of the series is below 1e-9 of the first for |x| < 0.25.
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    return tl.where(size < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def finished_scores(products, factor, cap, slopes, distance):
    """Scores in base 2 from the dot products, where more than a positive factor is to be applied.

    Args:
        products: ``[rows, keys]``, float32.
        factor: what makes them scores in base 2; with a soft cap: scores over the cap.
        cap: soft cap of scores in base 2; 0 is none.
        slopes: ALiBi slope of each row in base 2, ``[rows]``; 0 is none.
        distance: row minus key position, ``[rows, keys]``, int32.
    """
    scores = products * factor
    if cap > 0.0:
        scores = hyperbolic_tangent(scores) * cap
    return scores - slopes[:, None] * distance.to(tl.float32)


@triton.jit
def tokens_of(rows, reciprocal):
    """``rows // group_size`` for few rows, without a division; see ``group_reciprocal``."""
    return (rows * reciprocal) >> 16


@triton.jit
def index_of_block(tile, columns, tile_keys: tl.constexpr, block_size: tl.constexpr, log2_block):
    """Index in the block table of each key of a tile.

    Tiles and blocks are powers of two, so that one is made of whole ones of the other. With a block
    size that the compiler knows, all that changes from tile to tile is the same for all keys. Past
    the keys of a sequence the block table holds anything: an id from there must only reach masked
    loads.

    Args:
        tile: number of the tile.
        columns: of the tile, ``arange(tile_keys)``.
        block_size: if it is compiled in, else 0: then ``log2_block`` tells it.
    """
    # The compiler leaves out a branch that a constant decides, but not what follows a return in it.
    if block_size == 0:
        index = (tile * tile_keys + columns) >> log2_block
    elif tile_keys >= block_size:
        index = tile * (tile_keys // block_size) + columns // block_size
    else:
        index = tile // (block_size // tile_keys) + columns // block_size
    return index


@triton.jit
def offset_in_block(tile, columns, tile_keys: tl.constexpr, block_size: tl.constexpr, log2_block):
    """Offset of each key of a tile in its block; arguments as for ``index_of_block``."""
    if block_size == 0:
        offset = (tile * tile_keys + columns) & ((1 << log2_block) - 1)
    elif tile_keys >= block_size:
        offset = columns % block_size
    else:
        offset = tile % (block_size // tile_keys) * tile_keys + columns
    return offset


@triton.jit
def widened(x):
    """``x`` in float32, exactly, in the interpreter too (see above)."""
    if x.dtype == tl.bfloat16:
        result = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float8e4nv:
        bits = x.to(tl.uint8, bitcast=True).to(tl.int32)
        size = bits & 0x7F
        # The exponents are biased by 7 and by 127.
        result = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        result = tl.where(size == 0x7F, float("nan"), tl.where(bits == size, result, -result))
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def as_operand(x, dtype: tl.constexpr, wide: tl.constexpr):
    """Keys or values as the query's dtype, or in float32 if ``wide``; always exact: the cache has
    the dtype, or 8 bits, which fit every dtype of a query."""
    return widened(x) if wide else x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr, wide: tl.constexpr):
    """``x`` in the given dtype, rounded to the nearest, in the interpreter too (see above)."""
    if wide and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        half = tl.where(x == x, nearest, bits | 0x400000) >> 16
        result = half.to(tl.int16).to(dtype, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def quantised(x, scale):
    """``x / scale`` in float8_e4m3fn, as uint8: rounded to nearest, ties to even; the largest
    number, 448, in place of a larger one; NaN stays NaN."""
    x = tl.div_rn(x, scale)
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 3 of 23 bits of the significand are kept; the exponents are biased by 7 and by 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Multiples of 2**-9, which is the unit in the last place of 2**14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def softmax_weights(products, top, total, factor, masked: tl.constexpr):
    """One step of the online softmax (https://arxiv.org/abs/1805.02867).

    Args:
        products: ``[rows, keys]``, float32; ``-inf`` where a row does not see a key.
        top, total: largest score and sum of exponentials so far, ``[rows]``.
        factor: positive; products times it are scores in base 2.
        masked: whether a row may have seen nothing yet.

    Returns:
        Weights, the factor for what was accumulated so far, new top, new total.
    """
    new_top = tl.maximum(top, tl.max(products, 1) * factor)
    base = new_top
    if masked:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(products * factor - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def merged(acc, top, total, more_acc, more_top, more_total):
    """Two softmaxes, not normalised, as one; to merge nothing changes no bit.

    What is a product and what a fused multiply-add is spelt out, so that every kernel that calls
    this rounds alike.

    Args:
        acc, more_acc: accumulated values, ``[rows, v_head_width]``, float32.
        top, more_top: largest scores in base 2, ``[rows]``.
        total, more_total: sums of exponentials relative to them, ``[rows]``.
    """
    new_top = tl.maximum(top, more_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    more_shrink = tl.exp2(more_top - base)
    new_acc = tl.fma(
        acc,
        tl.broadcast_to(shrink[:, None], acc.shape),
        more_acc * more_shrink[:, None],
    )
    return new_acc, new_top, tl.fma(total, shrink, more_total * more_shrink)


@triton.jit
def with_sink(total, top, sink):
    """Sum of exponentials relative to ``top``, the sink's included; natural ``sink``."""
    base = tl.where(top == float("-inf"), 0.0, top)
    return total + tl.exp2(tl.minimum(sink * LOG2_E - base, 126.0))


@triton.jit
def normalised(acc, total):
    """Accumulated values over the sum of weights, 0 for a row that saw nothing."""
    nothing = total == 0.0
    factor = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))
    return acc * factor[:, None]


@triton.jit
def log2_sum(top, total):
    """Base-2 LSE: ``-inf`` for a row that saw nothing."""
    return top + tl.log2(tl.where(total == 0.0, 1.0, total))
