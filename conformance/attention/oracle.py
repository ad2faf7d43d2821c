"""The attention oracle: paged attention in float64, for whole batches.

``truth`` has the formulas; here the keys of each sequence are found through its block table. No
code is shared with any backend.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...core.attention import AttentionBatch, AttentionSpec, KVCache
from ...core.attention_checks import check_sinks
from . import truth
from .generate import as_bytes, dequantised, quantised, slots_of

#: Scores that are held at a time.
_MAX_SCORES = 1 << 23


def attention_oracle(
    spec: AttentionSpec,
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``AttentionBackend.forward`` has to compute.

    Args:
        spec: the layer.
        query: ``[T or more, N, H]``, any dtype and device.
        cache: the layer's cache, any dtype, layout and device. Slots of no visible key do not
            matter.
        batch: lengths and places; the host twins are read.
        sinks: ``[N]``, given exactly if ``spec.sinks``.

    Returns:
        Output ``[T or more, N, Hv]`` and natural-log LSE ``[T or more, N]``, both float64 on the
        device of the query. Rows that belong to no query are NaN in both. Rows with no visible key
        are 0 and -inf.

    Raises:
        ValueError: sinks are given to a spec without them, or missing.
    """
    out, lse, _, _ = attention_with_bounds(spec, query, cache, batch, sinks)
    return out, lse


def attention_with_bounds(
    spec: AttentionSpec,
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``attention_oracle``, and how far rounding may lead from it: output, LSE, and their bounds.

    The bounds have the shapes of what they bound; see ``truth.error_bounds``.
    """
    check_sinks(spec, sinks)
    rows, num_heads = len(query), spec.num_heads

    def nothing(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=torch.float64, device=query.device)

    whole = (
        nothing(rows, num_heads, spec.v_head_size),
        nothing(rows, num_heads),
        nothing(rows, num_heads, spec.v_head_size),
        nothing(rows, num_heads),
    )
    starts = batch.query_start_loc_cpu.tolist()
    block_size, kv_dtype = cache.k.shape[1], cache.k.dtype
    for index, num_keys in enumerate(batch.seq_lens_cpu.tolist()):
        first, end = starts[index], starts[index + 1]
        slots = slots_of(batch.block_table_cpu[index], num_keys, block_size).to(cache.k.device)
        keys, values = (
            dequantised(_read(stored, slots), scale).to(query.device)
            for stored, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        step = max(1, _MAX_SCORES // max(1, num_keys * num_heads))
        for start in range(first, end, step):
            stop = min(start + step, end)
            parts = _attend(spec, query[start:stop], end - stop, keys, values, kv_dtype, sinks)
            for tensor, part in zip(whole, parts, strict=True):
                tensor[start:stop] = part
    return whole


def write_kv_oracle(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> KVCache:
    """What ``AttentionBackend.write_kv`` has to leave in the cache.

    Args:
        key: ``[T, K, H]``.
        value: ``[T, K, Hv]``.
        cache: the cache before; left as it is.
        slot_mapping: ``[T]``, int64.

    Returns:
        A copy of the cache with the tokens stored, in the same physical order.
    """
    after = replace(cache, k=cache.k.clone(), v=cache.v.clone())
    block_size = cache.k.shape[1]
    new = quantised(key, cache.k.dtype, cache.k_scale)
    new_value = quantised(value, cache.v.dtype, cache.v_scale)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            after.k[slot // block_size, slot % block_size] = new[token]
            after.v[slot // block_size, slot % block_size] = new_value[token]
    return after


def _read(stored: Tensor, slots: Tensor) -> Tensor:
    """What one half of the cache holds in some slots: ``[s, K, H or Hv]``."""
    block_size = stored.shape[1]
    return as_bytes(stored)[slots // block_size, slots % block_size].view(stored.dtype)


def _attend(
    spec: AttentionSpec,
    query: Tensor,
    rows_after: int,
    keys: Tensor,
    values: Tensor,
    kv_dtype: torch.dtype,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some rows of a sequence, with ``rows_after`` more rows behind them."""
    exact = truth.attend(
        query,
        keys,
        values,
        rows_after=rows_after,
        scale=spec.scale,
        causal=spec.causal,
        sliding_window=spec.sliding_window,
        logits_soft_cap=spec.logits_soft_cap,
        alibi_slopes=spec.alibi_slopes,
        sinks=sinks,
    )
    bounds = truth.error_bounds(exact, spec.dtype, kv_dtype, spec.head_size, spec.logits_soft_cap)
    return exact.out, exact.lse, *bounds
