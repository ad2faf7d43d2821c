"""Mutants of ALiBi."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionPlan, AttentionSpec, KVCache
from ..plain_backend import PlainBackend, PlannedSequence
from .registry import mutant


@mutant("alibi_sign", "Far keys gain from the ALiBi bias instead of losing.")
class _AlibiSign(PlainBackend):
    def slopes(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return -super().slopes(layer, scores)


@mutant("alibi_ignored", "ALiBi slopes are accepted and never applied.")
class _AlibiIgnored(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, alibi_slopes=None)


@mutant("alibi_ignored_in_decode", "A single row is computed without ALiBi.")
class _AlibiIgnoredInDecode(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, alibi_slopes=None) if sequence.query_len == 1 else self.spec


@mutant("alibi_ignored_in_prefill", "Several rows are computed without ALiBi.")
class _AlibiIgnoredInPrefill(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return self.spec if sequence.query_len == 1 else replace(self.spec, alibi_slopes=None)


@mutant(
    "alibi_from_first_key",
    "The ALiBi distance of a key is counted from the first key of the sequence.",
)
class _AlibiFromFirstKey(PlainBackend):
    def alibi_distances(self, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return keys_at.expand(len(rows_at), -1)


@mutant(
    "alibi_from_end_of_sequence",
    "All rows count the ALiBi distance from the newest one; only LSE and sinks show it.",
)
class _AlibiFromEndOfSequence(PlainBackend):
    def alibi_distances(self, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return rows_at[-1:] - keys_at.expand(len(rows_at), -1)


@mutant(
    "alibi_without_row_position",
    "The row's position is left out of the ALiBi bias; only LSE and sinks show it.",
)
class _AlibiWithoutRowPosition(PlainBackend):
    def alibi_distances(self, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return -keys_at.expand(len(rows_at), -1)


@mutant(
    "alibi_from_row_of_chunk", "The ALiBi distance leaves the context out of the row's position."
)
class _AlibiFromRowOfChunk(PlainBackend):
    def alibi_distances(self, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return (rows_at - rows_at[0] - keys_at).abs()


@mutant(
    "alibi_distance_is_absolute",
    "Keys behind the row lose by their distance as those before it do.",
)
class _AlibiDistanceIsAbsolute(PlainBackend):
    def alibi_distances(self, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().alibi_distances(rows_at, keys_at).abs()


@mutant("alibi_of_kv_head", "A query head is given the slope of its key/value head.")
class _AlibiOfKVHead(PlainBackend):
    def slopes(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return super().slopes(layer, scores)[self.kv_heads()]


@mutant("alibi_scaled", "The ALiBi bias is multiplied by the scale of the scores.")
class _AlibiScaled(PlainBackend):
    def slopes(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        return layer.scale * super().slopes(layer, scores)


@mutant(
    "alibi_slopes_of_the_paper",
    "The layer's ALiBi slopes are replaced by the fixed ones of the paper.",
)
class _AlibiSlopesOfThePaper(PlainBackend):
    def slopes(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        num_heads = self.spec.num_heads
        heads = torch.arange(1, num_heads + 1, device=scores.device, dtype=scores.dtype)
        return torch.exp2(-8 * heads / num_heads)[:, None, None]


@mutant("alibi_bias_in_float16", "The ALiBi bias is rounded to float16.")
class _AlibiBiasInFloat16(PlainBackend):
    def alibi(
        self, layer: AttentionSpec, scores: Tensor, rows_at: Tensor, keys_at: Tensor
    ) -> Tensor:
        bias = super().alibi(layer, torch.zeros_like(scores), rows_at, keys_at)
        return scores + bias.to(torch.float16)


@mutant("alibi_skips_a_head", "The last query head is computed without ALiBi if there are several.")
class _AlibiSkipsAHead(PlainBackend):
    def slopes(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        slopes = super().slopes(layer, scores).clone()
        slopes[max(1, len(slopes) - 1) :] = 0
        return slopes


@mutant(
    "alibi_with_grouped_heads_raises",
    "ALiBi with more query heads than key/value heads fails in forward.",
    ("OpenPipe/ART#489",),
)
class _AlibiWithGroupedHeadsRaises(PlainBackend):
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
        if self.spec.alibi_slopes is not None and self.spec.group_size > 1:
            raise RuntimeError("a tensor bias cannot be expanded to grouped heads")
        return super().forward(query, cache, plan, out, sinks=sinks, lse=lse)
