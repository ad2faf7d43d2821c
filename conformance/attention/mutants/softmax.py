"""Mutants of the softmax, of rows that see nothing, and of the LSE."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .registry import mutant


@mutant("no_maximum_subtracted", "Exponentials are taken of the bare scores and overflow.")
class _NoMaximumSubtracted(PlainBackend):
    def largest(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])


@mutant(
    "maximum_over_hidden_keys",
    "The largest score of all keys is subtracted, hidden ones too, so that visible ones vanish.",
)
class _MaximumOverHiddenKeys(PlainBackend):
    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        self._largest = scores.amax(dim=-1, keepdim=True)
        return super().mask(scores, visible)

    def largest(self, scores: Tensor) -> Tensor:
        return self._largest


@mutant("maximum_of_all_rows", "The largest score of all rows is subtracted from every row.")
class _MaximumOfAllRows(PlainBackend):
    def largest(self, scores: Tensor) -> Tensor:
        return super().largest(scores).amax(dim=1, keepdim=True).expand(-1, scores.shape[1], -1)


@mutant("weights_not_normalised", "The weighted sum is not divided by the sum of the weights.")
class _WeightsNotNormalised(PlainBackend):
    def normalise(self, out: Tensor, total: Tensor) -> Tensor:
        return out


@mutant("total_counts_hidden_keys", "Each hidden key adds one weight of 1 to the divisor.")
class _TotalCountsHiddenKeys(PlainBackend):
    def weigh(self, scores: Tensor, values: Tensor) -> Attended:
        attended = super().weigh(scores, values)
        total = torch.exp(scores - self.largest(scores)).sum(dim=-1, keepdim=True)
        hidden = (scores == -math.inf).sum(dim=-1, keepdim=True)
        return Attended(attended.out * (total / (total + hidden).clamp(min=1)), attended.lse)


@mutant("total_has_an_epsilon", "A small constant is added to the sum of the weights.")
class _TotalHasAnEpsilon(PlainBackend):
    def normalise(self, out: Tensor, total: Tensor) -> Tensor:
        return super().normalise(out, total + 1e-3)


@mutant("weights_are_powers_of_two", "Weights are 2**score instead of exp(score).")
class _WeightsArePowersOfTwo(PlainBackend):
    def weigh(self, scores: Tensor, values: Tensor) -> Attended:
        return super().weigh(scores * math.log(2), values)


@mutant(
    "hidden_scores_are_finite",
    "Hidden scores are -10000, so that a row of large negative scores sees what it must not.",
)
class _HiddenScoresAreFinite(PlainBackend):
    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -1e4)


@mutant(
    "hidden_scores_are_shifted",
    "Hidden scores are lowered by 30 only and keep a small weight.",
)
class _HiddenScoresAreShifted(PlainBackend):
    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores - 30 * (~visible)


@mutant("hidden_scores_are_zero", "The mask multiplies scores: hidden keys have a score of 0.")
class _HiddenScoresAreZero(PlainBackend):
    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores * visible


@mutant(
    "row_without_keys_is_nan",
    "A row that sees no key is NaN.",
    ("pytorch#103963", "pytorch#110213", "pytorch#109517"),
)
class _RowWithoutKeysIsNaN(PlainBackend):
    def normalise(self, out: Tensor, total: Tensor) -> Tensor:
        return out / total

    def nothing_seen(self, rows: Tensor) -> Attended:
        nothing = super().nothing_seen(rows)
        return Attended(torch.full_like(nothing.out, math.nan), nothing.lse)


@mutant("row_without_keys_is_not_written", "A row that sees no key is left as it was.")
class _RowWithoutKeysIsNotWritten(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        if sequence.num_tokens:
            super().store_out(attended, sequence, out)


@mutant(
    "negligible_weights_dropped",
    "Weights below a thousandth of the largest are dropped.",
)
class _NegligibleWeightsDropped(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        return super().weighted_sum(weights * (weights >= 1e-3), values)


class _OtherLSE(PlainBackend):
    """Changes the LSE on its way out, where merging runs does not notice."""

    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        """The wrong LSE, ``[N, q]``, in place of the right one."""
        return lse

    def store_lse(self, attended: Attended, sequence: PlannedSequence, lse: Tensor) -> None:
        """As in ``PlainBackend``, with the other LSE."""
        other = self.other(attended.lse, sequence)
        super().store_lse(Attended(attended.out, other), sequence, lse)


@mutant("lse_in_base_two", "The LSE is a logarithm to the base 2.")
class _LSEInBaseTwo(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse / math.log(2)


@mutant("lse_without_maximum", "The largest score is not added back to the LSE.")
class _LSEWithoutMaximum(PlainBackend):
    def log_sum_exp(self, total: Tensor, largest: Tensor) -> Tensor:
        return torch.log(total)


@mutant("lse_is_the_maximum", "The LSE is the largest score.")
class _LSEIsTheMaximum(PlainBackend):
    def log_sum_exp(self, total: Tensor, largest: Tensor) -> Tensor:
        return largest.masked_fill(total == 0, -math.inf)


@mutant("lse_of_row_without_keys_is_zero", "The LSE of a row that sees no key is 0.")
class _LSEOfRowWithoutKeysIsZero(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse.masked_fill(lse == -math.inf, 0)


@mutant(
    "lse_of_row_without_keys_is_infinite",
    "The LSE of a row that sees no key is plus infinity.",
)
class _LSEOfRowWithoutKeysIsInfinite(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse.masked_fill(lse == -math.inf, math.inf)


@mutant("lse_scaled", "The LSE is multiplied by the scale of the scores.")
class _LSEScaled(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse * self.spec.scale


@mutant("lse_in_query_dtype", "The LSE is rounded to the dtype of the query.")
class _LSEInQueryDtype(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse.to(self.spec.dtype).to(lse.dtype)


@mutant("lse_heads_first", "The LSE of a sequence is stored with the heads first, then the rows.")
class _LSEHeadsFirst(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse.reshape(lse.shape[1], lse.shape[0]).transpose(0, 1)


@mutant("lse_missing_in_decode", "The LSE of a single row is not written.")
class _LSEMissingInDecode(PlainBackend):
    def store_lse(self, attended: Attended, sequence: PlannedSequence, lse: Tensor) -> None:
        if sequence.query_len > 1:
            super().store_lse(attended, sequence, lse)


@mutant("lse_of_last_row_for_all", "All rows of a sequence are given the LSE of the newest.")
class _LSEOfLastRowForAll(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        return lse[:, -1:].expand_as(lse)


@mutant(
    "lse_of_row_65_with_one_kv_head",
    "With one key/value head, the LSE of the row past a multiple of 64 is that of the row before.",
    ("xformers 0.0.23",),
)
class _LSEOfRow65WithOneKVHead(_OtherLSE):
    def other(self, lse: Tensor, sequence: PlannedSequence) -> Tensor:
        if self.spec.num_kv_heads == 1 and lse.shape[1] > 64 and lse.shape[1] % 64 == 1:
            return torch.cat([lse[:, :-1], lse[:, -2:-1]], dim=1)
        return lse


@mutant("lse_misses_start_of_window", "With a window, the LSE leaves the first key out.")
class _LSEMissesStartOfWindow(PlainBackend):
    def weigh(self, scores: Tensor, values: Tensor) -> Attended:
        attended = super().weigh(scores, values)
        if self.spec.sliding_window is None or scores.shape[-1] < 2:
            return attended
        return Attended(attended.out, torch.logsumexp(scores[..., 1:], dim=-1))
