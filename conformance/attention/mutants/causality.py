"""Mutants of causality and of where the query rows stand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionPlan, AttentionSpec, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence, own_plan
from .registry import mutant


@mutant(
    "causal_from_top_left",
    "The first of several rows sees one key only, however long the context is.",
    ("flash-attention#402", "flash-attention#351", "flash-attention#1778", "gpt-fast#233"),
)
class _CausalFromTopLeft(PlainBackend):
    def row_positions(self, layer: AttentionSpec, sequence: PlannedSequence) -> Tensor:
        positions = super().row_positions(layer, sequence)
        return positions - positions[0] if layer.causal and len(positions) > 1 else positions


@mutant("decode_from_top_left", "A single row sees the first key of its sequence only.")
class _DecodeFromTopLeft(PlainBackend):
    def row_positions(self, layer: AttentionSpec, sequence: PlannedSequence) -> Tensor:
        positions = super().row_positions(layer, sequence)
        return positions - positions[0] if layer.causal and len(positions) == 1 else positions


@mutant(
    "causal_offset_in_whole_blocks",
    "The position of the first of several rows is rounded down to a multiple of the block size.",
)
class _CausalOffsetInWholeBlocks(PlainBackend):
    def row_positions(self, layer: AttentionSpec, sequence: PlannedSequence) -> Tensor:
        positions = super().row_positions(layer, sequence)
        return positions - positions[0] % self.cache_spec.block_size * (len(positions) > 1)


@mutant("chunk_is_not_causal", "Several rows behind a context see each other's future.")
class _ChunkIsNotCausal(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        chunk = sequence.query_len > 1 and sequence.context_len > 0
        return replace(self.spec, causal=self.spec.causal and not chunk)


@mutant("prompt_is_not_causal", "Rows of a prompt without context see their own future.")
class _PromptIsNotCausal(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        fresh = sequence.query_len > 1 and not sequence.context_len
        return replace(self.spec, causal=self.spec.causal and not fresh)


@mutant("always_causal", "A layer without causal is computed as if it had it.")
class _AlwaysCausal(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, causal=True)


@mutant("row_does_not_see_itself", "A row sees earlier keys only, not its own.")
class _RowDoesNotSeeItself(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) & (rows_at != keys_at)


@mutant("row_sees_the_next", "A row of several sees the key behind its own as well.")
class _RowSeesTheNext(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) | (keys_at - rows_at == 1)


@mutant(
    "diagonal_tile_is_not_masked",
    "Keys in the same tile of 16 as the row are visible, even in its future.",
)
class _DiagonalTileIsNotMasked(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        same_tile = (rows_at // 16 == keys_at // 16) & (keys_at >= rows_at)
        return super().visible(layer, rows_at, keys_at) | same_tile


@mutant(
    "causal_read_as_empty_window",
    "Causal without a window is taken for a window of no keys: several rows give zero.",
    ("TransformerEngine#2490", "TransformerEngine#3528"),
)
class _CausalReadAsEmptyWindow(PlainBackend):
    def attend_rows(self, rows: Tensor, cache: KVCache, sequence: PlannedSequence) -> Attended:
        if self.spec.causal and self.spec.sliding_window is None:
            return self.nothing_seen(rows)
        return super().attend_rows(rows, cache, sequence)


@mutant(
    "mask_as_long_as_new_tokens",
    "The mask is as long as the new tokens are many, and hides all other keys from several rows.",
    ("xformers#1122",),
)
class _MaskAsLongAsNewTokens(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        seen = super().visible(layer, rows_at, keys_at)
        return seen & (keys_at < len(rows_at)) if len(rows_at) > 1 else seen


@mutant(
    "second_row_tile_sees_first_only",
    "Rows past the first 128 of a sequence's query do not see the keys of those rows.",
)
class _SecondRowTileSeesFirstOnly(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        seen = super().visible(layer, rows_at, keys_at)
        seen[128:] &= keys_at < rows_at[0] + 128
        return seen


@mutant(
    "mask_of_another_length",
    "Sequences whose length differs from the first one's give zero.",
    ("pytorch#139462",),
)
class _MaskOfAnotherLength(PlainBackend):
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
        sequences = own_plan(plan).sequences
        for sequence in sequences:
            if sequence.num_tokens != sequences[0].num_tokens:
                out[sequence.first_row : sequence.end_row] = 0
        return out


@mutant(
    "positions_in_16_bits",
    "Positions are kept in 16 bits and turn negative past 32767.",
    ("xformers#719",),
)
class _PositionsIn16Bits(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at.to(torch.int16), keys_at.to(torch.int16))


@mutant(
    "odd_context_shifts_rows",
    "Behind a context of an odd number of tokens, several rows stand one position too early.",
)
class _OddContextShiftsRows(PlainBackend):
    def row_positions(self, layer: AttentionSpec, sequence: PlannedSequence) -> Tensor:
        positions = super().row_positions(layer, sequence)
        return positions - positions[0].clamp(min=0) % 2 * (len(positions) > 1)
