"""Checks of the tensors that the backend is given, and their strides as the kernels want them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...core.attention import AttentionSpec, KVCache, KVCacheSpec, dtype_name
from .layer import UNIT

# Places in a cache are counted in units, in 32 bits.
_MOST_UNITS = (1 << 31) - 1


@dataclass(frozen=True)
class CachePlaces:
    """Where the slots of a cache are, as the kernels want it.

    Attributes:
        unit: elements that the strides count; a power of two that tells how they are aligned.
        strides: of blocks, tokens and heads of the keys, and then of the values.
        log2_block: of the tokens of a block.
    """

    unit: int
    strides: tuple[int, ...]
    log2_block: int


def check_sinks_kind(sinks: Tensor, spec: AttentionSpec) -> None:
    """Refuse sinks that the kernels cannot read.

    Raises:
        ValueError: they are of another shape or dtype, or not contiguous.
    """
    if not (
        sinks.shape == (spec.num_heads,)
        and dtype_name(sinks.dtype) == "float32"
        and sinks.is_contiguous()
    ):
        raise ValueError(
            f"sinks must be a contiguous float32 tensor ({spec.num_heads},), not "
            f"{dtype_name(sinks.dtype)} {tuple(sinks.shape)} with strides {sinks.stride()}"
        )


def cache_places(cache: KVCache, spec: KVCacheSpec) -> CachePlaces:
    """Where the slots of a cache are, in units of 16 bytes or of ``UNIT`` elements.

    Raises:
        ValueError: a tensor has another dtype, shape or order than was promised, or is too large.
    """
    result: list[int] = []
    shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads)
    for tensor, size in ((cache.k, spec.head_size), (cache.v, spec.v_head_size)):
        block, token, head, element = tensor.stride()
        aligned = not (block % UNIT or token % UNIT or head % UNIT)
        same = tensor.shape == (*shape, size) and tensor.dtype == spec.dtype
        if not same or element != 1 or not aligned:
            raise ValueError(
                f"the backend was built for a {dtype_name(spec.dtype)} cache of shape "
                f"{(*shape, size)} with contiguous heads and other strides that are multiples of "
                f"{UNIT}, not for a {dtype_name(tensor.dtype)} one of shape {tuple(tensor.shape)} "
                f"and strides {tensor.stride()}"
            )
        if shape[0] * block > _MOST_UNITS * UNIT:
            raise ValueError(
                f"the backend addresses at most {_MOST_UNITS * UNIT} elements of a cache tensor, "
                f"not {shape[0]} blocks of {block}"
            )
        result += [block, token, head]
    wide = 2 * UNIT
    sizes = (*result, spec.head_size, spec.v_head_size)
    fits = spec.dtype.itemsize == 1 and not any(number % wide for number in sizes)
    unit = wide if fits else UNIT
    strides = tuple(number // unit for number in result)
    return CachePlaces(unit, strides, spec.block_size.bit_length() - 1)


def row_strides(first: Tensor, second: Tensor) -> tuple[int, tuple[int, ...]]:
    """A unit, ``UNIT`` or 1, and strides of the rows and heads of both tensors in that unit.

    Raises:
        ValueError: the elements of a head are not contiguous.
    """
    if first.stride(2) != 1 or second.stride(2) != 1:
        raise ValueError(
            f"the elements of a head must be contiguous, but the strides are {first.stride()} and "
            f"{second.stride()}"
        )
    strides = (*first.stride()[:2], *second.stride()[:2])
    unit = 1 if any(stride % UNIT for stride in strides) else UNIT
    return unit, tuple(stride // unit for stride in strides)
