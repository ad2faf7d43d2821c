"""Paged attention by the library flash-attn 2 (https://arxiv.org/abs/2307.08691), for CUDA.

The library's compiled functions are called as its own Python functions do, but with the place of
the result, which those do not take: ``fwd_kvcache`` (behind ``flash_attn_with_kvcache``) for
sequences of few and equally many query rows, ``varlen_fwd`` (behind ``flash_attn_varlen_func``) for
all others.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
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
from ..core.attention_checks import check_call, own_options, own_plan
from ..core.errors import UnsupportedError
from ..core.options import PartOptions
from ._flash_attn_calls import Attending, fwd_kvcache, varlen_fwd
from ._flash_attn_plan import FlashAttnPart, FlashAttnPlan, make_plan, update_plan
from ._flash_attn_probe import wrong_kernels
from ._library import Library
from ._lse import apply_sinks
from ._nhd_cache import NhdCache
from ._views import split, take_rows

LIBRARY = Library(
    distribution="flash-attn",
    module="flash_attn.flash_attn_interface",
    extra="flash-attn",
    at_least="2.8.3",
    below="2.9",
)
_DTYPES = frozenset({torch.float16, torch.bfloat16})
_BLOCK_UNIT = 256
# The kernels read and write 16 bytes at a time.
_ALIGNED_BYTES = 16
# Where a build may lack kernels.
_PROBED_DEVICES = frozenset({"cuda"})


class FlashAttnBackend(AttentionBackend):
    """Paged attention in 16 bits, with all of ``AttentionSpec`` but value heads of another size.

    Raises:
        UnsupportedError: something is not declared; or the installed build computes wrong results
            for the head size, which is tried once in a process.
    """

    name: ClassVar[str] = "flash_attn"

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """What the whole library can do; a build of a part of its kernels refuses more."""
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            head_sizes=SizeSet(multiple_of=8, minimum=8, maximum=256),
            block_sizes=SizeSet(multiple_of=_BLOCK_UNIT, minimum=_BLOCK_UNIT),
            preferred_block_size=_BLOCK_UNIT,
            compute_capability=(8, 0),
            non_causal=True,
            sliding_window=True,
            logits_soft_cap=True,
            alibi=True,
            sinks=True,
            lse=True,
            cuda_graphs=True,
            # A captured call splits the keys for the whole width of the block table.
            not_bitwise=frozenset({"plan_into"}),
            kv_layout="NHD",
            auto_priority=40,
            missing=LIBRARY.missing(device),
        )

    @classmethod
    def unsupported(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot serve the layer; an empty list means that it can."""
        reasons = super().unsupported(spec, cache, device)
        if spec.alibi_slopes is not None and not spec.causal:
            reasons.append(
                "alibi_slopes with causal=False is not supported: flash-attn takes the absolute "
                "distance of keys behind a row"
            )
        if not spec.scale > 0:
            reasons.append(f"scale={spec.scale} is not supported (supported: above 0)")
        return reasons

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        own_options(self, self.Options)
        self._kernels: Any = LIBRARY.require(self.name, device).flash_attn_gpu
        if device.type in _PROBED_DEVICES:
            self._check_build()
        self._cache = NhdCache(self.name, cache, device)
        self._block_size = cache.block_size
        slopes = spec.alibi_slopes
        self._layer = Attending(
            float(spec.scale),
            float(spec.logits_soft_cap or 0.0),
            None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device),
        )

    def _check_build(self) -> None:
        spec = self.spec
        fault = wrong_kernels(self._kernels, spec.head_size, spec.dtype, self.device)
        if fault is not None:
            raise UnsupportedError(
                f"attention backend {self.name!r}",
                [
                    f"the installed build of flash-attn cannot compute head_size={spec.head_size}: "
                    f"{fault}; install a build with all kernels, or set attention_backend to "
                    f"another one"
                ],
            )

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> FlashAttnPlan:
        """Cut the batch into at most two calls and copy their lengths and blocks to the device.

        Raises:
            TypeError: ``into`` is of another backend.
            ValueError: ``into`` was made for other query lengths or a narrower block table.
        """
        into = None if into is None else own_plan(self, into, FlashAttnPlan)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            if into is None:
                return make_plan(batch, self._block_size, self.device)
            update_plan(into, batch, self._block_size)
            return into

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

        While a CUDA graph is captured, calls are made for any batch that ``plan(into=...)`` may
        bring later.

        Raises:
            TypeError: the plan is of another backend.
            ValueError: sinks are given to a spec without them, or missing, or the rows are too few;
                or the cache has another size or order.
        """
        plan = own_plan(self, plan, FlashAttnPlan)
        check_call(self.spec, plan.num_tokens, query, out, sinks)
        self._cache.by_token(cache)
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
        for part in plan.parts:
            self._attend(part, captured, query, cache, out, sinks, lse)
        return out

    def _attend(
        self,
        part: FlashAttnPart,
        captured: bool,
        query: Tensor,
        cache: KVCache,
        out: Tensor,
        sinks: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        """Compute the rows of one part."""
        q = take_rows(query, part.rows)
        if not _is_aligned(q):
            q = q.clone(memory_format=torch.contiguous_format)
        in_place = isinstance(part.rows, slice) and _is_aligned(out)
        result = (
            out[part.rows] if in_place else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        )
        table = part.block_table if captured else part.used_table
        window = self._window(table.shape[1] * self._block_size)
        call = self._uniform if part.query_len is not None else self._ragged
        sums = call(part, q, cache, table, window, result)
        if lse is not None or sinks is not None:
            self._finish(part, captured, result, sums, sinks, lse)
        if part.query_len is None and (captured or part.any_blind):
            result.masked_fill_(part.blind[:, None, None], 0.0)
        if not in_place:
            out[part.rows] = result

    def _window(self, most_keys: int) -> int | None:
        """The window for sequences of at most so many tokens."""
        window = self.spec.sliding_window
        if self._layer.slopes is not None:
            # Without a window the library adds slope * key in place of -slope * (row - key): other
            # sums, and less precise ones. Within one that hides nothing it takes the distance.
            return most_keys if window is None else min(window, most_keys)
        # Without a window that hides nothing, decoding reads the keys of a group once.
        return None if window is None or window >= most_keys else window

    def _uniform(
        self,
        part: FlashAttnPart,
        q: Tensor,
        cache: KVCache,
        table: Tensor,
        window: int | None,
        result: Tensor,
    ) -> Tensor:
        """Sequences of equally many query rows. Returns the LSE, ``[R, N]``."""
        spec, length = self.spec, part.query_len
        causal = spec.causal
        if length == 1 and window is None:
            # The heads of a group become the rows of one head, so that its keys are read once. All
            # of them see all keys.
            causal = False
            shape = (spec.num_kv_heads, spec.group_size)
            q, result = (split(one, 1, *shape).transpose(1, 2) for one in (q, result))
        else:
            q, result = (split(one, 0, part.num_seqs, -1) for one in (q, result))
        sums = fwd_kvcache(
            self._kernels,
            self._layer,
            q,
            (cache.k, cache.v),
            part.seq_lens,
            table,
            causal,
            window,
            result,
        )
        if length == 1:
            return sums.reshape(part.num_rows, spec.num_heads)
        return sums.transpose(1, 2).reshape(part.num_rows, spec.num_heads)

    def _ragged(
        self,
        part: FlashAttnPart,
        q: Tensor,
        cache: KVCache,
        table: Tensor,
        window: int | None,
        result: Tensor,
    ) -> Tensor:
        """Sequences of any query lengths. Returns the LSE, ``[R, N]``."""
        sums = varlen_fwd(
            self._kernels,
            self._layer,
            q,
            (cache.k, cache.v),
            (part.query_start_loc, part.key_start_loc),
            table,
            (part.max_query_len, table.shape[1] * self._block_size),
            self.spec.causal,
            window,
            result,
        )
        return sums.transpose(0, 1)

    def _finish(
        self,
        part: FlashAttnPart,
        captured: bool,
        result: Tensor,
        sums: Tensor,
        sinks: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        """Apply the sinks to a result and store the LSE, ``sums``, ``[R, N]``."""
        if sinks is not None:
            # Rows without keys have an LSE of +inf here, and so keep their result, which is 0.
            apply_sinks(result, sums, sinks)
        if lse is not None:
            if captured or part.any_blind:
                sums = sums.masked_fill(part.blind.unsqueeze(1), -torch.inf)
            lse[part.rows] = sums


def _is_aligned(tensor: Tensor) -> bool:
    """Whether every head of ``[.., N, H]`` begins where the kernels can read and write it."""
    unit = _ALIGNED_BYTES // tensor.element_size()
    *strides, last = tensor.stride()
    return (
        last == 1
        and not any(stride % unit for stride in strides)
        and tensor.data_ptr() % _ALIGNED_BYTES == 0
    )
