"""Mutants of the query rows that are read and the output rows that are written."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionPlan, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence, own_plan
from .registry import mutant


class _AroundForward(PlainBackend):
    """Does something before and after ``forward``."""

    def before(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> None:
        """What happens first."""

    def after(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> Tensor:
        """What happens last; returns what ``forward`` returns."""
        return out

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
        """As in ``PlainBackend``, with something around it."""
        self.before(query, plan, out)
        super().forward(query, cache, plan, out, sinks=sinks, lse=lse)
        return self.after(query, plan, out)


def _num_rows(plan: AttentionPlan) -> int:
    """Query rows that belong to a sequence."""
    return max((sequence.end_row for sequence in own_plan(plan).sequences), default=0)


@mutant(
    "query_read_as_packed",
    "Rows of the query are looked for as if they followed each other without gaps.",
    ("sglang#31667", "flashinfer#3800"),
)
class _QueryReadAsPacked(PlainBackend):
    def query_rows(self, query: Tensor, sequence: PlannedSequence) -> Tensor:
        packed = torch.empty(query.shape, device="meta").stride()
        return super().query_rows(query.as_strided(query.shape, packed), sequence)


@mutant("query_heads_transposed", "Heads and rows of the query are mixed up within a sequence.")
class _QueryHeadsTransposed(PlainBackend):
    def query_rows(self, query: Tensor, sequence: PlannedSequence) -> Tensor:
        rows = super().query_rows(query, sequence)
        num_heads, num_rows, head_size = rows.shape
        return rows.reshape(num_rows, num_heads, head_size).transpose(0, 1).contiguous()


@mutant("query_scaled_in_place", "The caller's query is multiplied by the scale.")
class _QueryScaledInPlace(PlainBackend):
    def query_rows(self, query: Tensor, sequence: PlannedSequence) -> Tensor:
        rows = super().query_rows(query, sequence)
        query[sequence.first_row : sequence.end_row] *= self.spec.scale
        return rows


@mutant("output_is_zeroed_first", "All rows of the output are set to zero first, padding too.")
class _OutputIsZeroedFirst(_AroundForward):
    def before(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> None:
        out.zero_()


@mutant("padding_row_is_written", "The row behind the last query is written.")
class _PaddingRowIsWritten(_AroundForward):
    def after(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> Tensor:
        rows = _num_rows(plan)
        out[rows : rows + 1] = 0
        return out


@mutant("padding_lse_is_written", "The LSE of padding rows is written.")
class _PaddingLSEIsWritten(PlainBackend):
    def store_lse(self, attended: Attended, sequence: PlannedSequence, lse: Tensor) -> None:
        super().store_lse(attended, sequence, lse)
        lse[sequence.end_row : sequence.end_row + 1] = 0


@mutant("last_query_row_not_written", "The last of several rows of a sequence is not written.")
class _LastQueryRowNotWritten(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        count = max(1, sequence.query_len - 1)
        rows = slice(sequence.first_row, sequence.first_row + count)
        out[rows] = attended.out[:, :count].transpose(0, 1).to(out.dtype)


@mutant("rows_written_in_reverse", "Rows of a sequence are written in the opposite order.")
class _RowsWrittenInReverse(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        super().store_out(Attended(attended.out.flip(1), attended.lse), sequence, out)


@mutant("rows_of_the_last_tile_zero", "Rows past the last multiple of 16 of a long query are zero.")
class _RowsOfTheLastTileZero(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        whole = sequence.query_len // 16 * 16
        if whole:
            attended.out[:, whole:] = 0
        super().store_out(attended, sequence, out)


@mutant("output_added_to_what_was_there", "Results are added to what the output held before.")
class _OutputAddedToWhatWasThere(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        rows = slice(sequence.first_row, sequence.end_row)
        before = out[rows].to(attended.out.dtype).transpose(0, 1)
        super().store_out(Attended(attended.out + before, attended.lse), sequence, out)


@mutant("result_in_a_new_tensor", "The caller's tensor is not filled, a new one returned.")
class _ResultInANewTensor(PlainBackend):
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
        return super().forward(query, cache, plan, out.clone(), sinks=sinks, lse=lse)


@mutant("result_is_not_returned", "Forward returns another tensor than the one it filled.")
class _ResultIsNotReturned(_AroundForward):
    def after(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> Tensor:
        return torch.zeros_like(out)


@mutant("sequence_without_rows_is_written", "A sequence without query rows writes one.")
class _SequenceWithoutRowsIsWritten(_AroundForward):
    def after(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> Tensor:
        for sequence in own_plan(plan).sequences:
            if not sequence.query_len:
                out[sequence.first_row : sequence.first_row + 1] = 0
        return out


@mutant("sequence_without_rows_raises", "A sequence without query rows fails.")
class _SequenceWithoutRowsRaises(_AroundForward):
    def before(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> None:
        if any(not sequence.query_len for sequence in own_plan(plan).sequences):
            raise IndexError("a sequence has no query rows")


@mutant("empty_batch_raises", "A batch without sequences fails.")
class _EmptyBatchRaises(_AroundForward):
    def before(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> None:
        if not own_plan(plan).sequences:
            raise ValueError("max() of no lengths")


@mutant(
    "head_size_32_not_written",
    "With head_size 32 a single row is not written.",
    ("vllm#34570",),
)
class _HeadSize32NotWritten(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        if self.spec.head_size != 32 or sequence.query_len > 1:
            super().store_out(attended, sequence, out)


@mutant(
    "value_tail_not_written",
    "Elements past the last multiple of 16 of a value head are not written.",
)
class _ValueTailNotWritten(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        whole = self.spec.v_head_size // 16 * 16
        rows = slice(sequence.first_row, sequence.end_row)
        out[rows, :, :whole] = attended.out[..., :whole].transpose(0, 1).to(out.dtype)


@mutant("all_sequences_read_the_first_rows", "Every sequence reads the first rows of the query.")
class _AllSequencesReadTheFirstRows(PlainBackend):
    def query_rows(self, query: Tensor, sequence: PlannedSequence) -> Tensor:
        first = replace(sequence, first_row=0, end_row=sequence.query_len)
        return super().query_rows(query, first)


@mutant("padding_rows_must_be_finite", "NaN in the query's padding rows makes every row NaN.")
class _PaddingRowsMustBeFinite(_AroundForward):
    def after(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> Tensor:
        rows = _num_rows(plan)
        out[:rows] += (0 * query[rows:].sum()).to(out.dtype)
        return out


@mutant("padding_rows_raise", "A query with more rows than the sequences have fails.")
class _PaddingRowsRaise(_AroundForward):
    def before(self, query: Tensor, plan: AttentionPlan, out: Tensor) -> None:
        if len(query) > _num_rows(plan):
            raise ValueError("the query has more rows than the sequences")
