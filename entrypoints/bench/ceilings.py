"""What the device does at most, measured in the same run as what is compared with it."""

from __future__ import annotations

import torch

from .clock import Clock
from .results import Ceilings

_CUDA_BYTES, _CPU_BYTES = 1 << 32, 1 << 28
_CUDA_SIZE, _CPU_SIZE = 8192, 1024


def measure_ceilings(clock: Clock, dtype: torch.dtype) -> Ceilings:
    """Copy and read a large tensor, multiply two large square matrices of random numbers.

    On CUDA 4 GiB, or a quarter of the free memory if that is less, and 8192 rows; on a CPU 256 MiB
    and 1024 rows.
    """
    device = clock.device
    num_bytes, size = _CPU_BYTES, _CPU_SIZE
    if device.type == "cuda":
        num_bytes = min(_CUDA_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
        size = _CUDA_SIZE
    source = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device).normal_()
    target = torch.empty_like(source)
    copied = clock.seconds(lambda: target.copy_(source))
    read = clock.seconds(source.sum)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = clock.seconds(lambda: a @ b)
    return Ceilings(2 * source.nbytes / copied, source.nbytes / read, 2 * size**3 / product)
