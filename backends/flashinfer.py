"""Paged attention by the library flashinfer (https://arxiv.org/abs/2501.01005), for CUDA.

A step of one query row for each sequence goes to ``BatchDecodeWithPagedKVCacheWrapper`` on tensor
cores, in the form that a CUDA graph can replay; any other step, mixed ones too, to one call of
``BatchPrefillWithPagedKVCacheWrapper``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..core.attention import (
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
from ..core.attention_checks import check_call, own_options, own_plan
from ..core.errors import UnsupportedError
from ..core.options import PartOptions
from ._flashinfer_modules import LIBRARY, KernelModule
from ._flashinfer_plan import Bool, Int32, StepArrays
from ._flashinfer_wrappers import HeldWrapper, PlanSettings, WrapperPool
from ._lse import apply_sinks
from ._nhd_cache import NhdCache

_DTYPES = frozenset({torch.float16, torch.bfloat16})
_FP8 = torch.float8_e4m3fn
_LN2 = math.log(2.0)
# The kernels take -5e4 for minus infinity, as a score before the scale. Down to this scale that is
# a score of -1000, which is far below any other.
_SMALLEST_SCALE = 0.02
_LOWEST_SCORE = -5e4 * _SMALLEST_SCALE
# Rows and caches are read 16 bytes at a time.
_ALIGNED_BYTES = 16
# The kernels find a row by a product in 32 bits.
_MOST_ROW_ELEMENTS = 2**32


class FlashInferOptions(PartOptions):
    """How flashinfer runs."""

    backend: Literal["fa2", "fa3"] = Field(
        default="fa2",
        description="Kernels for prefill and mixed batches. fa3 is faster on compute capability "
        "9.0, the only one that it runs on, and is a second module to compile; decode always takes "
        "fa2. The declared capabilities are those of fa2.",
    )


@dataclass(eq=False)
class FlashInferPlan(AttentionPlan):
    """A step; ``plan(into=...)`` replaces its contents.

    Attributes:
        held: the library's wrapper with its plan; None if there is nothing to compute.
        num_tokens: query rows that belong to a sequence.
        query_start_loc: of the batch, on the host: ``[S + 1]``.
        table_width: columns of the widest block table that fits.
        to_natural: what makes a natural LSE of the library's, which is in base 2 and finite for
            rows that see nothing: a factor, or one for each row, ``[T, 1]``, float32.
        blind: which rows see nothing, on the host: ``[T]``.
    """

    held: HeldWrapper | None
    num_tokens: int
    query_start_loc: Int32
    table_width: int
    to_natural: Tensor | float
    blind: Bool


class FlashInferBackend(AttentionBackend):
    """Everything but ALiBi, value heads of another size and float32.

    A backend's plans share a workspace: layers that run at the same time on several streams need
    a backend each.

    Raises:
        UnsupportedError: something is not declared; or the library has to compile kernels and
            there is no compiler.
    """

    name: ClassVar[str] = "flashinfer"
    Options: ClassVar[type[PartOptions]] = FlashInferOptions

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """What the fa2 kernels do."""
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES | {_FP8},
            head_sizes=SizeSet.of(64, 128, 256),
            compute_capability=(8, 0),
            non_causal=True,
            sliding_window=True,
            logits_soft_cap=True,
            sinks=True,
            lse=True,
            cuda_graphs=True,
            nonfinite_safe=True,
            lowest_score=_LOWEST_SCORE,
            kv_layout="NHD",
            auto_priority=30,
            missing=LIBRARY.missing(device),
        )

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """What the capabilities say, and kernels that are not there and cannot be compiled."""
        reasons = super().unsupported(spec, cache, device)
        if reasons:
            return reasons
        library = LIBRARY.load()
        obstacle = KernelModule.of(library, "fa2", spec, cache).obstacle(library)
        return [] if obstacle is None else [obstacle]

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        chosen = own_options(self, FlashInferOptions)
        library = LIBRARY.load()
        self._modules: dict[str, KernelModule] = {
            kernels: KernelModule.of(library, kernels, spec, cache)
            for kernels in ("fa2", chosen.backend)
        }
        self._check_prefill_kernels(chosen.backend, library)
        self._prefill_kernels = chosen.backend
        settings = PlanSettings(
            spec=spec,
            cache=cache,
            # A row of such a layer may see more keys than the pieces of a split cover
            # (flashinfer issue 4972).
            split=spec.causal or spec.sliding_window is None,
            read_lengths=chosen.backend == "fa3",
        )
        self._pool = WrapperPool(library, settings, chosen.backend, device)
        self._cache = NhdCache(self.name, cache, device)
        self._k_shape = (cache.num_blocks, cache.block_size, spec.num_kv_heads, spec.head_size)
        self._scalings: dict[float, tuple[float, float]] = {}
        self._checked: tuple[object, ...] = ()

    def _check_prefill_kernels(self, kernels: str, library: Any) -> None:
        if kernels != "fa3":
            return
        reasons = []
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) != (9, 0):
            found = ".".join(map(str, torch.cuda.get_device_capability(self.device)))
            reasons.append(
                f"option backend=fa3 needs compute capability 9.0, not {found}; set it to fa2"
            )
        if self.cache_spec.dtype != self.spec.dtype:
            reasons.append(
                f"option backend=fa3 with kv_cache_dtype={dtype_name(self.cache_spec.dtype)} is "
                f"not supported; set it to fa2"
            )
        obstacle = self._modules[kernels].obstacle(library)
        if obstacle is not None:
            reasons.append(f"option backend=fa3: {obstacle}")
        if reasons:
            raise UnsupportedError(f"attention backend {self.name!r}", reasons)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> FlashInferPlan:
        """Let the library plan the step, without waiting for the device.

        The first plan compiles the library's kernels if that has never been done.

        Raises:
            TypeError: ``into`` is of another backend.
            ValueError: ``into`` was made for other query lengths or a narrower block table, or not
                for decoding.
            UnsupportedError: the kernels cannot be compiled.
        """
        into = None if into is None else own_plan(self, into, FlashInferPlan)
        arrays = StepArrays.of(batch, self.cache_spec.block_size)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            if into is None:
                return self._new_plan(batch, arrays)
            self._update(into, batch, arrays)
            return into

    def _new_plan(self, batch: AttentionBatch, arrays: StepArrays) -> FlashInferPlan:
        plan = FlashInferPlan(
            held=None,
            num_tokens=arrays.num_rows,
            query_start_loc=batch.query_start_loc_cpu.numpy().copy(),
            table_width=batch.block_table_cpu.shape[1],
            to_natural=_LN2,
            blind=arrays.blind,
        )
        if not arrays.num_rows:
            return plan
        kernels = "fa2" if arrays.decodes else self._prefill_kernels
        with self._modules[kernels].announced(self.name):
            plan.held = self._plan_wrapper(arrays, plan.table_width)
        self._pool.return_with(plan, plan.held)
        if arrays.decodes or arrays.blind.any():
            plan.to_natural = self._natural(arrays.blind)
        return plan

    def _plan_wrapper(self, arrays: StepArrays, table_width: int) -> HeldWrapper:
        if arrays.decodes:
            return self._pool.decode(arrays, table_width)
        return self._pool.prefill(arrays)

    def _update(self, plan: FlashInferPlan, batch: AttentionBatch, arrays: StepArrays) -> None:
        starts = batch.query_start_loc_cpu.numpy()
        if not np.array_equal(starts, plan.query_start_loc):
            raise ValueError(
                f"into was planned for query_start_loc={plan.query_start_loc.tolist()}, not for "
                f"{starts.tolist()}: a captured graph has one number of query rows a sequence"
            )
        width = batch.block_table_cpu.shape[1]
        if width > plan.table_width:
            raise ValueError(
                f"into was planned for block tables of up to {plan.table_width} columns, not for "
                f"{width}: plan the batch that is captured with the widest table"
            )
        if plan.held is None:
            return
        if not arrays.decodes:
            raise ValueError(
                f"attention backend {self.name!r} updates plans of decoding steps only, in which "
                f"every sequence has one query row; plan other steps anew"
            )
        self._pool.decode_again(plan.held, arrays)
        if not np.array_equal(arrays.blind, plan.blind):
            assert isinstance(plan.to_natural, Tensor)
            plan.to_natural.copy_(self._natural(arrays.blind), non_blocking=True)
            plan.blind = arrays.blind

    def _natural(self, blind: Bool) -> Tensor:
        """ln 2; for rows that see nothing infinity, by which their negative LSE becomes -inf."""
        on_gpu = self.device.type == "cuda"
        factors = torch.empty((len(blind), 1), dtype=torch.float32, pin_memory=on_gpu)
        factors.numpy()[:, 0] = np.where(blind, np.inf, _LN2)
        return factors.to(self.device, non_blocking=True)

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store new keys and values; see ``AttentionBackend.write_kv``."""
        self._cache.write(key, value, cache, slot_mapping)

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

        Raises:
            TypeError: the plan is of another backend.
            ValueError: sinks are given to a spec without them, or missing; the rows are too few; a
                tensor is not aligned to 16 bytes; or the cache has another size.
        """
        plan = own_plan(self, plan, FlashInferPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        if plan.held is None:
            return out
        rows = plan.num_tokens
        self._check_tensors(query, cache, rows)
        factor, scale = self._scaling(cache.k_scale)
        wanted, wanted_lse = out[:rows], None if lse is None else lse[:rows]
        # The library writes results as if they were packed.
        result = (
            wanted
            if wanted.is_contiguous()
            else torch.empty_like(wanted, memory_format=torch.contiguous_format)
        )
        sums = wanted_lse
        if (sums is None and sinks is not None) or (sums is not None and not sums.is_contiguous()):
            sums = query.new_empty((rows, self.spec.num_heads), dtype=torch.float32)
        plan.held.wrapper.run(
            query[:rows] if factor == 1.0 else query[:rows] * factor,
            (cache.k, cache.v),
            q_scale=scale,
            v_scale=None if cache.v_scale == 1.0 else cache.v_scale,
            out=result,
            lse=sums,
            return_lse=sums is not None,
        )
        if sums is not None:
            sums.mul_(plan.to_natural)
        if sums is not None and sinks is not None:
            apply_sinks(result, sums, sinks)
        if result is not wanted:
            wanted.copy_(result)
        if wanted_lse is not None and sums is not None and sums is not wanted_lse:
            wanted_lse.copy_(sums)
        return out

    def _scaling(self, k_scale: float) -> tuple[float, float]:
        """A factor for the query and the scale that the library is told, for this scale of keys.

        Both together are the layer's scale. The factor is 1, but for scales that are negative or so
        small that the library's minus infinity would be an ordinary score: then it is a power of
        two, by which nothing is rounded, or its negative; and 0 for a scale of 0.
        """
        found = self._scalings.get(k_scale)
        if found is None:
            wanted = self.spec.scale * k_scale
            if wanted == 0.0:
                found = (0.0, 1.0)
            else:
                exponent = max(0, math.ceil(math.log2(_SMALLEST_SCALE / abs(wanted))))
                found = (math.copysign(2.0**-exponent, wanted), abs(wanted) * 2.0**exponent)
            self._scalings[k_scale] = found
        return found

    def _check_tensors(self, query: Tensor, cache: KVCache, rows: int) -> None:
        """Refuse what the kernels would misread; what was good the last time is good again."""
        k, v = cache.k, cache.v
        if rows * query.stride(0) >= _MOST_ROW_ELEMENTS:
            raise ValueError(
                f"attention backend {self.name!r} cannot address {rows} query rows that are "
                f"{query.stride(0)} elements apart, only 2**32 elements; compute fewer at a time"
            )
        seen = (query.stride(), k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype)
        if seen == self._checked:
            return
        if k.shape != self._k_shape or v.shape != self._k_shape:
            raise ValueError(
                f"attention backend {self.name!r} was built for a cache of shape "
                f"{self._k_shape}, not for keys of {tuple(k.shape)} and values of {tuple(v.shape)}"
            )
        if k.stride() != v.stride():
            raise ValueError(
                f"attention backend {self.name!r} needs keys and values of equal strides, not "
                f"{k.stride()} and {v.stride()}"
            )
        for name, tensor in (("query", query), ("cache", k)):
            unit = _ALIGNED_BYTES // tensor.element_size()
            if tensor.stride(-1) != 1 or any(stride % unit for stride in tensor.stride()[:-1]):
                raise ValueError(
                    f"attention backend {self.name!r} reads 16 bytes at a time: strides of the "
                    f"{name} must be multiples of {unit} elements, and 1 for the last, not "
                    f"{tensor.stride()}"
                )
        self._checked = seen
