"""The attention oracle: paged attention in float64, written for reading and nothing else.

It follows the formulas of ``core.attention`` one sequence, one row and one head at a time, and
shares no code with any backend.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.attention import AttentionBatch, AttentionSpec, KVCache


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
        CPU. Rows that belong to no query are NaN in both. Rows with no visible key are 0 and -inf.

    Raises:
        ValueError: sinks are given to a spec without them, or missing.
    """
    if (sinks is not None) != spec.sinks:
        raise ValueError(f"sinks must be given exactly if spec.sinks, which is {spec.sinks}")
    out = torch.full((len(query), spec.num_heads, spec.v_head_size), math.nan, dtype=torch.float64)
    lse = torch.full((len(query), spec.num_heads), math.nan, dtype=torch.float64)
    first_rows = batch.query_start_loc_cpu.tolist()
    for sequence, num_tokens in enumerate(batch.seq_lens_cpu.tolist()):
        first_row, end_row = first_rows[sequence], first_rows[sequence + 1]
        keys = _sequence(cache.k, batch.block_table_cpu[sequence], num_tokens)
        values = _sequence(cache.v, batch.block_table_cpu[sequence], num_tokens)
        for row in range(first_row, end_row):
            position = num_tokens - end_row + row
            visible = visible_keys(spec, num_tokens, position)
            seen = slice(visible.start, visible.stop)
            for head in range(spec.num_heads):
                kv_head = head // spec.group_size
                out[row, head], lse[row, head] = _attend(
                    spec,
                    head,
                    query[row, head].cpu().double(),
                    keys[seen, kv_head],
                    values[seen, kv_head],
                    position - torch.arange(visible.start, visible.stop, dtype=torch.float64),
                    None if sinks is None else sinks[head].cpu().double(),
                )
    return out, lse


def visible_keys(spec: AttentionSpec, num_tokens: int, position: int) -> range:
    """Positions of the keys that a row at ``position`` sees in a sequence of ``num_tokens``."""
    end = min(position + 1, num_tokens) if spec.causal else num_tokens
    first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
    return range(first, max(first, end))


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
    after = KVCache(k=cache.k.clone(), v=cache.v.clone())
    block_size = cache.k.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            after.k[slot // block_size, slot % block_size] = key[token]
            after.v[slot // block_size, slot % block_size] = value[token]
    return after


def _sequence(cache: Tensor, block_table_row: Tensor, num_tokens: int) -> Tensor:
    """Cache entries of a sequence in logical order: ``[num_tokens, K, H]``, float64, cpu."""
    block_size = cache.shape[1]
    gathered = torch.empty((num_tokens, *cache.shape[2:]), dtype=torch.float64)
    for position in range(num_tokens):
        block = int(block_table_row[position // block_size])
        gathered[position] = cache[block, position % block_size]
    return gathered


def _attend(
    spec: AttentionSpec,
    head: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distances: Tensor,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One row and head over its visible keys: query ``[H]``, keys ``[n, H]``, values ``[n, Hv]``,
    distances (row minus key position) ``[n]``, sink a number."""
    if not len(keys):
        return torch.zeros(spec.v_head_size, dtype=torch.float64), torch.tensor(-math.inf)
    scores = spec.scale * (keys @ query)
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    if spec.alibi_slopes is not None:
        scores = scores - spec.alibi_slopes[head] * distances
    # A common factor exp(-largest) keeps the sums finite.
    largest = scores.max() if sink is None else torch.maximum(scores.max(), sink)
    weights = torch.exp(scores - largest)
    total = weights.sum()
    denominator = total if sink is None else total + torch.exp(sink - largest)
    return (weights @ values) / denominator, torch.logsumexp(scores, dim=0)
