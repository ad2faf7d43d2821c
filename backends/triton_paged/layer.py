"""What the kernels are told about a layer, the same in every call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.attention import AttentionSpec, KVCacheSpec
from .planning import Geometry
from .tiles import (
    DecodeTiles,
    PrefillTiles,
    TritonOptions,
    decode_rows,
    decode_tiles,
    prefill_tiles,
)

#: Strides and head sizes are given to the kernels in units of 16 bytes or more, so that the
#: compiler knows how they are aligned.
UNIT = 8
_LONGEST_WINDOW = 1 << 30
#: Widths that kernels are compiled for: a smaller head takes the smallest, the rest masked.
_LEAST_WIDTH = 64
#: The block size that the kernels know when they are compiled; all others share a kernel.
_COMPILED_BLOCK_SIZE = 16

#: Triton's default for this is not the same in all versions.
COMPILER_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class LayerConstants:
    """Tiles and arguments of the kernels.

    Attributes:
        prefill_tiles, decode_tiles: chosen, or from the options.
        rows: of a decode tile.
        scores: ``factor`` and ``cap`` of the kernels.
        sizes: head counts and sizes, window, ``causal``.
        slopes: ALiBi slopes in base 2, ``[N]`` float32 on the device; 0 without.
        no_sinks: sinks of no weight, ``[N]``.
        no_lse: takes the place of an LSE that is not asked for.
        prefill, decode: what is compiled into the kernels, and launch options.
    """

    prefill_tiles: PrefillTiles
    decode_tiles: DecodeTiles
    rows: int
    scores: tuple[float, float]
    sizes: tuple[int, ...]
    slopes: Tensor
    no_sinks: Tensor
    no_lse: Tensor
    prefill: dict[str, Any]
    decode: dict[str, Any]


def layer_constants(
    spec: AttentionSpec,
    cache: KVCacheSpec,
    device: torch.device,
    options: TritonOptions,
    interpreted: bool,
) -> LayerConstants:
    """Work out everything that does not change from call to call.

    Args:
        spec, cache, device: the layer.
        options: tiles, if not the usual ones.
        interpreted: whether the kernels run in Triton's interpreter.
    """
    quantised = cache.dtype.itemsize == 1
    mixed = spec.dtype != cache.dtype and not quantised
    wide = interpreted or mixed
    width = kernel_width(spec.head_size)
    v_width = kernel_width(spec.v_head_size)
    exact = torch.float32 if mixed else spec.dtype
    larger = max(width, v_width)
    rows = decode_rows(spec.group_size, larger, exact)
    prefill = options.prefill or prefill_tiles(larger, exact)
    decode = options.decode or decode_tiles(larger, rows, exact)
    cap, slopes = spec.logits_soft_cap, spec.alibi_slopes
    log2_e = math.log2(math.e)
    doubles = torch.tensor(slopes or (0.0,) * spec.num_heads, dtype=torch.float64) * log2_e
    block_size = cache.block_size
    shared = {
        "head_width": width,
        "v_head_width": v_width,
        "wide": wide,
        "folded": cap is None and slopes is None and spec.scale > 0,
        "padded": (width, v_width) != (spec.head_size, spec.v_head_size),
        "block_size": block_size if block_size == _COMPILED_BLOCK_SIZE else 0,
        "has_sinks": spec.sinks,
        "quantised": quantised,
    }
    thread_elements = rows * v_width // (32 * decode.num_warps)
    return LayerConstants(
        prefill_tiles=prefill,
        decode_tiles=decode,
        rows=rows,
        scores=(
            spec.scale * log2_e if cap is None else spec.scale / cap,
            0.0 if cap is None else cap * log2_e,
        ),
        sizes=(
            spec.num_kv_heads,
            spec.group_size,
            group_reciprocal(spec.group_size),
            spec.head_size // UNIT,
            spec.v_head_size // UNIT,
            min(spec.sliding_window or _LONGEST_WINDOW, _LONGEST_WINDOW),
            int(spec.causal),
        ),
        slopes=doubles.to(torch.float32).to(device),
        no_sinks=torch.full((spec.num_heads,), -torch.inf, device=device),
        no_lse=torch.zeros(1, device=device),
        prefill=shared
        | _launch_options(prefill)
        | {
            "windowed": spec.sliding_window is not None,
            "tile_rows": prefill.rows,
            "tile_keys": prefill.keys,
        },
        decode=shared
        | _launch_options(decode)
        | {
            "tile_rows": rows,
            "tile_keys": decode.keys,
            "loads_at_once": 4 if thread_elements <= 16 and not interpreted else 1,
        },
    )


def geometry_of(
    constants: LayerConstants, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
) -> Geometry:
    """How the work of the layer is cut."""
    prefill, decode = constants.prefill_tiles, constants.decode_tiles
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    resident = max(1, processors * decode.resident // spec.num_kv_heads)
    return Geometry(
        causal=spec.causal,
        sliding_window=spec.sliding_window,
        block_size=cache.block_size,
        group_size=spec.group_size,
        prefill_rows=prefill.rows,
        prefill_keys=prefill.keys,
        decode_rows=constants.rows,
        decode_keys=decode.keys,
        chunk_keys=decode.chunk_keys,
        max_chunks=decode.max_chunks,
        group_chunks=decode.group_chunks,
        resident=resident,
        programs=resident * decode.rounds,
    )


def group_reciprocal(group_size: int) -> int:
    """A factor that divides by the group size, up to 128, in a product shifted by 16 bits.

    The product is too large by less than ``rows / 2**16`` of the quotient's last unit: exact for
    row numbers below ``2**16 / group_size``, and a tile has at most ``group_size - 1 + 256``.
    """
    return (1 << 16) // group_size + 1


def kernel_width(head_size: int) -> int:
    """The width that the kernels are compiled for, at least the head size."""
    return max(_LEAST_WIDTH, _power_of_two(head_size))


def _power_of_two(size: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


def _launch_options(tiles: PrefillTiles | DecodeTiles) -> dict[str, int]:
    """How the compiler is to build a kernel for these tiles."""
    options = COMPILER_OPTIONS | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    return options
