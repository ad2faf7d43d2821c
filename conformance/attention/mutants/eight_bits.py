"""Mutants of caches of 8 bits: their scales, and how numbers are rounded to them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionBatch, AttentionPlan, AttentionSpec, Capabilities, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .registry import mutant


@mutant(
    "key_scale_ignored",
    "Keys of 8 bits are read without their scale.",
    ("vllm#42580", "vllm#51363", "sglang#18882"),
)
class _KeyScaleIgnored(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        return 1.0, cache.v_scale


@mutant(
    "value_scale_ignored",
    "Values of 8 bits are read without their scale.",
    ("vllm#42580", "vllm#51363", "sglang#18882"),
)
class _ValueScaleIgnored(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        return cache.k_scale, 1.0


@mutant("scales_swapped", "Keys are read with the scale of the values, values with that of keys.")
class _ScalesSwapped(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        return cache.v_scale, cache.k_scale


@mutant("one_scale_for_both", "Values are read with the scale of the keys.")
class _OneScaleForBoth(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        return cache.k_scale, cache.k_scale


@mutant("value_scale_on_scores", "The scale of the values multiplies the scores instead.")
class _ValueScaleOnScores(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        return cache.k_scale * cache.v_scale, 1.0


@mutant("value_scale_twice", "Values and then the result are multiplied by the scale of values.")
class _ValueScaleTwice(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        return cache.k_scale, cache.v_scale**2


@mutant("scales_in_prefill_only", "A single row reads a cache of 8 bits without the scales.")
class _ScalesInPrefillOnly(PlainBackend):
    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        if sequence.query_len == 1:
            return 1.0, 1.0
        return super().cache_scales(cache, sequence)


@mutant("scales_of_the_first_layer", "All layers are read with the scales of the first one.")
class _ScalesOfTheFirstLayer(PlainBackend):
    _first: tuple[float, float] | None = None

    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        self._first = self._first or super().cache_scales(cache, sequence)
        return self._first


@mutant("key_scale_after_soft_cap", "Capped scores are multiplied by the scale of the keys.")
class _KeyScaleAfterSoftCap(PlainBackend):
    _k_scale = 1.0

    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        self._k_scale = cache.k_scale
        return 1.0, cache.v_scale

    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return super().soft_cap(layer, scores) * self._k_scale


@mutant("value_scale_in_lse", "The LSE has the scale of the values in it.")
class _ValueScaleInLse(PlainBackend):
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
        if lse is not None:
            lse[sequence.first_row : sequence.end_row] += float(torch.tensor(cache.v_scale).log())


@mutant("scale_multiplied_at_write", "New keys and values are multiplied by the scale.")
class _ScaleMultipliedAtWrite(PlainBackend):
    def divided(self, tokens: Tensor, scale: float) -> Tensor:
        return tokens * scale


@mutant(
    "scale_ignored_at_write",
    "New keys and values are stored without being scaled.",
    ("sglang#18882",),
)
class _ScaleIgnoredAtWrite(PlainBackend):
    def divided(self, tokens: Tensor, scale: float) -> Tensor:
        return tokens


@mutant("quotient_rounded_at_write", "New tokens over the scale are rounded to 16 bits first.")
class _QuotientRoundedAtWrite(PlainBackend):
    def divided(self, tokens: Tensor, scale: float) -> Tensor:
        narrow = torch.bfloat16 if self.spec.dtype == torch.float32 else self.spec.dtype
        return super().divided(tokens, scale).to(narrow).to(torch.float32)


@mutant("reciprocal_of_scale_at_write", "New tokens are multiplied by the rounded reciprocal.")
class _ReciprocalOfScaleAtWrite(PlainBackend):
    def divided(self, tokens: Tensor, scale: float) -> Tensor:
        return tokens * torch.tensor(scale, dtype=torch.float32).reciprocal()


@mutant("written_without_saturation", "Numbers beyond the largest of 8 bits are stored as NaN.")
class _WrittenWithoutSaturation(PlainBackend):
    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        beyond = tokens.abs() > 1.0625 * torch.finfo(dtype).max
        return torch.where(beyond, torch.nan, tokens)


@mutant("nan_written_as_largest", "NaN is stored as the largest number of 8 bits.")
class _NanWrittenAsLargest(PlainBackend):
    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return super().limited(tokens, dtype).nan_to_num(nan=torch.finfo(dtype).max)


@mutant("halves_rounded_away_from_zero", "Ties between two numbers of 8 bits go to the larger one.")
class _HalvesRoundedAwayFromZero(PlainBackend):
    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        limited = super().limited(tokens, dtype)
        bits = limited.view(torch.int32)
        # One unit more breaks a tie and changes nothing else; zero stays what it is.
        return torch.where(limited == 0, limited, (bits + 1).view(torch.float32))


@mutant("smallest_eight_bit_numbers_lost", "Numbers below the smallest normal one become zero.")
class _SmallestEightBitNumbersLost(PlainBackend):
    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        limited = super().limited(tokens, dtype)
        return torch.where(limited.abs() < torch.finfo(dtype).tiny, 0 * limited, limited)


@mutant("sign_of_zero_lost_at_write", "Negative zero is stored as zero in 8 bits.")
class _SignOfZeroLostAtWrite(PlainBackend):
    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return super().limited(tokens, dtype) + 0.0


@mutant("weights_rounded_to_cache_dtype", "Weights are rounded to the 8 bits of the values.")
class _WeightsRoundedToCacheDtype(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        stored = self.cache_spec.dtype
        if stored.itemsize == 1:
            weights = weights.to(stored).to(weights.dtype)
        return super().weighted_sum(weights, values)


@mutant("dequantised_keys_rounded", "Scaled keys are rounded to bfloat16, whatever the query is.")
class _DequantisedKeysRounded(PlainBackend):
    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        if self.cache_spec.dtype.itemsize == 1:
            keys = keys.to(torch.bfloat16).to(keys.dtype)
        return super().scores(layer, rows, keys)


@mutant("eight_bit_result_rounded_first", "A result is rounded to bfloat16 and then scaled.")
class _EightBitResultRoundedFirst(PlainBackend):
    _v_scale = 1.0

    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        self._v_scale = cache.v_scale
        return cache.k_scale, 1.0

    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        result = attended.out
        if self.cache_spec.dtype.itemsize == 1:
            result = result.to(torch.bfloat16).to(result.dtype) * self._v_scale
        super().store_out(replace(attended, out=result), sequence, out)


@mutant(
    "window_of_one_head_lost_in_eight_bits",
    "In a cache of 8 bits, the last head of the last of several rows sees past the window.",
    ("flashinfer#3864",),
)
class _WindowOfOneHeadLostInEightBits(PlainBackend):
    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        masked = super().mask(scores, visible)
        windowed = self.spec.sliding_window is not None and len(visible) > 1
        if windowed and self.cache_spec.dtype.itemsize == 1:
            masked[-1, -1] = scores[-1, -1]
        return masked


@mutant(
    "head_tail_lost_in_eight_bits",
    "In a cache of 8 bits whose two head sizes differ, what follows the last multiple of 128 of a "
    "key head above 128 is left out.",
    ("flashinfer#4976",),
)
class _HeadTailLostInEightBits(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        size = self.spec.head_size
        if self.cache_spec.dtype.itemsize == 1 and self.spec.v_head_size != size > 128:
            whole = size - size % 128
            rows, keys = rows[..., :whole], keys[..., :whole]
        return super().dot_products(rows, keys)


@mutant(
    "eight_bits_read_as_integers",
    "The bytes of a cache of 8 bits are read as whole numbers.",
    ("vllm#47037",),
)
class _EightBitsReadAsIntegers(PlainBackend):
    def read_tokens(self, stored: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        if stored.dtype.itemsize > 1:
            return super().read_tokens(stored, blocks, offsets)
        return stored.view(torch.int8)[blocks, offsets].to(self.arithmetic_dtype())


@mutant(
    "eight_bit_plan_is_not_updated",
    "With a cache of 8 bits, a plan that is updated in place is left as it was.",
    ("vllm#41651",),
)
class _EightBitPlanIsNotUpdated(PlainBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), cuda_graphs=True)

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        if into is not None and self.cache_spec.dtype.itemsize == 1:
            return into
        return super().plan(batch, into)
