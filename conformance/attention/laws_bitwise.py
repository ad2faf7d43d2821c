"""Laws of equal bits: things that must not matter at all."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...core.attention import AttentionBackend, Capabilities, KVCache
from ...core.errors import UnsupportedError
from .cases import AttentionCase, CaseData, batch_of, spoil, unseen_slots
from .generate import as_bytes
from .laws import BitwiseLaw, Law
from .oracle import write_kv_oracle
from .subject import UNTOUCHED, LawViolation, Result, Subject, attend, same_bits


class BlockPermutation(BitwiseLaw):
    """Physical block ids do not matter.

    All blocks of the cache change places, and the block table follows. Moving a sequence to the
    host and back into other blocks is the same thing.
    """

    name = "block_permutation"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        instance = subject.instance(data)
        lse = subject.capabilities.lse
        plain = attend(instance, data, with_lse=lse)
        num_blocks = data.cache_spec.num_blocks
        generator = torch.Generator().manual_seed(case.seed + 1)
        order = torch.randperm(num_blocks, generator=generator)
        moved = _copy(data.cache)
        places = order.to(subject.device)
        as_bytes(moved.k)[places] = as_bytes(data.cache.k)
        as_bytes(moved.v)[places] = as_bytes(data.cache.v)
        table = data.table.clone()
        for row, shape in zip(table, case.sequences, strict=True):
            used = shape.num_blocks(case.block_size)
            row[:used] = order[row[:used].long()].to(torch.int32)
        batch = batch_of(case.sequences, table, data.batch.slot_mapping_cpu, subject.device)
        permuted = replace(data, cache=moved, batch=batch)
        result = attend(instance, permuted, with_lse=lse)
        return self.compare(subject, "blocks in other places", plain, result, permuted)


class UnseenSlots(BitwiseLaw):
    """What stands in slots of no visible key does not matter, however large.

    The rest of a last block, keys that left the window, blocks of others.
    """

    name = "unseen_slots"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        size = 3e4 if case.kv_dtype == torch.float16 else 1e30
        return _spoiled(self, subject, case, (size,))


class NonfiniteSlots(BitwiseLaw):
    """NaN and infinity in slots of no visible key do not matter either."""

    name = "nonfinite_slots"

    def not_claimed(self, capabilities: Capabilities, dtype: torch.dtype) -> str | None:
        return None if capabilities.nonfinite_safe else "nonfinite_safe is not declared"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        if case.kv_dtype.itemsize == 1:
            # No infinity has 8 bits.
            largest = torch.finfo(case.kv_dtype).max
            return _spoiled(self, subject, case, (torch.nan, 100 * largest))
        return _spoiled(self, subject, case, (torch.nan, torch.inf, -torch.inf))


def _spoiled(
    law: BitwiseLaw, subject: Subject, case: AttentionCase, sizes: tuple[float, ...]
) -> float:
    data = subject.build(case)
    instance = subject.instance(data)
    plain = attend(instance, data, with_lse=subject.capabilities.lse)
    share = 0.0
    for size in sizes:
        other = replace(data, cache=_copy(data.cache))
        spoil(other.cache, unseen_slots(data), case.seed + 2, size)
        result = attend(instance, other, with_lse=subject.capabilities.lse)
        what = f"numbers of about {size:g} in slots of no visible key"
        share = max(share, law.compare(subject, what, plain, result, other))
    return share


class TableTail(BitwiseLaw):
    """What stands in a block table past a sequence's last block does not matter.

    Block ids of others, -1, ids far outside of the cache; and how many such columns there are.
    """

    name = "table_tail"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        instance = subject.instance(data)
        lse = subject.capabilities.lse
        plain = attend(instance, data, with_lse=lse)
        share = 0.0
        for garbage, columns in ((-1, 1), (2**31 - 1, 3), (0, 2), (-(2**31), 0)):
            width = data.table.shape[1] - case.extra_columns
            table = torch.full((len(data.table), width + columns), garbage, dtype=torch.int32)
            for row, old, shape in zip(table, data.table, case.sequences, strict=True):
                used = shape.num_blocks(case.block_size)
                row[:used] = old[:used]
            batch = batch_of(case.sequences, table, data.batch.slot_mapping_cpu, subject.device)
            other = replace(data, batch=batch)
            result = attend(instance, other, with_lse=lse)
            what = f"{garbage} past the last block in the table and {columns} more columns"
            share = max(share, self.compare(subject, what, plain, result, other))
        return share


class PaddingRows(BitwiseLaw):
    """Query rows behind the last query do not matter: how many, or what is in them."""

    name = "padding_rows"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return replace(case, padding_rows=0)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        instance = subject.instance(data)
        lse = subject.capabilities.lse
        plain = attend(instance, data, with_lse=lse)
        rows = torch.full((1 + case.seed % 5, *data.query.shape[1:]), torch.nan)
        padding = rows.to(data.query.dtype).to(subject.device)
        other = replace(data, query=torch.cat([data.query, padding]))
        result = attend(instance, other, with_lse=lse)
        what = f"{len(padding)} rows of NaN behind the last query"
        return self.compare(subject, what, plain, result, other)


class Repeat(BitwiseLaw):
    """The same call gives the same bits again.

    With the same plan, with a new one, with another instance, and whatever the output held before.
    """

    name = "repeat"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        instance = subject.instance(data)
        lse = subject.capabilities.lse
        plan = instance.plan(data.batch)
        plain = attend(instance, data, plan=plan, with_lse=lse)
        again = attend(instance, data, plan=plan, with_lse=lse, filling=torch.nan)
        what = "the same plan once more"
        share = self.compare(subject, what, plain, again, data)
        anew = attend(instance, data, with_lse=lse)
        share = max(share, self.compare(subject, "a new plan", plain, anew, data))
        other = attend(subject.instance(data), data, with_lse=lse)
        what = "another instance"
        return max(share, self.compare(subject, what, plain, other, data))


class Steps(BitwiseLaw):
    """Nothing is left over from an earlier step.

    An instance that has planned and computed another batch, shorter or longer, computes this one
    as a new instance does: with a new plan, and with one made before the other batches were.
    """

    name = "steps"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return replace(case, padding_rows=case.num_tokens + 3)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        used = subject.instance(data)
        plan = used.plan(data.batch)
        for earlier in _other_steps(data):
            attend(used, earlier)
        lse = subject.capabilities.lse
        plain = attend(subject.instance(data), data, with_lse=lse)
        result = attend(used, data, plan=plan, with_lse=lse)
        what = "other batches planned and computed since its plan"
        share = self.compare(subject, what, plain, result, data)
        result = attend(used, data, with_lse=lse)
        what = "other batches computed before"
        behind = result.out[result.num_tokens :]
        if not same_bits(behind, torch.full_like(behind, UNTOUCHED)):
            raise LawViolation(
                "with larger batches computed before, forward writes rows behind the last query",
                data,
            )
        return max(share, self.compare(subject, what, plain, result, data))


def _other_steps(data: CaseData) -> list[CaseData]:
    """Other batches: one token earlier, in reverse, twice as many sequences, longer ones, none."""
    shapes = data.case.sequences
    earlier = [
        replace(shape, seq_len=shape.seq_len - 1) if shape.context_len else shape
        for shape in shapes
    ]
    longer = [replace(shape, seq_len=shape.seq_len + data.case.block_size + 1) for shape in shapes]
    table = data.table.clamp(0, data.cache_spec.num_blocks - 1)
    wide = torch.cat([table, table.flip(1), table], dim=1) if table.shape[1] else table
    others = [
        (earlier, data.table, data.query),
        (shapes[::-1], data.table.flip(0), data.query.flip(0)),
        ([*shapes, *shapes], torch.cat([data.table, data.table]), data.query.repeat(2, 1, 1)),
        ([], data.table[:0], data.query[:0]),
    ]
    if wide.shape[1] * data.case.block_size >= max((one.seq_len for one in longer), default=0):
        others.append((longer, wide, data.query))
    steps = []
    for sequences, blocks, query in others:
        slots = torch.full((sum(one.query_len for one in sequences),), -1)
        batch = batch_of(sequences, blocks, slots, data.query.device)
        steps.append(replace(data, batch=batch, query=query))
    return steps


class Layers(BitwiseLaw):
    """One plan and one instance serve all layers: nothing of the first one is kept.

    Neither its query nor its cache, nor the scales of that; not by ``plan``, not by ``forward``,
    not by ``write_kv``.
    """

    name = "layers"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        first = subject.build(case)
        scaled = case
        if case.kv_dtype.itemsize == 1:
            scaled = replace(case, k_scale=1.7 * case.k_scale, v_scale=0.6 * case.v_scale)
        other = subject.build(replace(scaled, seed=case.seed + 1))
        second = replace(
            first, case=scaled, query=other.query, cache=other.cache, sinks=other.sinks
        )
        instance = subject.instance(first)
        plan = instance.plan(first.batch)
        attend(instance, first, plan=plan)
        lse = subject.capabilities.lse
        result = attend(instance, second, plan=plan, with_lse=lse)
        plain = attend(subject.instance(second), second, with_lse=lse)
        what = "the plan of another layer"
        share = self.compare(subject, what, plain, result, second)
        for number, layer in enumerate((first, second)):
            slots = layer.batch.slot_mapping
            expected = write_kv_oracle(first.key, first.value, layer.cache, slots)
            instance.write_kv(first.key, first.value, layer.cache, slots)
            for after, right in ((layer.cache.k, expected.k), (layer.cache.v, expected.v)):
                if not same_bits(after, right):
                    raise LawViolation(f"write_kv does not write to the cache of layer {number}")
        return share


class StridedRows(BitwiseLaw):
    """A query that is a slice of a fused projection gives what its packed copy gives.

    The same holds for the keys and values that are written.
    """

    name = "strided_rows"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return replace(case, fused=True)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        instance = subject.instance(data)
        packed = replace(data, query=data.query.contiguous(), cache=_copy(data.cache))
        written = replace(data, cache=_copy(data.cache))
        slots = data.batch.slot_mapping
        instance.write_kv(data.key, data.value, written.cache, slots)
        instance.write_kv(data.key.contiguous(), data.value.contiguous(), packed.cache, slots)
        lse = subject.capabilities.lse
        plain = attend(instance, packed, with_lse=lse)
        strided = attend(instance, written, with_lse=lse)
        what = "strided rows"
        return self.compare(subject, what, plain, strided, written)


class CacheStrides(BitwiseLaw):
    """A cache with gaps between its blocks is read right, or refused; never misread.

    Strides tell where blocks are. A backend that wants them packed raises ``ValueError`` or
    ``UnsupportedError``.
    """

    name = "cache_strides"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        instance = subject.instance(data)
        attend(instance, data)
        gaps = replace(data, cache=_with_gaps(data.cache))
        plan = instance.plan(data.batch)
        try:
            instance.write_kv(data.key, data.value, gaps.cache, data.batch.slot_mapping)
            result = attend(instance, gaps, plan=plan)
        except (ValueError, UnsupportedError):
            return 0.0
        written = write_kv_oracle(data.key, data.value, data.cache, data.batch.slot_mapping_cpu)
        if not (same_bits(gaps.cache.k, written.k) and same_bits(gaps.cache.v, written.v)):
            raise LawViolation(
                "write_kv misplaces tokens in a cache with gaps between blocks", gaps
            )
        plain = attend(instance, replace(data, cache=written))
        return self.compare(subject, "gaps between blocks", plain, result, gaps)


def _with_gaps(cache: KVCache) -> KVCache:
    """The same blocks, each followed by a block of other numbers."""

    def spread(given: torch.Tensor) -> torch.Tensor:
        tensor = as_bytes(given)
        both = torch.stack([tensor, tensor.flip(0) + 1], dim=1)
        # ``stack`` packs by the logical order; the physical one is that of the cache.
        order = sorted(range(1, 4), key=tensor.stride, reverse=True)
        back = [0, *(1 + order.index(dim) for dim in range(1, 4))]
        physical = both.permute(0, 1, *(1 + dim for dim in order)).contiguous()
        return physical[:, 0].permute(*back).view(given.dtype)

    return replace(cache, k=spread(cache.k), v=spread(cache.v))


class PlanInto(BitwiseLaw):
    """A plan that is updated in place is as good as a new one; a captured graph replays with it.

    ``plan(batch, into=plan)`` with the shapes of the earlier batch and other lengths and blocks. On
    a CUDA device ``forward`` is captured with the earlier plan and replayed after the update.
    """

    name = "plan_into"
    kind = "decode"

    def not_claimed(self, capabilities: Capabilities, dtype: torch.dtype) -> str | None:
        return None if capabilities.cuda_graphs else "cuda_graphs is not declared"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return replace(case, padding_rows=0)

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        if not case.sequences:
            return 0.0
        instance = subject.instance(data)
        earlier_shapes = [
            replace(shape, seq_len=max(min(shape.seq_len, 1), shape.seq_len // (2 + index % 3)))
            for index, shape in enumerate(case.sequences)
        ]
        slots = data.batch.slot_mapping_cpu
        other = replace(data, batch=batch_of(earlier_shapes, data.table, slots, subject.device))
        # Lengths grow, and shrink.
        return max(
            self._updated(subject, instance, earlier, later)
            for earlier, later in ((other, data), (data, other))
        )

    def _updated(
        self, subject: Subject, instance: AttentionBackend, earlier: CaseData, later: CaseData
    ) -> float:
        plan = instance.plan(earlier.batch)
        lse = subject.capabilities.lse
        if subject.device.type == "cuda":
            result = _replayed(instance, earlier, later)
            lse = False
        else:
            attend(instance, earlier, plan=plan)
            instance.plan(later.batch, into=plan)
            result = attend(instance, later, plan=plan, with_lse=lse)
        plain = attend(subject.instance(later), later, with_lse=lse)
        return self.compare(subject, "a plan updated in place", plain, result, later)


def _replayed(instance: AttentionBackend, earlier: CaseData, data: CaseData) -> Result:
    """Capture ``forward`` for the earlier batch, update its plan, replay."""
    plan = instance.plan(earlier.batch)
    out = torch.full_like(attend(instance, earlier, plan=plan).out, UNTOUCHED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        instance.forward(data.query, data.cache, plan, out, sinks=data.sinks)
    instance.plan(data.batch, into=plan)
    graph.replay()
    torch.cuda.synchronize()
    return Result(out, None, data.batch.num_tokens)


def _copy(cache: KVCache) -> KVCache:
    """The same contents and strides in other memory."""
    return replace(cache, k=cache.k.clone(), v=cache.v.clone())


BITWISE_LAWS: tuple[Law, ...] = (
    BlockPermutation(),
    UnseenSlots(),
    NonfiniteSlots(),
    TableTail(),
    PaddingRows(),
    Repeat(),
    Steps(),
    Layers(),
    StridedRows(),
    CacheStrides(),
    PlanInto(),
)
