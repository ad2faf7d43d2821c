"""Attention layers and batches for tests, and how far a result may be from the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from jackfield.core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    KVCacheSpec,
)

CPU = torch.device("cpu")
#: Fills rows and tensors that must not be touched.
UNTOUCHED = 7.0
#: Stands in a block table where nothing may read it.
TABLE_GARBAGE = (-1, 2**31 - 1, 0)
PADDING_ROWS = 2


@dataclass(frozen=True)
class Case:
    """One layer, one batch and its data.

    Attributes:
        spec, cache_spec, batch: what the backend is given.
        cache: filled with random numbers everywhere.
        query: ``[T + PADDING_ROWS, N, H]``, a slice of a fused projection.
        key, value: ``[T, K, H or Hv]``, slices of the same.
        sinks: ``[N]`` float32, or None.
    """

    spec: AttentionSpec
    cache_spec: KVCacheSpec
    batch: AttentionBatch
    cache: KVCache
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None


def make_batch(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    num_blocks: int,
    *,
    seed: int = 0,
    garbage: int = 2**31 - 1,
    extra_columns: int = 2,
    shared_prefix: bool = False,
) -> AttentionBatch:
    """A batch in shuffled blocks.

    Args:
        seq_lens, query_lens: tokens and new tokens of each sequence.
        block_size, num_blocks: the cache.
        seed: of the shuffle.
        garbage: fills the table past each sequence's blocks.
        extra_columns: columns of the table that nobody uses.
        shared_prefix: let every sequence read its full blocks of old tokens from the longest one.
    """
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    counts = [-(-length // block_size) for length in seq_lens]
    table = torch.full((len(counts), max(counts, default=0) + extra_columns), garbage)
    slots: list[int] = []
    for line, count in zip(table, counts, strict=True):
        line[:count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
    if shared_prefix and counts:
        longest = max(range(len(counts)), key=lambda index: seq_lens[index])
        for index, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
            kept = min(length - new, seq_lens[longest] - query_lens[longest]) // block_size
            table[index, :kept] = table[longest, :kept]
    for line, length, new in zip(table.tolist(), seq_lens, query_lens, strict=True):
        slots += [
            line[position // block_size] * block_size + position % block_size
            for position in range(length - new, length)
        ]
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionBatch.from_host(
        starts.to(torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        table.to(torch.int32),
        torch.tensor(slots, dtype=torch.int64),
    )


def make_case(
    spec: AttentionSpec,
    batch: AttentionBatch,
    block_size: int,
    num_blocks: int,
    *,
    kv_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    seed: int = 0,
) -> Case:
    """Random data for a layer and a batch; query, key and value have strided rows. ``scales`` are
    those of the cache, which holds numbers of about 1 whatever they are."""
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or spec.dtype
    cache_spec = KVCacheSpec(
        num_blocks, block_size, spec.num_kv_heads, spec.head_size, spec.v_head_size, kv_dtype
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    k_shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_size)
    v_shape = (*k_shape[:-1], spec.v_head_size)
    widths = [
        spec.num_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size,
        spec.num_kv_heads * spec.v_head_size,
    ]
    packed = random(batch.num_tokens + PADDING_ROWS, sum(widths)).to(spec.dtype)
    query, key, value = torch.split(packed, widths, dim=1)
    return Case(
        spec=spec,
        cache_spec=cache_spec,
        batch=batch,
        cache=KVCache(random(*k_shape).to(kv_dtype), random(*v_shape).to(kv_dtype), *scales),
        query=query.view(-1, spec.num_heads, spec.head_size),
        key=key[: batch.num_tokens].view(-1, spec.num_kv_heads, spec.head_size),
        value=value[: batch.num_tokens].view(-1, spec.num_kv_heads, spec.v_head_size),
        sinks=random(spec.num_heads) if spec.sinks else None,
    )


def attend(
    backend: AttentionBackend, case: Case, *, with_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """``plan`` and ``forward``: output and LSE, filled with ``UNTOUCHED`` before."""
    rows, heads = len(case.query), case.spec.num_heads
    out = torch.full((rows, heads, case.spec.v_head_size), UNTOUCHED, dtype=case.spec.dtype)
    lse = torch.full((rows, heads), UNTOUCHED)
    plan = backend.plan(case.batch)
    backend.forward(
        case.query,
        case.cache,
        plan,
        out,
        sinks=case.sinks,
        lse=lse if with_lse else None,
    )
    return out, lse


def visible_keys(spec: AttentionSpec, num_tokens: int, position: int) -> range:
    """Positions of the keys that a row at ``position`` sees in a sequence of ``num_tokens``."""
    end = min(position + 1, num_tokens) if spec.causal else num_tokens
    first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
    return range(first, max(first, end))


def visible_slots(case: Case) -> Tensor:
    """Which slots hold a key that some row sees: ``[P, B]``, bool."""
    seen = torch.zeros(case.cache.k.shape[:2], dtype=torch.bool)
    block_size = case.cache_spec.block_size
    starts = case.batch.query_start_loc_cpu.tolist()
    for index, length in enumerate(case.batch.seq_lens_cpu.tolist()):
        query_len = starts[index + 1] - starts[index]
        for position in range(length - query_len, length):
            for key in visible_keys(case.spec, length, position):
                seen[case.batch.block_table_cpu[index, key // block_size], key % block_size] = True
    return seen


def bounds(case: Case) -> tuple[float, float]:
    """Largest error of the output and of the LSE that rounding explains.

    A sum of ``n`` rounded terms is off by at most ``6 sqrt(n) u`` of the sum of their magnitudes,
    but for odds of 1e-7 (Higham and Mary, https://doi.org/10.1137/18M1226312). That holds for
    scores, which are summed in float32, and for their exponentials. An error of ``d`` in the scores
    is one of at most ``exp(2 d) - 1`` in the weights. Weights and result are then rounded to the
    query's dtype, the latter twice if the cache is of another one. NaN and infinity, which stand in
    hidden slots only, do not count.
    """
    spec = case.spec
    cache = case.cache
    keys, values = (
        scale * tensor.double().nan_to_num(0, 0, 0)
        for tensor, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    unit = torch.finfo(torch.float64 if spec.dtype == torch.float64 else torch.float32).eps / 2
    own_unit = torch.finfo(spec.dtype).eps / 2
    if not len(case.query) or not case.cache.k.numel():
        return 0.0, 0.0
    longest = max(1, case.batch.max_seq_len)
    norms = case.query.double().norm(dim=-1).max() * keys.norm(dim=-1).max()
    largest_score = abs(spec.scale) * float(norms)
    score_error = 6 * math.sqrt(spec.head_size) * unit * largest_score + 4 * unit * largest_score
    if spec.alibi_slopes is not None:
        score_error += 4 * unit * max(map(abs, spec.alibi_slopes)) * longest
    sum_error = 6 * math.sqrt(longest) * unit + 8 * unit
    largest_value = float(values.abs().max())
    out_error = largest_value * (math.expm1(2 * score_error) + 2 * sum_error + 4 * own_unit)
    lse_unit = torch.finfo(torch.float32).eps / 2
    lse_error = score_error + sum_error + 4 * lse_unit * (largest_score + math.log(longest) + 1)
    if spec.alibi_slopes is not None:
        lse_error += 4 * lse_unit * max(map(abs, spec.alibi_slopes)) * longest
    return out_error, lse_error


HEAD_SIZES = (16, 32, 64, 72, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Any layer: every feature, alone and together."""
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 8))
    head_size = draw(st.sampled_from(HEAD_SIZES))
    slopes = st.lists(st.floats(0, 1, width=32), min_size=num_heads, max_size=num_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        v_head_size=draw(st.just(head_size) | st.sampled_from(HEAD_SIZES)),
        scale=draw(st.just(head_size**-0.5) | st.floats(0.01, 0.5)),
        dtype=draw(st.sampled_from(DTYPES)),
        causal=draw(st.booleans()),
        sliding_window=draw(st.none() | st.sampled_from([1, 2, 7, 16, 17, 40])),
        logits_soft_cap=draw(st.none() | st.none() | st.floats(1, 50)),
        alibi_slopes=draw(st.none() | st.none() | slopes.map(tuple)),
        sinks=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layer with any small batch: decode, prefill, chunk continuation, mixed and empty."""
    spec = draw(specs())
    block_size = draw(st.sampled_from([1, 8, 16]))
    edges = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 33]
    lengths = st.sampled_from([length for length in edges if length > 0])
    kinds = draw(st.sampled_from(["decode", "prefill", "mixed"]))
    seq_lens = draw(st.lists(lengths, max_size=6 if kinds == "decode" else 3))
    query_lens = []
    for length in seq_lens:
        kind = draw(st.sampled_from(["decode", "chunk", "prefill"])) if kinds == "mixed" else kinds
        query_lens.append(
            {"decode": 1, "chunk": draw(st.integers(1, length)), "prefill": length}[kind]
        )
    num_blocks = sum(-(-length // block_size) for length in seq_lens) + draw(st.integers(1, 4))
    batch = make_batch(
        seq_lens,
        query_lens,
        block_size,
        num_blocks,
        seed=draw(st.integers(0, 99)),
        garbage=draw(st.sampled_from(TABLE_GARBAGE)),
        extra_columns=draw(st.integers(0, 3)),
        shared_prefix=draw(st.booleans()),
    )
    kv_dtype = draw(st.just(spec.dtype) | st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 99))
    return make_case(spec, batch, block_size, num_blocks, kv_dtype=kv_dtype, seed=seed)
