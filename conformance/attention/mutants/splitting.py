"""Mutants of split-KV decode, and of how work is split among sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.attention import AttentionBatch, AttentionPlan, AttentionSpec, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence, own_plan
from .registry import mutant


@mutant(
    "runs_merged_without_weights",
    "The results of separate runs of keys are averaged, whatever their LSE is.",
    ("flash-attention#1217",),
)
class _RunsMergedWithoutWeights(PlainBackend):
    def part_weights(self, lses: Tensor, largest: Tensor) -> Tensor:
        return torch.ones_like(lses)


@mutant("runs_merged_without_maximum", "Runs are merged by exp(LSE), which overflows.")
class _RunsMergedWithoutMaximum(PlainBackend):
    def part_weights(self, lses: Tensor, largest: Tensor) -> Tensor:
        return torch.exp(lses)


@mutant("only_first_four_runs", "Of more than four runs of keys the first four are merged.")
class _OnlyFirstFourRuns(PlainBackend):
    def merge(self, parts: Sequence[Attended]) -> Attended:
        return super().merge(parts[:4])


@mutant("only_last_run", "Each run of keys overwrites the result of the one before.")
class _OnlyLastRun(PlainBackend):
    def merge(self, parts: Sequence[Attended]) -> Attended:
        return parts[-1]


@mutant("lse_of_last_run", "The LSE of a decode is that of its last run of keys.")
class _LSEOfLastRun(PlainBackend):
    def merge(self, parts: Sequence[Attended]) -> Attended:
        return Attended(super().merge(parts).out, parts[-1].lse)


@mutant(
    "run_of_one_key_dropped",
    "A last run of exactly one key is dropped.",
    ("flash-attention#1076",),
)
class _RunOfOneKeyDropped(PlainBackend):
    def runs(self, seen: range) -> list[range]:
        runs = super().runs(seen)
        return runs[:-1] if len(runs) > 1 and len(runs[-1]) == 1 else runs


@mutant("remainder_of_runs_dropped", "Keys past the last full run are dropped if there is one.")
class _RemainderOfRunsDropped(PlainBackend):
    def runs(self, seen: range) -> list[range]:
        runs = super().runs(seen)
        return [run for run in runs if len(run) == self.keys_per_run] or runs


@mutant("key_between_runs_counted_twice", "The last key of a run is the first of the next as well.")
class _KeyBetweenRunsCountedTwice(PlainBackend):
    def runs(self, seen: range) -> list[range]:
        runs = super().runs(seen)
        return runs[:1] + [range(run.start - 1, run.stop) for run in runs[1:]]


@mutant(
    "split_writes_first_sequence_only",
    "Decodes that need several runs are written for the first sequence of the batch only.",
    ("pytorch#194167", "flash-attention#1217"),
)
class _SplitWritesFirstSequenceOnly(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        long = sequence.query_len == 1 and sequence.num_tokens > self.keys_per_run
        if not (long and sequence.index > 0):
            super().store_out(attended, sequence, out)


@mutant(
    "empty_run_is_nan",
    "A number of keys that fills its runs exactly adds an empty run, whose NaN stays.",
    ("torchtitan#3235",),
)
class _EmptyRunIsNaN(PlainBackend):
    def runs(self, seen: range) -> list[range]:
        runs = super().runs(seen)
        full = len(runs[-1]) == self.keys_per_run
        return [*runs, range(seen.stop, seen.stop)] if full else runs

    def merge(self, parts: Sequence[Attended]) -> Attended:
        if len(parts) == 1:
            return parts[0]
        empty = [bool((part.lse == -math.inf).all()) for part in parts]
        return super().merge(
            [
                Attended(part.out * math.nan, part.lse) if is_empty else part
                for part, is_empty in zip(parts, empty, strict=True)
            ]
        )


@mutant(
    "run_before_window_is_nan",
    "A run of keys that the window hides altogether is computed and gives NaN.",
    ("xformers 0.0.28", "xformers#722"),
)
class _RunBeforeWindowIsNaN(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return range(seen.stop) if sequence.query_len == 1 else seen

    def largest(self, scores: Tensor) -> Tensor:
        return scores.amax(dim=-1, keepdim=True)


@mutant("runs_kept_in_bfloat16", "Results of runs are kept in bfloat16 until they are merged.")
class _RunsKeptInBfloat16(PlainBackend):
    def merge(self, parts: Sequence[Attended]) -> Attended:
        if len(parts) == 1:
            return parts[0]
        kept = [part.out.to(torch.bfloat16).to(part.out.dtype) for part in parts]
        return super().merge(
            [Attended(out, part.lse) for out, part in zip(kept, parts, strict=True)]
        )


@mutant(
    "runs_depend_on_the_batch",
    "Decodes are split by the length of the longest sequence, which shows in the last bits.",
    ("flash-attention#1570",),
)
class _RunsDependOnTheBatch(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self._keys_per_run = max(8, batch.max_seq_len // 4)
        return super().plan(batch, into)

    def runs(self, seen: range) -> list[range]:
        size = self._keys_per_run
        starts = range(seen.start, max(seen.stop, seen.start + 1), size)
        return [range(start, min(start + size, seen.stop)) for start in starts]


@mutant(
    "order_depends_on_batch_size",
    "With more than one sequence keys are summed up backwards, which shows in the last bits.",
    ("flash-attention#1570",),
)
class _OrderDependsOnBatchSize(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self._backwards = batch.num_seqs > 1
        return super().plan(batch, into)

    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        return positions.flip(0) if self._backwards else positions


@mutant(
    "order_alternates",
    "Every second call sums keys up backwards: the same call gives other last bits.",
    ("flash-attention#1268",),
)
class _OrderAlternates(PlainBackend):
    _calls = 0

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
        self._calls += 1
        return super().forward(query, cache, plan, out, sinks=sinks, lse=lse)

    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        return positions.flip(0) if self._calls % 2 else positions


@mutant("order_depends_on_place_in_batch", "Odd sequences of a batch are summed up backwards.")
class _OrderDependsOnPlaceInBatch(PlainBackend):
    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        return positions.flip(0) if sequence.index % 2 else positions


@mutant("order_depends_on_padding_rows", "Padding rows of the query turn the order of keys round.")
class _OrderDependsOnPaddingRows(PlainBackend):
    _backwards = False

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
        rows = max((one.end_row for one in own_plan(plan).sequences), default=0)
        self._backwards = len(query) > rows
        return super().forward(query, cache, plan, out, sinks=sinks, lse=lse)

    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        return positions.flip(0) if self._backwards else positions


@mutant("only_first_64_sequences", "Sequences past the first 64 of a batch are not computed.")
class _OnlyFirst64Sequences(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        plan = own_plan(super().plan(batch, into))
        plan.sequences = plan.sequences[:64]
        return plan


@mutant("last_sequence_not_computed", "The last of several sequences is not computed.")
class _LastSequenceNotComputed(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        plan = own_plan(super().plan(batch, into))
        plan.sequences = plan.sequences[: max(1, len(plan.sequences) - 1)]
        return plan


@mutant(
    "mixed_batch_is_all_decode",
    "If any sequence has a single row, only the last row of each one is computed.",
)
class _MixedBatchIsAllDecode(PlainBackend):
    def row_range(self, batch: AttentionBatch, index: int) -> tuple[int, int]:
        lengths = batch.query_start_loc_cpu.diff()
        first_row, end_row = super().row_range(batch, index)
        decode = bool((lengths == 1).any()) and end_row > first_row
        return (end_row - 1 if decode else first_row), end_row


@mutant(
    "first_row_decides_kind",
    "If the first sequence has a single row, so has every other one.",
)
class _FirstRowDecidesKind(PlainBackend):
    def row_range(self, batch: AttentionBatch, index: int) -> tuple[int, int]:
        first_row, end_row = super().row_range(batch, index)
        first_is_decode = batch.num_seqs > 0 and int(batch.query_start_loc_cpu[1]) == 1
        return (index, index + 1) if first_is_decode else (first_row, end_row)
