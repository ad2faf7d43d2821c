"""Launches the kernel that writes new keys and values to a paged cache."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...core.attention import KVCache, KVCacheSpec
from .layer import COMPILER_OPTIONS, kernel_width
from .tensors import CachePlaces, row_strides

_logger = logging.getLogger(__name__)
#: The largest head that a program holds a few tokens of in registers.
MAX_HEAD_SIZE = 1024
_TILE_TOKENS = 4
_KERNEL_DTYPES = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn},
)


class KernelStore:
    """Writes to the caches of one layer shape by a Triton kernel: a launch, whatever the slots."""

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """
        Args:
            spec: the caches.
            device: where they are; a CPU in Triton's interpreter only.
        """
        from .store_kernel import store_kernel

        self._kernel: Any = store_kernel
        self._device = device
        self._spec = spec
        self._compiled = COMPILER_OPTIONS | {
            "tile_tokens": _TILE_TOKENS,
            "head_width": kernel_width(spec.head_size),
            "v_head_width": kernel_width(spec.v_head_size),
            "num_warps": 1,
        }

    def launch_options(self, dtype: torch.dtype) -> dict[str, Any]:
        """What is compiled into the kernel for keys and values of this dtype, but for how they and
        the cache are aligned; and launch options."""
        stored = self._spec.dtype
        quantise = stored == torch.float8_e4m3fn and dtype != stored
        return self._compiled | {"convert": dtype != stored, "quantise": quantise}

    def write(
        self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor, places: CachePlaces
    ) -> None:
        """``AttentionBackend.write_kv`` for at least one slot.

        Args:
            key, value, cache, slot_mapping: as in ``AttentionBackend.write_kv``.
            places: of the cache.

        Raises:
            ValueError: a tensor has fewer rows than there are slots, or its heads are not
                contiguous.
        """
        num_tokens = len(slot_mapping)
        if min(len(key), len(value)) < num_tokens:
            raise ValueError(
                f"{num_tokens} slots, but key has {len(key)} rows and value {len(value)}"
            )
        spec = self._spec
        unit, strides = row_strides(key, value)
        k, v = cache.k, cache.v
        if spec.dtype.itemsize == 1:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        with on_device(self._device):
            self._kernel[(-(-num_tokens // _TILE_TOKENS), spec.num_kv_heads)](
                key,
                value,
                k,
                v,
                slot_mapping,
                num_tokens,
                *strides,
                *places.strides,
                spec.head_size // places.unit,
                spec.v_head_size // places.unit,
                places.log2_block,
                cache.k_scale,
                cache.v_scale,
                unit=unit,
                cache_unit=places.unit,
                **self.launch_options(key.dtype),
            )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever device its arguments are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def kernel_writes(spec: KVCacheSpec, device: torch.device) -> bool:
    """Whether ``KernelStore`` can write to such caches: their device compiles Triton kernels, and
    the kernel has registers for their heads."""
    sizes = max(spec.head_size, spec.v_head_size)
    fits = sizes <= MAX_HEAD_SIZE and spec.dtype in _KERNEL_DTYPES
    return device.type == "cuda" and fits and _compiles(device)


def kernel_reads(key: Tensor, value: Tensor) -> bool:
    """Whether ``KernelStore`` can write these: both of one dtype that the kernel computes with, the
    elements of each head contiguous."""
    return (
        key.dtype == value.dtype
        and key.dtype in _KERNEL_DTYPES
        and key.stride(2) == value.stride(2) == 1
    )


@cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton is there and finds what it needs, such as a C compiler: one launch tells."""
    if find_spec("triton") is None:
        return False
    spec = KVCacheSpec(1, 1, 1, 16, 16, torch.float32)
    new = torch.zeros((1, 1, 16), device=device)
    cache_of_one = KVCache(k=torch.empty_like(new), v=torch.empty_like(new))
    try:
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        KernelStore(spec, device).write(new, new, cache_of_one, slots, by_token_places(new, new))
    # Whatever Triton raises, torch writes as well, only slower.
    except Exception as error:
        _logger.warning(
            "Triton compiles no kernels for %s (%s: %s): torch writes the KV cache, which takes "
            "several launches a layer",
            device,
            type(error).__name__,
            error,
        )
        return False
    return True


def by_token_places(keys: Tensor, values: Tensor) -> CachePlaces:
    """Places in a cache that is seen token by token, whatever the block.

    Args:
        keys, values: ``[P * B, K, H]`` and ``[P * B, K, Hv]``; the elements of a head contiguous.
    """
    strides = tuple(
        stride for one in (keys, values) for stride in (one.stride(0), 0, one.stride(1))
    )
    sizes = (keys.shape[2], values.shape[2])
    unit = next(
        unit
        for unit in (16 // keys.dtype.itemsize, 8, 1)
        if all(number % unit == 0 for number in (*strides, *sizes))
    )
    return CachePlaces(unit, tuple(number // unit for number in strides), log2_block=0)
