"""Mutants of scale, soft cap and of the dot products."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionSpec
from ..plain_backend import PlainBackend, PlannedSequence
from .registry import mutant


@mutant("scale_twice", "The scale is applied to the query and to the scores.")
class _ScaleTwice(PlainBackend):
    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        return layer.scale * super().scores(layer, rows, keys)


@mutant("scale_of_head_size", "The scale is always 1 / sqrt(head_size), whatever the layer says.")
class _ScaleOfHeadSize(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, scale=self.spec.head_size**-0.5)


@mutant(
    "scale_of_v_head_size",
    "The scale is 1 / sqrt(v_head_size) where the two head sizes differ.",
)
class _ScaleOfValueHeadSize(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        if self.spec.v_head_size == self.spec.head_size:
            return self.spec
        return replace(self.spec, scale=self.spec.v_head_size**-0.5)


@mutant(
    "scale_of_padded_head_size",
    "The scale shrinks with the padding of the head size to a power of two.",
)
class _ScaleOfPaddedHeadSize(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        padded = 1 << (self.spec.head_size - 1).bit_length()
        return replace(self.spec, scale=self.spec.scale * (self.spec.head_size / padded) ** 0.5)


@mutant("scale_ignored_in_decode", "A single row is computed without the scale.")
class _ScaleIgnoredInDecode(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, scale=1.0) if sequence.query_len == 1 else self.spec


@mutant("soft_cap_dropped", "The soft cap is accepted and never applied.", ("sglang#33915",))
class _SoftCapDropped(PlainBackend):
    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return scores


@mutant("soft_cap_in_decode_only", "Several rows are computed without the soft cap.")
class _SoftCapInDecodeOnly(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return self.spec if sequence.query_len == 1 else replace(self.spec, logits_soft_cap=None)


@mutant("soft_cap_in_prefill_only", "A single row is computed without the soft cap.")
class _SoftCapInPrefillOnly(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, logits_soft_cap=None) if sequence.query_len == 1 else self.spec


@mutant(
    "soft_cap_after_mask",
    "The soft cap comes after the mask and lifts hidden keys from minus infinity to minus the cap.",
)
class _SoftCapAfterMask(PlainBackend):
    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return scores

    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return super().soft_cap(self.spec, super().mask(scores, visible))


@mutant("soft_cap_before_scale", "The soft cap bounds the scores before they are scaled.")
class _SoftCapBeforeScale(PlainBackend):
    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        return self.dot_products(rows, keys)

    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return layer.scale * super().soft_cap(layer, scores)


@mutant("soft_cap_replaces_scale", "A layer with a soft cap is computed without its scale.")
class _SoftCapReplacesScale(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return self.spec if self.spec.logits_soft_cap is None else replace(self.spec, scale=1.0)


@mutant("soft_cap_clips", "Scores are clipped at the soft cap instead of bent towards it.")
class _SoftCapClips(PlainBackend):
    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        cap = layer.logits_soft_cap
        return scores if cap is None else scores.clamp(-cap, cap)


@mutant("soft_cap_not_multiplied_back", "The score is tanh(score / cap), without the factor cap.")
class _SoftCapNotMultipliedBack(PlainBackend):
    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        cap = layer.logits_soft_cap
        return scores if cap is None else torch.tanh(scores / cap)


@mutant("soft_cap_after_alibi", "The soft cap bounds the ALiBi bias as well.")
class _SoftCapAfterAlibi(PlainBackend):
    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return scores

    def alibi(
        self, layer: AttentionSpec, scores: Tensor, rows_at: Tensor, keys_at: Tensor
    ) -> Tensor:
        return super().soft_cap(layer, super().alibi(layer, scores, rows_at, keys_at))


@mutant("soft_cap_with_window_dropped", "A layer with a window is computed without its soft cap.")
class _SoftCapWithWindowDropped(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        windowed = self.spec.sliding_window is not None
        return replace(self.spec, logits_soft_cap=None) if windowed else self.spec


@mutant(
    "head_size_tail_not_multiplied",
    "Elements past the last multiple of 16 of a head are left out of the dot product.",
)
class _HeadSizeTailNotMultiplied(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        whole = self.spec.head_size // 16 * 16
        return super().dot_products(rows[..., :whole], keys[..., :whole])


@mutant(
    "head_size_cut_at_128",
    "Elements past the first 128 of a head are left out of the dot product.",
)
class _HeadSizeCutAt128(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        return super().dot_products(rows[..., :128], keys[..., :128])


@mutant("dot_product_misses_last_element", "The last element of each head is left out.")
class _DotProductMissesLastElement(PlainBackend):
    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        return super().dot_products(rows[..., :-1], keys[..., :-1])
