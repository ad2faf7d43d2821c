"""Tile shapes: fixed for each head size and dtype, never chosen by the batch.

A result must not depend on the batch that a sequence is in, so nothing here may; and nothing is
tried out at run time, so that a first call costs one compilation.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ...core.options import PartOptions

#: Rows of a decode tile: what the matrix unit takes at least, and a group of heads.
MIN_DECODE_ROWS = 16


class Tiles(BaseModel):
    """What a kernel works on at a time, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: int = Field(ge=16, le=256, description="Keys of a tile, a power of two.")
    num_warps: int = Field(ge=1, le=16, description="Warps of a program, a power of two.")
    num_stages: int = Field(ge=1, le=8, description="Tiles in flight, one less than this.")
    max_registers: int | None = Field(
        default=None, ge=32, le=255, description="Registers of a thread; None lets the compiler."
    )

    @field_validator("keys", "num_warps")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is no power of two")
        return value


class PrefillTiles(Tiles):
    """Tiles of the prefill kernel."""

    rows: int = Field(ge=16, le=256, description="Query rows times heads, a power of two.")

    @field_validator("rows")
    @classmethod
    def _rows_power_of_two(cls, value: int) -> int:
        return cls._power_of_two(value)


class DecodeTiles(Tiles):
    """Tiles of the decode kernel, and how the keys of sequences are spread over programs."""

    chunk_keys: int = Field(
        default=256,
        ge=16,
        description="Keys that a program takes at least: a chunk.",
    )
    group_chunks: int = Field(
        default=4,
        ge=1,
        description="Chunks that a program takes where that is enough to keep the device busy.",
    )
    max_chunks: int = Field(
        default=128, ge=1, le=128, description="Chunks of a sequence; longer ones get longer ones."
    )
    resident: int = Field(
        default=4, ge=1, description="Programs that a multiprocessor runs at a time."
    )
    rounds: int = Field(
        default=1, ge=1, description="Programs of a launch, in multiples of the resident ones."
    )


class TritonOptions(PartOptions):
    """Tile shapes, for tuning: the defaults are chosen by head size and dtype."""

    prefill: PrefillTiles | None = Field(default=None, description="Tiles of the prefill kernel.")
    decode: DecodeTiles | None = Field(default=None, description="Tiles of the decode kernel.")


def prefill_tiles(width: int, dtype: torch.dtype) -> PrefillTiles:
    """Tiles of the prefill kernel: as large as registers allow.

    Args:
        width: the larger head size, rounded up to a power of two.
        dtype: of the arithmetic.
    """
    if dtype == torch.float32:
        # No matrix unit multiplies float32 exactly: the registers hold both operands.
        if width <= 64:
            return PrefillTiles(rows=64, keys=32, num_warps=8, num_stages=2)
        if width <= 128:
            return PrefillTiles(rows=32, keys=16, num_warps=8, num_stages=2)
        return PrefillTiles(rows=16, keys=16, num_warps=8, num_stages=2)
    if width <= 128:
        # Two programs fit a multiprocessor: one computes while the other waits for its first keys.
        return PrefillTiles(rows=128, keys=64, num_warps=8, num_stages=2, max_registers=128)
    return PrefillTiles(rows=128, keys=32, num_warps=8, num_stages=2)


def decode_rows(rows: int, width: int, dtype: torch.dtype) -> int:
    """Rows of a decode tile, of few sizes: sequences with more rows are prefilled, unsplit.

    Args:
        rows: of one query token: the group size.
        width: the larger head size, rounded up to a power of two.
        dtype: of the arithmetic.
    """
    if rows <= MIN_DECODE_ROWS:
        return MIN_DECODE_ROWS
    if dtype == torch.float32:
        return 32 if width <= 128 else MIN_DECODE_ROWS
    return 64 if rows <= 64 or width > 128 else 128


def decode_tiles(width: int, rows: int, dtype: torch.dtype) -> DecodeTiles:
    """Tiles of the decode kernel.

    Args:
        width: the larger head size, rounded up to a power of two.
        rows: of a tile.
        dtype: of the arithmetic.
    """
    if dtype == torch.float32:
        return DecodeTiles(keys=32, num_warps=4, num_stages=2)
    if width > 128:
        return DecodeTiles(keys=32, num_warps=8, num_stages=3, resident=2)
    if rows > MIN_DECODE_ROWS:
        return DecodeTiles(keys=64, num_warps=8, num_stages=3, resident=2)
    # Chunks of 128 keys spread a single sequence over twice the programs at no cost to many.
    return DecodeTiles(
        keys=64, num_warps=4, num_stages=2, max_registers=128, chunk_keys=128, group_chunks=8
    )
