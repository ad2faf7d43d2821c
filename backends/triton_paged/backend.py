"""The ``triton`` attention backend: paged attention by kernels that Triton compiles on the spot."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
    SizeSet,
    dtype_name,
)
from ...core.attention_checks import check_call, own_options, own_plan
from ...core.errors import UnsupportedError
from ...core.options import PartOptions
from .layer import UNIT, geometry_of, layer_constants
from .plan import PlanMaker, TritonPlan
from .store import KernelStore, on_device
from .tensors import cache_places, check_sinks_kind, row_strides
from .tiles import TritonOptions

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
# Triton compiles the 8-bit dtype from this compute capability on.
_FP8_CAPABILITY = (8, 9)
_BLOCK_SIZES = SizeSet.of(8, 16, 32, 64, 128, 256, 512, 1024)
_TRUE = frozenset({"1", "true", "on", "yes", "y"})
# Layers with an equal spec have tensors of equal strides: one entry, in practice.
_MOST_LAYOUTS = 64


@dataclass(frozen=True)
class _Layout:
    """Arguments that follow from the strides of the tensors of a call.

    Attributes:
        numbers: runtime arguments of prefill and decode, but for those that have to do with the
            scales of the cache.
        prefill, decode: what is compiled in, and launch options.
    """

    numbers: tuple[int, ...]
    prefill: dict[str, Any]
    decode: dict[str, Any]


class TritonBackend(AttentionBackend):
    """Every feature of ``AttentionSpec`` on CUDA devices, without a library but Triton.

    Decoding sequences are computed by one kernel, their keys split over programs, all others by
    another; results do not depend on the batch. On a CPU the kernels run in Triton's interpreter,
    for tests only.

    A backend's plans share buffers for partial results: layers that run at the same time on
    several streams need a backend each.

    Raises:
        UnsupportedError: something is not declared; or triton was imported before
            ``TRITON_INTERPRET`` was set.
    """

    name: ClassVar[str] = "triton"
    Options: ClassVar[type[PartOptions]] = TritonOptions

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Everything; on a CPU in Triton's interpreter only, and never by ``auto``."""
        return Capabilities(
            device_types=frozenset({"cpu", "cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES if _too_old_for_fp8(device) else _DTYPES | {torch.float8_e4m3fn},
            different_kv_dtype=True,
            head_sizes=SizeSet(multiple_of=UNIT, minimum=16, maximum=256),
            group_sizes=SizeSet(maximum=128),
            block_sizes=_BLOCK_SIZES,
            compute_capability=(8, 0),
            different_v_head_size=True,
            non_causal=True,
            sliding_window=True,
            logits_soft_cap=True,
            alibi=True,
            sinks=True,
            lse=True,
            cuda_graphs=True,
            nonfinite_safe=True,
            batch_invariant=True,
            kv_layout="HND",
            auto_priority=50 if device.type == "cuda" else 0,
            missing=_missing(device),
        )

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """What the capabilities say, and why they leave out caches of 8 bits on an old device."""
        reasons = super().unsupported(spec, cache, device)
        if cache.dtype.itemsize == 1 and _too_old_for_fp8(device):
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            needed = ".".join(map(str, _FP8_CAPABILITY))
            reasons.append(
                f"kv_cache_dtype={dtype_name(cache.dtype)} needs compute capability {needed}, not "
                f"{found}"
            )
        return reasons

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        tiles = own_options(self, TritonOptions)
        from . import decode_kernel, device_code, prefill_kernel

        if device.type == "cpu" and not device_code.INTERPRETED:
            raise UnsupportedError(
                f"attention backend {self.name!r}",
                ["TRITON_INTERPRET=1 was set after triton had been imported; set it earlier"],
            )
        self._prefill_kernel: Any = prefill_kernel.prefill_kernel
        self._decode_kernel: Any = decode_kernel.decode_kernel
        self._store = KernelStore(cache, device)
        self._constants = layer_constants(spec, cache, device, tiles, device_code.INTERPRETED)
        geometry = geometry_of(self._constants, spec, cache, device)
        self._planner = PlanMaker(geometry, spec, device)
        self._layouts: dict[Hashable, _Layout] = {}

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> TritonPlan:
        """Build the work lists on the host and copy them to the device, without waiting for it.

        A plan's buffers have room for every batch with the same query lengths and a block table no
        wider, which is what ``into`` may be given.

        Raises:
            TypeError: ``into`` is of another backend.
            ValueError: ``into`` was made for other query lengths or a narrower block table.
        """
        into = None if into is None else own_plan(self, into, TritonPlan)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            return self._planner.make(batch, into)

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store new keys and values; see ``AttentionBackend.write_kv``.

        Raises:
            ValueError: a tensor has fewer rows than there are slots, or another dtype, shape or
                order than the backend was built for.
        """
        if len(slot_mapping):
            places = cache_places(cache, self.cache_spec)
            self._store.write(key, value, cache, slot_mapping, places)

    def forward(
        self,
        query: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend; see ``AttentionBackend.forward``.

        While a CUDA graph is captured, grids are sized for any batch that ``plan(into=...)`` may
        bring later.

        Raises:
            TypeError: the plan is of another backend.
            ValueError: sinks are given to a spec without them, or missing; a tensor has another
                dtype, shape or order than the backend was built for.
        """
        plan = own_plan(self, plan, TritonPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        if sinks is not None:
            check_sinks_kind(sinks, self.spec)
        layout = self._layout(query, cache, out, lse)
        constants = self._constants
        factor, cap = constants.scores
        numbers = (factor * cache.k_scale, cap, cache.v_scale, *layout.numbers)
        tensors = (
            query,
            cache.k,
            cache.v,
            out,
            constants.no_lse if lse is None else lse,
            constants.no_sinks if sinks is None else sinks,
        )
        with on_device(self.device):
            if plan.num_prefill_items:
                self._prefill_kernel[(plan.num_prefill_items * self.spec.num_kv_heads,)](
                    *tensors,
                    constants.slopes,
                    plan.prefill_items,
                    plan.table,
                    *numbers,
                    **layout.prefill,
                )
            programs = self._decode_programs(plan)
            if programs:
                self._decode_kernel[(programs * self.spec.num_kv_heads,)](
                    *tensors,
                    constants.slopes,
                    plan.decode_items,
                    plan.table,
                    plan.partial_out,
                    plan.partial_sums,
                    plan.arrivals,
                    *numbers,
                    plan.slot_rows,
                    **layout.decode,
                )
        return out

    def _decode_programs(self, plan: TritonPlan) -> int:
        """Programs of each key/value head: all that there is room for if they are captured."""
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return plan.most_programs if captured else plan.num_programs

    def _layout(self, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor | None) -> _Layout:
        """Arguments for tensors of these strides, checked when they are first seen."""
        k, v = cache.k, cache.v
        key = (
            query.dtype,
            query.stride(),
            out.dtype,
            out.stride(),
            None if lse is None else lse.stride(),
            (k.dtype, k.shape, k.stride()),
            (v.dtype, v.shape, v.stride()),
        )
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._make_layout(query, cache, out, lse)
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def _make_layout(
        self, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor | None
    ) -> _Layout:
        spec, constants = self.spec, self._constants
        if query.dtype != spec.dtype or out.dtype != spec.dtype:
            raise ValueError(
                f"attention backend {self.name!r} was built for {dtype_name(spec.dtype)}, "
                f"but query is {dtype_name(query.dtype)} and out {dtype_name(out.dtype)}"
            )
        places = cache_places(cache, self.cache_spec)
        unit, strides = row_strides(query, out)
        lse_strides = (0, 0) if lse is None else (lse.stride(0), lse.stride(1))
        write_lse = int(lse is not None)
        numbers = (
            *strides,
            *lse_strides,
            *places.strides,
            *constants.sizes,
            write_lse,
            places.log2_block,
        )
        fixed = {
            "unit": unit,
            "cache_unit": places.unit,
            "one_layout": places.strides[:3] == places.strides[3:],
        }
        return _Layout(
            numbers=numbers,
            prefill=constants.prefill | fixed,
            decode=constants.decode | fixed,
        )


def _too_old_for_fp8(device: torch.device) -> bool:
    """Whether the device is a GPU that Triton does not compile the 8-bit dtype for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) < _FP8_CAPABILITY


def _missing(device: torch.device) -> str | None:
    """Why the kernels cannot run at all, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install it with: pip install 'triton>=3.6'"
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    if device.type == "cpu" and not interpreted:
        return (
            "on a CPU the kernels run in Triton's interpreter only, which is slow and meant for "
            "tests: set TRITON_INTERPRET=1 to use it"
        )
    return None
