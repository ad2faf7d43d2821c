"""Mutants of the sliding window."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionSpec, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .registry import mutant


def _with_window(layer: AttentionSpec, window: int | None) -> AttentionSpec:
    """The layer with another window, if it has one at all."""
    return layer if layer.sliding_window is None else replace(layer, sliding_window=window)


@mutant(
    "window_one_too_many",
    "The window counts the row itself on top of its keys.",
    ("vllm#3385", "transformers#39408"),
)
class _WindowOneTooMany(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return _with_window(self.spec, (self.spec.sliding_window or 0) + 1)


@mutant("window_one_too_few", "A window of more than one key is one key short.", ("vllm#3385",))
class _WindowOneTooFew(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return _with_window(self.spec, max(1, (self.spec.sliding_window or 0) - 1))


@mutant("window_ignored_in_decode", "A single query row sees past the window.", ("vllm#3385",))
class _WindowIgnoredInDecode(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return _with_window(self.spec, None) if sequence.query_len == 1 else self.spec


@mutant("window_ignored_in_prefill", "A prompt without context is computed without its window.")
class _WindowIgnoredInPrefill(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        fresh = sequence.query_len > 1 and not sequence.context_len
        return _with_window(self.spec, None) if fresh else self.spec


@mutant(
    "window_ignored_in_chunks", "Several rows behind a context are computed without their window."
)
class _WindowIgnoredInChunks(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        chunk = sequence.query_len > 1 and sequence.context_len > 0
        return _with_window(self.spec, None) if chunk else self.spec


@mutant("window_rounded_to_blocks", "The window is rounded up to whole blocks.")
class _WindowRoundedToBlocks(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        blocks = -(-(self.spec.sliding_window or 0) // self.cache_spec.block_size)
        return _with_window(self.spec, blocks * self.cache_spec.block_size)


@mutant(
    "window_of_first_tile_non_causal",
    "Without causal, the first 16 rows behind a context look ahead no further than themselves.",
    ("flashinfer#4972",),
)
class _WindowOfFirstTileNonCausal(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        seen = super().visible(layer, rows_at, keys_at)
        if layer.sliding_window is not None and not layer.causal and int(rows_at[0]) > 0:
            seen[:16] &= (rows_at - keys_at)[:16] >= 0
        return seen


@mutant("window_makes_causal", "A window without causal hides what is ahead of the row.")
class _WindowMakesCausal(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, causal=self.spec.causal or self.spec.sliding_window is not None)


@mutant(
    "window_on_both_sides",
    "Without causal, the window is applied ahead of the row as well.",
)
class _WindowOnBothSides(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        seen = super().visible(layer, rows_at, keys_at)
        if layer.sliding_window is not None:
            seen &= keys_at - rows_at < layer.sliding_window
        return seen


@mutant(
    "window_zeroes_later_rows",
    "Behind a context, rows at or past the window's length in their chunk come out as zero.",
    ("flash-attention#2199",),
)
class _WindowZeroesLaterRows(PlainBackend):
    def attend_rows(self, rows: Tensor, cache: KVCache, sequence: PlannedSequence) -> Attended:
        attended = super().attend_rows(rows, cache, sequence)
        if self.spec.sliding_window is not None and sequence.context_len > 0:
            attended.out[:, self.spec.sliding_window :] = 0
        return attended


@mutant(
    "window_start_in_tokens",
    "The first block of a window is looked up by its token number instead of its block number.",
    ("sglang#32902",),
)
class _WindowStartInTokens(PlainBackend):
    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        blocks, offsets = super().key_places(sequence, keys_at)
        if self.spec.sliding_window is not None:
            block_size = self.cache_spec.block_size
            columns = int(keys_at[0]) + keys_at // block_size - keys_at[0] // block_size
            blocks = sequence.block_ids[columns.clamp(max=len(sequence.block_ids) - 1)]
        return blocks, offsets


@mutant(
    "values_before_window_unmasked",
    "Whole blocks are loaded at the window's start, and values before it count with weight zero.",
    ("vllm#30887",),
)
class _ValuesBeforeWindowUnmasked(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return range(
            seen.start // self.cache_spec.block_size * self.cache_spec.block_size, seen.stop
        )


@mutant(
    "window_from_end_of_sequence",
    "Every row is given the window of the newest one.",
)
class _WindowFromEndOfSequence(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        if layer.sliding_window is None:
            return super().visible(layer, rows_at, keys_at)
        seen = super().visible(replace(layer, sliding_window=None), rows_at, keys_at)
        return seen & (keys_at > rows_at[-1] - layer.sliding_window)


@mutant(
    "window_forgotten_beyond_its_length",
    "A sequence that is longer than the window is computed without one.",
)
class _WindowForgottenBeyondItsLength(PlainBackend):
    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        longer = sequence.num_tokens > (self.spec.sliding_window or 0)
        return _with_window(self.spec, None) if longer else self.spec


@mutant(
    "window_hides_block_of_its_start",
    "The block in which the window begins is left out unless the window begins at its border.",
)
class _WindowHidesBlockOfItsStart(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        block_size = self.cache_spec.block_size
        start = -(-seen.start // block_size) * block_size
        return seen if start >= seen.stop else range(start, seen.stop)


@mutant(
    "window_of_one_sees_nothing",
    "A window of one key hides the row's own key, so that the row is zero.",
)
class _WindowOfOneSeesNothing(PlainBackend):
    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        seen = super().visible(layer, rows_at, keys_at)
        return torch.zeros_like(seen) if layer.sliding_window == 1 else seen
