"""Mutants of rounding: results that are nearly right."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.attention import AttentionSpec, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .registry import mutant


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers as ``dtype`` can hold them, in their own dtype again."""
    return tensor.to(dtype).to(tensor.dtype)


def _ten_bits(tensor: Tensor) -> Tensor:
    """float32 numbers with the mantissa cut to 10 bits, as TF32 units do; others as they are."""
    if tensor.dtype != torch.float32:
        return tensor
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)


@mutant(
    "operands_in_tf32",
    "Operands of the dot products in float32 lose all but 10 bits of their mantissa.",
    ("triton#5895",),
)
class _OperandsInTF32(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        if self.spec.dtype != torch.float32:
            return super().dot_products(rows, keys)
        return super().dot_products(_ten_bits(rows), _ten_bits(keys))


@mutant(
    "values_in_tf32",
    "Weights and values in float32 lose all but 10 bits of their mantissa.",
    ("triton#5895",),
)
class _ValuesInTF32(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        if self.spec.dtype != torch.float32:
            return super().weighted_sum(weights, values)
        return super().weighted_sum(_ten_bits(weights), _ten_bits(values))


@mutant("scores_summed_in_float16", "Dot products are summed up in float16.")
class _ScoresSummedInFloat16(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        total = torch.zeros_like(super().dot_products(rows, keys))
        for start in range(0, rows.shape[-1], 8):
            part = slice(start, start + 8)
            products = super().dot_products(rows[..., part], keys[..., part])
            total = _rounded(total + products, torch.float16)
        return total


@mutant("scores_rounded_to_query_dtype", "Scores are rounded to the query's dtype before softmax.")
class _ScoresRoundedToQueryDtype(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        return _rounded(super().dot_products(rows, keys), self.spec.dtype)


@mutant("scores_rounded_to_bfloat16", "Scores are rounded to bfloat16 before the softmax.")
class _ScoresRoundedToBfloat16(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        return _rounded(super().dot_products(rows, keys), torch.bfloat16)


@mutant(
    "scaled_query_rounded",
    "The query is scaled first and rounded to its dtype again.",
)
class _ScaledQueryRounded(PlainBackend):
    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        return self.dot_products(_rounded(layer.scale * rows, self.spec.dtype), keys)


@mutant("scale_in_float16", "The scale is rounded to float16.")
class _ScaleInFloat16(PlainBackend):
    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        scale = float(torch.tensor(layer.scale).to(torch.float16))
        return scale * self.dot_products(rows, keys)


@mutant("weights_rounded_to_bfloat16", "Weights are rounded to bfloat16 whatever the dtype is.")
class _WeightsRoundedToBfloat16(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        return super().weighted_sum(_rounded(weights, torch.bfloat16), values)


@mutant("output_summed_in_query_dtype", "The output is summed up in the query's dtype.")
class _OutputSummedInQueryDtype(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        total = torch.zeros_like(super().weighted_sum(weights, values))
        for start in range(0, len(values), 4):
            part = slice(start, start + 4)
            more = super().weighted_sum(weights[..., part], values[part])
            total = _rounded(total + more, self.spec.dtype)
        return total


@mutant("output_summed_in_bfloat16", "The weighted sum is rounded to bfloat16.")
class _OutputSummedInBfloat16(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        return _rounded(super().weighted_sum(weights, values), torch.bfloat16)


@mutant("output_rounded_through_bfloat16", "A float16 output is rounded to bfloat16 on its way.")
class _OutputRoundedThroughBfloat16(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        if out.dtype == torch.float16:
            attended = Attended(_rounded(attended.out, torch.bfloat16), attended.lse)
        super().store_out(attended, sequence, out)


@mutant("float64_in_float32", "Layers in float64 are computed in float32.")
class _Float64InFloat32(PlainBackend):
    def arithmetic_dtype(self) -> torch.dtype:
        return torch.float32


@mutant("cache_rounded_to_query_dtype", "Keys and values are rounded to the query's dtype.")
class _CacheRoundedToQueryDtype(PlainBackend):
    def read_tokens(self, stored: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        return _rounded(super().read_tokens(stored, blocks, offsets), self.spec.dtype)


@mutant("query_rounded_to_cache_dtype", "The query is rounded to the dtype of the cache.")
class _QueryRoundedToCacheDtype(PlainBackend):
    def query_rows(self, query: Tensor, sequence: PlannedSequence) -> Tensor:
        return _rounded(super().query_rows(query, sequence), self.cache_spec.dtype)


@mutant("float16_denormals_are_zero", "Denormal float16 outputs are flushed to zero.")
class _Float16DenormalsAreZero(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        if out.dtype == torch.float16:
            normal = attended.out.abs() >= torch.finfo(torch.float16).tiny
            attended = Attended(attended.out * normal, attended.lse)
        super().store_out(attended, sequence, out)


@mutant("output_limited_to_100", "Outputs are limited to 100 in magnitude.")
class _OutputLimitedTo100(PlainBackend):
    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        super().store_out(Attended(attended.out.clamp(-100, 100), attended.lse), sequence, out)


@mutant("scores_limited_to_80", "Scores are limited to 80, so that exp cannot overflow.")
class _ScoresLimitedTo80(PlainBackend):
    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        return super().scores(layer, rows, keys).clamp(-80, 80)


@mutant("exponential_by_a_short_series", "The exponential of small arguments is a short series.")
class _ExponentialByAShortSeries(PlainBackend):
    def weigh(self, scores: Tensor, values: Tensor) -> Attended:
        largest = self.largest(scores)
        shifted = scores - largest
        series = 1 + shifted + shifted**2 / 2
        weights = torch.where(shifted > -0.25, series, torch.exp(shifted))
        total = weights.sum(dim=-1, keepdim=True)
        out = self.normalise(self.weighted_sum(weights, values), total)
        return Attended(out, self.log_sum_exp(total, largest).squeeze(-1))


@mutant("decode_in_bfloat16", "A single row is multiplied in bfloat16 whatever the dtype is.")
class _DecodeInBfloat16(PlainBackend):
    def attend_decode(self, rows: Tensor, cache: KVCache, sequence: PlannedSequence) -> Attended:
        return super().attend_decode(_rounded(rows, torch.bfloat16), cache, sequence)
