"""What backends are compared on: drawn cases, and the same keys and values in other caches."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.errors import HypothesisWarning

from ...core.attention import KVCacheSpec, KVLayout, allocate_kv_cache
from . import generate
from .axes import Axes
from .cases import GARBAGE, AttentionCase, CaseData, batch_of, build, spoil, unseen_slots
from .strategies import cases, few_cases

#: So many cases are drawn for a batch that everybody computes, before the search is given up.
_DRAWS = 10


def drawn_cases(axes: Axes, count: int, seed: int) -> Iterator[AttentionCase]:
    """A plain case for every kind of batch and dtype, then random ones, each once; enough that
    ``count`` of them remain when most are left out."""
    seen = set()
    for dtype in axes.dtype:
        for case in few_cases(replace(axes, dtype=(dtype,))):
            if case not in seen:
                seen.add(case)
                yield case
    for draw in range(_DRAWS):
        for case in _random_cases(axes, count, zlib.crc32(f"{seed} pairwise {draw}".encode())):
            if case not in seen:
                seen.add(case)
                yield case


def _random_cases(axes: Axes, count: int, seed: int) -> list[AttentionCase]:
    """Cases as the suite draws them for a law."""
    found: list[AttentionCase] = []

    def keep(case: AttentionCase) -> None:
        found.append(case)

    test = hypothesis.given(cases(axes, "any"))(keep)
    test = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(test)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)
        hypothesis.seed(seed)(test)()
    return found


def rehoused(data: CaseData, block_size: int, layout: KVLayout) -> CaseData:
    """The same keys and values in a cache with another block size or another physical order.

    Blocks that sequences have in common become blocks of their own, since a common prefix need not
    end where a block of the other size does.
    """
    case, device = data.case, data.query.device
    if block_size == case.block_size:
        return build(case, layout, device)
    shapes = tuple(replace(one, shared_blocks=0) for one in case.sequences)
    lengths = [one.seq_len for one in shapes]
    table, num_blocks = generate.block_tables(
        lengths,
        [0] * len(shapes),
        block_size,
        case.spare_blocks,
        case.shuffle,
        case.extra_columns,
        case.table_garbage,
    )
    old_spec: KVCacheSpec = data.cache_spec
    cache_spec = replace(old_spec, num_blocks=num_blocks, block_size=block_size)
    cache = allocate_kv_cache(cache_spec, layout, device, data.cache.k_scale, data.cache.v_scale)
    for index, length in enumerate(lengths):
        old = data.slots(index).to(device)
        new = generate.slots_of(table[index], length, block_size).to(device)
        for source, target in ((data.cache.k, cache.k), (data.cache.v, cache.v)):
            read = generate.as_bytes(source)[old // case.block_size, old % case.block_size]
            generate.as_bytes(target)[new // block_size, new % block_size] = read
    # Nothing is written in a comparison: no new token has a slot.
    nowhere = torch.full((case.num_tokens,), -1, dtype=torch.int64)
    moved = replace(
        data,
        case=replace(case, block_size=block_size, sequences=shapes),
        cache_spec=cache_spec,
        batch=batch_of(shapes, table, nowhere, device),
        cache=cache,
        table=table,
    )
    spoil(cache, unseen_slots(moved), case.seed, GARBAGE)
    return moved
