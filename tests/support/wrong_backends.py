"""Backends that break one law each, for the reproducers of their faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jackfield.conformance.attention.plain_backend import PlainBackend, PlannedSequence
from jackfield.core.attention import (
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
)


class RowMissesItself(PlainBackend):
    """No row sees its own key."""

    name = "row misses itself"

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) & (rows_at != keys_at)


class LastTokenOfBlockLost(PlainBackend):
    """Sequences longer than a block do not see the last key of the first one."""

    name = "last token of block lost"

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) & (keys_at != 3)


class HeadsFirst(RowMissesItself):
    """The same, with the other layout."""

    name = "heads_first"

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), kv_layout="HND")


class LseInBaseTwo(PlainBackend):
    """The LSE of another base."""

    name = "lse2"

    def log_sum_exp(self, total: Tensor, largest: Tensor) -> Tensor:
        return super().log_sum_exp(total, largest) * 1.5


class RowOfNothingIsOne(PlainBackend):
    """A row without any key gives 1."""

    name = "one"

    def store_out(self, attended: Any, sequence: PlannedSequence, out: Tensor) -> None:
        super().store_out(attended, sequence, out)
        if not sequence.num_tokens:
            out[sequence.first_row : sequence.end_row] = 1


class Nudged(PlainBackend):
    """The output is one bit larger where ``nudged`` says so."""

    name = "nudged"

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
        super().forward(query, cache, plan, out, sinks=sinks, lse=lse)
        assert hasattr(plan, "sequences")
        if plan.sequences and self.nudged(query, cache, plan.sequences):
            rows = plan.sequences[-1].end_row
            out[:rows] = torch.nextafter(out[:rows], torch.tensor(torch.inf))
        return out

    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return False


class PlacesMatter(Nudged):
    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return bool(sequences[0].block_ids[0] % 2)


class UnseenMatters(Nudged):
    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return not bool(cache.v.abs().max() < 1e20)


class LargestMatters(Nudged):
    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return not bool((cache.v.float().abs() < 448).all())


class PaddingMatters(Nudged):
    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return len(query) > sequences[-1].end_row


class StridesMatter(Nudged):
    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return not query.is_contiguous()


class CompanyMatters(Nudged):
    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return len(sequences) > 1


class HistoryMatters(Nudged):
    """Every call after the first is nudged."""

    calls = 0

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), cuda_graphs=True)

    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        self.calls += 1
        return self.calls > 1


class TableWidthMatters(Nudged):
    width = 0

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self.width = batch.block_table_cpu.shape[1]
        return super().plan(batch, into)

    def nudged(self, query: Tensor, cache: KVCache, sequences: tuple[PlannedSequence, ...]) -> bool:
        return self.width > 4


class NeighbourWritten(PlainBackend):
    name = "neighbour/written"

    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        super().store_tokens(stored, slots, tokens)
        stored[0, 0] = 1


class NotSaturated(PlainBackend):
    name = "not saturated"

    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(tokens.abs() > 464, torch.nan, tokens)


class PaddingWritten(PlainBackend):
    name = "padding"

    def store_out(self, attended: Any, sequence: PlannedSequence, out: Tensor) -> None:
        super().store_out(attended, sequence, out)
        out[-1] = 0


class CacheWritten(PlainBackend):
    name = "cache"

    def attend_sequence(
        self,
        query: Tensor,
        cache: KVCache,
        sequence: PlannedSequence,
        out: Tensor,
        sinks: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        super().attend_sequence(query, cache, sequence, out, sinks, lse)
        cache.k[1, 2] += 1


class Unwritten(PlainBackend):
    name = "unwritten"

    def store_out(self, attended: Any, sequence: PlannedSequence, out: Tensor) -> None:
        if sequence.index:
            super().store_out(attended, sequence, out)


class AcceptsAll(PlainBackend):
    """Declares one head size and takes every window."""

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), sliding_window=False)

    def __init__(self, spec: AttentionSpec, *arguments: Any) -> None:
        super().__init__(replace(spec, sliding_window=None), *arguments)


class Fails(PlainBackend):
    name = "fails"

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")
