"""Parts of tensors that backends read and write: the same memory wherever possible."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def part_of(buffer: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The buffer, or a new one if it is too small, and its first elements in this shape."""
    size = math.prod(shape)
    if buffer.numel() < size:
        buffer = torch.empty(size, dtype=buffer.dtype, device=buffer.device)
    return buffer, buffer[:size].view(shape)


def take_rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """These rows: a view of consecutive ones, a copy of others."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def put_rows(out: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    """Write ``values``, ``[S, R, ...]``, to their ``S * R`` rows of ``out``."""
    if isinstance(rows, slice):
        split(out[rows], 0, values.shape[0], -1).copy_(values)
    else:
        out.index_copy_(0, rows, values.flatten(0, 1).to(out.dtype))


def split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """The same memory with one dimension made several, whatever the strides."""
    return tensor.view(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
