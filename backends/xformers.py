"""Attention by the library xformers, for CUDA.

Its operators are named in every call; its dispatcher, which knows nothing of page tables, is never
asked. ``triton_splitk`` reads the paged cache, for decoding sequences and other short queries of
equal length. ``cutlass`` computes all else on keys that are copied out of the cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

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
)
from ..core.attention_checks import check_call, own_options, own_plan, refuse_update
from ..core.errors import UnsupportedError
from ..core.options import PartOptions
from ._gathered_parts import KeyGather, aligned, grouped, refuse_large_caches
from ._library import Library
from ._lse import apply_sinks, blank_rows
from ._nhd_cache import NhdCache
from ._views import take_rows
from ._xformers_plan import GatheredCall, PagedCall, PlanMaker, XformersPlan

LIBRARY = Library(
    distribution="xformers",
    module="xformers.ops.fmha",
    extra="xformers",
    at_least="0.0.35",
    below="0.0.36",
)
# Its Triton kernels are written with block pointers, which Triton 3.9 removed.
TRITON = Library(distribution="triton", module="triton", extra=None, at_least="3.6", below="3.9")
_16_BITS = frozenset({torch.float16, torch.bfloat16})
_CUTLASS_DTYPES = _16_BITS | {torch.float32}
_BLOCK_UNIT = 64
# What the cutlass operator allows at most; it has no kernels for what came later.
_NEWEST_DEVICE = (9, 0)


class XformersOptions(PartOptions):
    """A bound on the memory that attention takes beside the cache."""

    max_gathered_elements: int = Field(
        default=1 << 27,
        ge=1,
        description="Most key and value elements that are copied out of the cache at a time, "
        "repeated for every query head. A single sequence may exceed it.",
    )


class XformersCutlassBackend(AttentionBackend):
    """All attention by the cutlass operator, on copied keys; ``auto`` never chooses it.

    A key/value head is copied for each of its query heads: the operator has no grouped heads but
    by a stream for each group.
    """

    name: ClassVar[str] = "xformers_cutlass"
    Options: ClassVar[type[PartOptions]] = XformersOptions
    _library: ClassVar[Library] = LIBRARY
    _paged: ClassVar[bool] = False

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Causal attention with or without a window, in 16 and 32 bits."""
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=_CUTLASS_DTYPES,
            kv_dtypes=_CUTLASS_DTYPES,
            head_sizes=SizeSet(multiple_of=8, minimum=8, maximum=512),
            compute_capability=(8, 0),
            different_v_head_size=True,
            sliding_window=True,
            sinks=True,
            lse=True,
            nonfinite_safe=True,
            kv_layout="NHD",
            auto_priority=0,
            missing=cls._library.missing(device) or _too_new(device),
        )

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        chosen = own_options(self, XformersOptions)
        refuse_large_caches(self.name, cache)
        fmha = self._library.require(self.name, device)
        self._fmha: Any = fmha
        if not self._fmha.cutlass.FwOp.is_available():
            raise UnsupportedError(
                f"attention backend {self.name!r}",
                [
                    f"xformers {self._library.version()} cannot use the cutlass kernels of torch "
                    f"{torch.__version__}; install the torch that it was made for"
                ],
            )
        self._scale = float(spec.scale)
        self._cache = NhdCache(self.name, cache, device)
        self._gather = KeyGather(spec, cache, device, repeat=spec.group_size)
        self._planner = PlanMaker(
            fmha,
            spec,
            cache,
            device,
            paged=self._paged,
            gather=self._gather,
            max_elements=chosen.max_gathered_elements,
        )

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> XformersPlan:
        """Make the biases and copy all lengths, blocks and slots to the device at once.

        Raises:
            ValueError: ``into`` is given: plans are not updated in place (no CUDA graphs).
        """
        refuse_update(self, into)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            return self._planner.make(batch)

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
            ValueError: sinks are given to a spec without them, or missing, or the rows are too few;
                or the cache has another size or order.
        """
        plan = own_plan(self, plan, XformersPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        caches = self._cache.by_token(cache)
        wants_sums = lse is not None or sinks is not None
        with self._on_device():
            for paged in plan.paged:
                result, sums = self._attend_paged(paged, query, caches, wants_sums)
                _put(paged.rows, result, sums, out, sinks, lse)
            for gathered in plan.gathered:
                result, sums = self._attend_gathered(gathered, query, caches, wants_sums)
                _put(gathered.rows, result, sums, out, sinks, lse)
        if plan.blind_rows is not None:
            blank_rows(out, lse, plan.blind_rows)
        return out

    def _attend_paged(
        self, call: PagedCall, query: Tensor, caches: tuple[Tensor, Tensor], wants_sums: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The result, ``[R, N, H]``, and the LSE, ``[R, N]``, if it is wanted."""
        q = take_rows(query, call.rows if call.query_rows is None else call.query_rows)
        heads = (self.spec.num_kv_heads, self.spec.group_size)
        k, v = (one.unsqueeze(2).expand(-1, -1, heads[1], -1).unsqueeze(0) for one in caches)
        result, sums = self._call(
            self._fmha.triton_splitk.FwOp,
            grouped(q, heads[0]).unsqueeze(0),
            k,
            v,
            call.bias,
            wants_sums,
        )
        if sums is not None:
            # [1, K, N // K, rows]
            sums = sums[0].flatten(0, 1).t()[: call.num_rows]
        # [S', rows of a sequence, K, N // K, H], or all rows in one dimension
        return result.reshape(-1, *query.shape[1:])[: call.num_rows], sums

    def _attend_gathered(
        self, call: GatheredCall, query: Tensor, caches: tuple[Tensor, Tensor], wants_sums: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The result, ``[R, N, Hv]``, and the LSE, ``[R, N]``, if it is wanted."""
        q = aligned(take_rows(query, call.rows))
        k, v = self._gather.gather(caches, call.slots, call.room)
        result, sums = self._call(
            self._fmha.cutlass.FwOp,
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            call.bias,
            wants_sums,
        )
        if sums is not None:
            # [S, N, the most rows of a sequence and padding]
            sums = sums[call.sequence, :, call.position]
        return result[0], sums

    def _call(
        self, op: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, wants_sums: bool
    ) -> tuple[Tensor, Tensor | None]:
        # The functions around the operators refuse every CUDA device where xformers' own compiled
        # part does not load, as with another CUDA than it was built for. Neither operator needs it.
        inputs = self._fmha.Inputs(
            query=q, key=k, value=v, attn_bias=bias, p=0.0, scale=self._scale
        )
        result, context = op.apply(inputs, needs_gradient=wants_sums)
        return result, context.lse if wants_sums else None

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, whatever device its arguments are on."""
        device = self.device
        if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
            return nullcontext()
        return torch.cuda.device(device)


class XformersBackend(XformersCutlassBackend):
    """Short queries on the paged cache by the split-K operator, all others on copied keys.

    What the operator pages is all that it takes: other layers are for ``xformers_cutlass``.
    """

    name: ClassVar[str] = "xformers"
    _triton: ClassVar[Library] = TRITON
    _paged: ClassVar[bool] = True

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Causal attention in 16 bits, with CUDA graphs of decoding steps."""
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=_16_BITS,
            kv_dtypes=_16_BITS,
            head_sizes=SizeSet.of(16, 32, 64, 128, 256),
            block_sizes=SizeSet(multiple_of=_BLOCK_UNIT, minimum=_BLOCK_UNIT),
            preferred_block_size=_BLOCK_UNIT,
            compute_capability=(8, 0),
            sinks=True,
            lse=True,
            cuda_graphs=True,
            nonfinite_safe=True,
            # How keys are split follows from the columns of the table.
            not_bitwise=frozenset({"table_tail"}),
            kv_layout="NHD",
            auto_priority=0,
            missing=(
                cls._library.missing(device) or cls._triton.missing(device) or _too_new(device)
            ),
        )

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> XformersPlan:
        """Make the biases and copy all lengths, blocks and slots to the device at once.

        Plans of short queries can be updated: see ``PlanMaker.update``.

        Raises:
            TypeError: ``into`` is of another backend.
            ValueError: ``into`` was made for other query lengths or a narrower block table, or
                copies keys.
        """
        if into is None:
            return super().plan(batch)
        into = own_plan(self, into, XformersPlan)
        self._planner.update(into, batch)
        return into


def _put(
    rows: slice | Tensor,
    result: Tensor,
    sums: Tensor | None,
    out: Tensor,
    sinks: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Apply the sinks and write a call's results to their rows."""
    if sums is not None and sinks is not None:
        apply_sinks(result, sums, sinks)
    out[rows] = result
    if sums is not None and lse is not None:
        lse[rows] = sums


def _too_new(device: torch.device) -> str | None:
    """Why the cutlass operator has no kernel for a device, or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_capability(device)
    if found <= _NEWEST_DEVICE:
        return None
    return (
        f"compute capability {found[0]}.{found[1]} is above 9.0, the newest that xformers' cutlass "
        "operator supports; use the attention backend triton"
    )
