"""Mutants that keep something of an earlier step or layer, or plan for some sizes only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....core.attention import (
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
    SizeSet,
)
from ....core.options import PartOptions
from ..plain_backend import Attended, PlainBackend, PlainPlan, PlannedSequence, own_plan
from .registry import mutant


@mutant(
    "lengths_of_an_earlier_plan",
    "Lengths are kept as long as the number of sequences and of rows stays the same.",
)
class _LengthsOfAnEarlierPlan(PlainBackend):
    _kept: PlainPlan | None = None

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        plan, kept = own_plan(super().plan(batch, into)), self._kept
        if kept is None or [(one.first_row, one.end_row) for one in kept.sequences] != [
            (one.first_row, one.end_row) for one in plan.sequences
        ]:
            self._kept = PlainPlan(plan.sequences)
            return plan
        pairs = zip(plan.sequences, kept.sequences, strict=True)
        plan.sequences = tuple(
            replace(new, num_tokens=min(old.num_tokens, new.num_tokens)) for new, old in pairs
        )
        return plan


@mutant(
    "block_table_of_an_earlier_plan",
    "Blocks are kept as long as all lengths stay the same.",
)
class _BlockTableOfAnEarlierPlan(PlainBackend):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def planned(self, batch: AttentionBatch, index: int) -> PlannedSequence:
        sequence = super().planned(batch, index)
        lengths = (index, *batch.seq_lens_cpu.tolist())
        kept = self._kept.setdefault(lengths, sequence.block_ids)
        return replace(sequence, block_ids=kept)


@mutant(
    "newest_plan_for_all",
    "Forward uses the newest plan, whichever plan it is given.",
)
class _NewestPlanForAll(PlainBackend):
    _newest: AttentionPlan | None = None

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self._newest = super().plan(batch, into)
        return self._newest

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
        newest = self._newest if self._newest is not None else plan
        return super().forward(query, cache, newest, out, sinks=sinks, lse=lse)


@mutant(
    "gathered_keys_kept",
    "Gathered keys and values are used again for a sequence with the same blocks and length.",
)
class _GatheredKeysKept(PlainBackend):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def gather(self, stored: Tensor, sequence: PlannedSequence, keys_at: Tensor) -> Tensor:
        name = (stored.data_ptr(), tuple(sequence.block_ids.tolist()), tuple(keys_at.tolist()))
        if name not in self._kept:
            self._kept[name] = super().gather(stored, sequence, keys_at)
        return self._kept[name]


@dataclass
class _PlanWithCache(PlainPlan):
    """A plan that remembers the cache of the first layer.

    Attributes:
        cache: None before the first layer.
    """

    cache: KVCache | None = None


@mutant("cache_of_the_first_layer", "All layers of a step read the cache of the first one.")
class _CacheOfTheFirstLayer(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        return _PlanWithCache(own_plan(super().plan(batch, into)).sequences)

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
        if isinstance(plan, _PlanWithCache):
            plan.cache = plan.cache or cache
            cache = plan.cache
        return super().forward(query, cache, plan, out, sinks=sinks, lse=lse)


@mutant(
    "plan_used_up_by_forward",
    "A plan serves one forward; for the next layer it has no sequences left.",
)
class _PlanUsedUpByForward(PlainBackend):
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
        own_plan(plan).sequences = ()
        return out


@mutant(
    "workspace_not_cleared",
    "Sums begin with what an earlier sum of the same shape left in the workspace.",
    ("flashinfer#1046",),
)
class _WorkspaceNotCleared(PlainBackend):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._workspace: dict[torch.Size, Tensor] = {}

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        total = super().weighted_sum(weights, values)
        if total.shape in self._workspace:
            total = total + self._workspace[total.shape]
        self._workspace[total.shape] = total
        return total


@mutant(
    "lengths_of_replayed_plan_stay",
    "A plan that is updated in place keeps its lengths and is given the new blocks only.",
    ("flashinfer#4002", "TensorRT-LLM#18769", "TensorRT-LLM#18443"),
)
class _LengthsOfReplayedPlanStay(PlainBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), cuda_graphs=True)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        old = own_plan(into).sequences if into is not None else ()
        plan = own_plan(super().plan(batch, into))
        if old:
            plan.sequences = tuple(
                replace(new, num_tokens=min(before.num_tokens, new.num_tokens))
                for new, before in zip(plan.sequences, old, strict=True)
            )
        return plan


@mutant(
    "replayed_plan_never_shrinks",
    "What an earlier plan had to do beyond the new one is done again when it is updated in place.",
    ("flashinfer#4002", "flashinfer#4016", "flashinfer#4430", "flashinfer#4794"),
)
class _ReplayedPlanNeverShrinks(PlainBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), cuda_graphs=True)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        old = own_plan(into).sequences if into is not None else ()
        plan = own_plan(super().plan(batch, into))
        if old:
            plan.sequences = tuple(
                before if before.num_tokens > new.num_tokens else new
                for new, before in zip(plan.sequences, old, strict=True)
            )
        return plan


@mutant(
    "replayed_plan_is_not_updated",
    "A plan that is to be updated in place is left as it was and a new one returned.",
    ("TensorRT-LLM#18769", "TensorRT-LLM#18443"),
)
class _ReplayedPlanIsNotUpdated(PlainBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), cuda_graphs=True)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        return super().plan(batch)


@dataclass
class _PlanWithRows(PlainPlan):
    """A plan that knows how many rows the largest batch had.

    Attributes:
        num_rows: query rows of the largest batch so far.
    """

    num_rows: int = 0


@mutant(
    "rows_of_an_earlier_batch_stay",
    "Rows that an earlier, larger batch had are written behind the last query.",
)
class _RowsOfAnEarlierBatchStay(PlainBackend):
    _most_rows: int = 0

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self._most_rows = max(self._most_rows, batch.num_tokens)
        return _PlanWithRows(own_plan(super().plan(batch, into)).sequences, self._most_rows)

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
        if isinstance(plan, _PlanWithRows):
            end_row = max((one.end_row for one in plan.sequences), default=0)
            out[end_row : plan.num_rows] = 0
        return out


@mutant(
    "scratch_of_the_longest_batch",
    "Decode is split by the length of the longest batch so far, so that sums are rounded anew.",
)
class _ScratchOfTheLongestBatch(PlainBackend):
    _longest: int = 0

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self._longest = max(self._longest, batch.max_seq_len)
        return super().plan(batch, into)

    def runs(self, seen: range) -> list[range]:
        length = max(1, -(-self._longest // 4))
        starts = range(seen.start, max(seen.stop, seen.start + 1), length)
        return [range(start, min(start + length, seen.stop)) for start in starts]


@mutant("seq_lens_changed_by_plan", "The plan makes context lengths of the caller's seq_lens.")
class _SeqLensChangedByPlan(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        plan = super().plan(batch, into)
        batch.seq_lens.sub_(batch.query_start_loc[1:] - batch.query_start_loc[:-1])
        return plan


@mutant(
    "undeclared_size_of_value_head_accepted",
    "Value heads up to 256 are declared, larger ones accepted and planned as if they had 256.",
)
class _UndeclaredSizeOfValueHeadAccepted(PlainBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), head_sizes=SizeSet(maximum=256))

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        fitting = min(spec.v_head_size, 256)
        super().__init__(
            replace(spec, v_head_size=fitting),
            replace(cache, v_head_size=fitting),
            device,
            options,
        )


@mutant(
    "head_planned_in_eights",
    "Heads are planned in vectors of 8 elements, and the elements behind the last are left out.",
)
class _HeadPlannedInEights(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        size = rows.shape[-1] // 8 * 8
        return super().dot_products(rows[..., :size], keys[..., :size])


@mutant(
    "group_planned_up_to_thirty_two",
    "Of a group of query heads the first 32 are planned, and the others come out as zero.",
)
class _GroupPlannedUpToThirtyTwo(PlainBackend):
    def weigh(self, scores: Tensor, values: Tensor) -> Attended:
        attended = super().weigh(scores, values)
        heads = torch.arange(len(attended.out), device=self.device) % self.spec.group_size
        return Attended(attended.out.masked_fill((heads >= 32)[:, None, None], 0), attended.lse)
