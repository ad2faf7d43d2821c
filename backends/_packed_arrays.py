"""The small arrays of a plan in one tensor, so that a step copies them to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# Every array starts on such a border, which suits any dtype.
_ALIGNMENT = 16


class PackedArrays:
    """Arrays that were given as numpy arrays and live in one buffer on a device.

    Attributes:
        tensors: the arrays on the device, in the order in which they were given. They stay the same
            memory when they are replaced, as a captured CUDA graph needs.
    """

    def __init__(self, arrays: Sequence[Array], device: torch.device) -> None:
        """
        Args:
            arrays: bool, int32, int64 or float32, of any shape.
            device: where they go. They are copied without waiting for it.
        """
        self._kinds = [(array.dtype, array.shape) for array in arrays]
        ends = np.cumsum([0, *(_padded(array.nbytes) for array in arrays)]).tolist()
        self._places = ends[:-1]
        self._buffer = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        self.tensors: tuple[Tensor, ...] = tuple(
            self._buffer[place : place + array.nbytes]
            .view(torch.from_numpy(array[:0]).dtype)
            .view(array.shape)
            for place, array in zip(self._places, arrays, strict=True)
        )
        self.replace(arrays)

    def replace(self, arrays: Sequence[Array]) -> None:
        """Put other arrays of the same dtypes and shapes in their place, in one copy.

        Raises:
            ValueError: a dtype or a shape is another one.
        """
        kinds = [(array.dtype, array.shape) for array in arrays]
        if kinds != self._kinds:
            raise ValueError(f"arrays of {self._kinds} cannot be replaced by arrays of {kinds}")
        on_gpu = self._buffer.device.type == "cuda"
        # The allocator of pinned memory gives a piece away again only after its copy.
        host = torch.empty(self._buffer.shape, dtype=torch.uint8, pin_memory=on_gpu)
        memory = host.numpy()
        for place, array in zip(self._places, arrays, strict=True):
            memory[place : place + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self._buffer.copy_(host, non_blocking=on_gpu)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
