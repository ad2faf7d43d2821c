"""Laws about the same tokens reached in several ways."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...core.attention import AttentionBackend, KVCache
from .cases import AttentionCase, CaseData, SequenceShape, batch_of
from .generate import as_bytes, slots_of
from .laws import Law
from .subject import Result, Subject, attend, check_meaning


class Chunks(Law):
    """A prompt computed in chunks is what it is in one piece.

    Each chunk is written and attended to, after those before it; every row is within the bound.
    """

    name = "chunks"
    kind = "one"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return _one_prompt(case)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        whole = case.sequences[0].seq_len
        instance = subject.instance(data)
        empty = replace(data, cache=_other_contents(data))
        first = 1 + case.seed % max(1, whole)
        second = min(whole, first + 1 + (case.seed // 7) % max(1, whole))
        share, start = 0.0, 0
        for end in sorted({first, second, whole}):
            if end > start:
                share = max(share, _extend(instance, empty, data.table[0], start, end))
                start = end
        return share


class SharedPrefix(Law):
    """Keys read from the blocks of another sequence are as good as own ones.

    One sequence computes a prefix; a second one has its full blocks in its own table and computes
    the rest only.
    """

    name = "shared_prefix"
    kind = "one"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return _one_prompt(case)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(replace(case, spare_blocks=case.spare_blocks + _blocks(case)))
        whole, block_size = case.sequences[0].seq_len, case.block_size
        instance = subject.instance(data)
        empty = replace(data, cache=_other_contents(data))
        share = _extend(instance, empty, data.table[0], 0, whole)
        common = (whole - 1) // block_size
        table = data.table[0].clone()
        table[common : _blocks(case)] = _spare(data)[: _blocks(case) - common]
        return max(share, _extend(instance, empty, table, common * block_size, whole))


class Fork(Law):
    """Two continuations of one prompt do not disturb each other.

    Both have the prompt's full blocks in their tables and a copy of its last, partly filled one.
    """

    name = "fork"
    kind = "one"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return _one_prompt(case)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(replace(case, spare_blocks=case.spare_blocks + _blocks(case)))
        whole, block_size = case.sequences[0].seq_len, case.block_size
        instance = subject.instance(data)
        empty = replace(data, cache=_other_contents(data))
        prompt = max(1, whole - 1 - case.seed % 3) if whole > 1 else whole
        share = _extend(instance, empty, data.table[0], 0, prompt)
        if prompt == whole:
            return share
        full = prompt // block_size
        table = data.table[0].clone()
        table[full : _blocks(case)] = _spare(data)[: _blocks(case) - full]
        if prompt % block_size:
            for tensor in (empty.cache.k, empty.cache.v):
                tensor[int(table[full])] = tensor[int(data.table[0, full])]
        other = _shifted(data)
        fork = replace(empty, key=other.key, value=other.value, query=other.query)
        for position in range(prompt, whole):
            share = max(share, _extend(instance, empty, data.table[0], position, position + 1))
            share = max(share, _extend(instance, fork, table, position, position + 1))
        return share


def _one_prompt(case: AttentionCase) -> AttentionCase:
    """All tokens of the first sequence as new ones, each with a slot."""
    length = case.sequences[0].seq_len if case.sequences else 1
    shape = SequenceShape(max(1, length), max(1, length))
    return replace(case, sequences=(shape,), unstored_every=0, padding_rows=0)


def _blocks(case: AttentionCase) -> int:
    return case.sequences[0].num_blocks(case.block_size)


def _spare(data: CaseData) -> Tensor:
    """Physical blocks that the sequence does not have, int32."""
    mine = set(data.table[0, : _blocks(data.case)].tolist())
    others = [block for block in range(data.cache_spec.num_blocks) if block not in mine]
    return torch.tensor(others, dtype=torch.int32)


def _other_contents(data: CaseData) -> KVCache:
    """A cache of the same strides with the contents of its slots reversed: nothing is there yet."""
    k, v = torch.empty_like(data.cache.k), torch.empty_like(data.cache.v)
    as_bytes(k).copy_(as_bytes(data.cache.k).flip(0, 1))
    as_bytes(v).copy_(as_bytes(data.cache.v).flip(0, 1))
    return replace(data.cache, k=k, v=v)


def _shifted(data: CaseData) -> CaseData:
    """Other queries, keys and values for the same places."""
    return replace(data, query=data.query.flip(0), key=data.key.flip(0), value=data.value.flip(0))


def _extend(
    instance: AttentionBackend, data: CaseData, table_row: Tensor, start: int, end: int
) -> float:
    """Write the tokens from ``start`` to ``end``, attend, and compare with the oracle."""
    slots = slots_of(table_row, end, data.case.block_size)[start:]
    batch = batch_of((SequenceShape(end, end - start),), table_row[None], slots, data.query.device)
    instance.write_kv(data.key[start:end], data.value[start:end], data.cache, batch.slot_mapping)
    step = replace(data, query=data.query[start:end], batch=batch)
    result: Result = attend(instance, step)
    what = f"the output of tokens {start} to {end - 1}"
    return check_meaning(result, step, what=what)


COMPOSITION_LAWS: tuple[Law, ...] = (Chunks(), SharedPrefix(), Fork())
