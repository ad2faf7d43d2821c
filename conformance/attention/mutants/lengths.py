"""Mutants of how many keys a sequence has: last blocks, short ones, others' lengths."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ....core.attention import AttentionBatch, AttentionSpec, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .memory import AnyMemory, end_of_last_block
from .registry import mutant


@mutant(
    "last_block_over_read",
    "All slots of the last block count as keys of the newest row, past the sequence's length too.",
    ("xformers 0.0.27",),
)
class _LastBlockOverRead(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        end = end_of_last_block(sequence, self.cache_spec.block_size)
        return range(super().key_range(layer, sequence).start, end)

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        seen = super().visible(layer, rows_at, keys_at)
        seen[-1] |= keys_at > rows_at[-1]
        return seen


@mutant(
    "padding_keys_have_weight_zero",
    "Values in the rest of the last block are multiplied by zero, so that NaN stays.",
    ("vllm#641", "flash-attention#1745", "flashinfer#941"),
)
class _PaddingKeysHaveWeightZero(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        end = end_of_last_block(sequence, self.cache_spec.block_size)
        return range(super().key_range(layer, sequence).start, end)

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) & (keys_at <= rows_at[-1])


@mutant("newest_key_unseen", "A single row does not see its own, newest key.")
class _NewestKeyUnseen(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return range(seen.start, seen.stop - (sequence.query_len == 1))


@mutant("newest_key_stale", "Instead of the newest key the one before it is read again.")
class _NewestKeyStale(PlainBackend):
    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        newest = max(0, sequence.num_tokens - 2)
        return super().key_places(sequence, keys_at.clamp(max=newest))


@mutant(
    "partial_block_short_by_one",
    "The last key is left out where the length is no multiple of the block size.",
    ("pytorch#159247", "pytorch#160861"),
)
class _PartialBlockShortByOne(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        partial = sequence.num_tokens % self.cache_spec.block_size > 0
        return range(seen.start, seen.stop - partial)


@mutant(
    "partial_block_dropped_in_decode",
    "A single row does not see a last block that is not full, if there are blocks before it.",
    ("flashinfer#760",),
)
class _PartialBlockDroppedInDecode(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        whole = sequence.num_tokens // self.cache_spec.block_size * self.cache_spec.block_size
        drop = sequence.query_len == 1 and whole > seen.start
        return range(seen.start, whole) if drop else seen


@mutant(
    "full_last_block_counts_as_empty",
    "A length that is a multiple of the block size leaves no key in the last block.",
    ("flashinfer#320",),
)
class _FullLastBlockCountsAsEmpty(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        block_size = self.cache_spec.block_size
        full = sequence.num_tokens % block_size == 0
        return range(seen.start, max(seen.start, seen.stop - full * block_size))


@mutant(
    "sequence_shorter_than_a_block_is_zero",
    "A sequence that does not fill its first block gives zero.",
    ("flashinfer#725",),
)
class _SequenceShorterThanABlockIsZero(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return seen if sequence.num_tokens >= self.cache_spec.block_size else range(0)


@mutant("first_key_unseen", "The first key of a sequence of several tokens is never seen.")
class _FirstKeyUnseen(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return range(max(seen.start, min(1, sequence.num_tokens - 1)), seen.stop)


@mutant("key_at_block_border_skipped", "The first key of the second block is skipped.")
class _KeyAtBlockBorderSkipped(PlainBackend):
    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        return positions[positions != self.cache_spec.block_size]


@mutant(
    "tile_of_sixteen_over_read",
    "Several rows of a sequence of fewer than 16 tokens see 16 slots.",
    ("flashinfer#3106",),
)
class _TileOfSixteenOverRead(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return range(seen.start, max(seen.stop, 16)) if sequence.query_len > 1 else seen

    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        slots = len(sequence.block_ids) * self.cache_spec.block_size
        return super().key_places(sequence, keys_at.clamp(max=slots - 1))

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) | (keys_at > rows_at[-1])


@mutant("length_of_the_previous_sequence", "A sequence is given the length of the one before it.")
class _LengthOfThePreviousSequence(AnyMemory):
    def num_tokens(self, batch: AttentionBatch, index: int) -> int:
        return super().num_tokens(batch, max(0, index - 1))


@mutant(
    "largest_length_for_all",
    "Every sequence is given the length of the longest.",
    ("vllm-project/flash-attention#18",),
)
class _LargestLengthForAll(AnyMemory):
    def num_tokens(self, batch: AttentionBatch, index: int) -> int:
        return batch.max_seq_len


@mutant(
    "largest_length_splits_decode",
    "A single row sees as many keys as the longest sequence of the batch has.",
    ("vllm-project/flash-attention#18",),
)
class _LargestLengthSplitsDecode(AnyMemory):
    def planned(self, batch: AttentionBatch, index: int) -> PlannedSequence:
        sequence = super().planned(batch, index)
        if sequence.query_len != 1:
            return sequence
        longest = batch.max_seq_len
        return replace(
            sequence, num_tokens=longest, block_ids=self.block_ids(batch, index, longest)
        )


@mutant("length_without_new_tokens", "The new tokens are not counted: rows see the context only.")
class _LengthWithoutNewTokens(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        return range(super().key_range(layer, sequence).start, max(0, sequence.context_len))


@mutant("length_counts_new_tokens_twice", "A sequence of several rows is taken for longer by them.")
class _LengthCountsNewTokensTwice(AnyMemory):
    def num_tokens(self, batch: AttentionBatch, index: int) -> int:
        first_row, end_row = self.row_range(batch, index)
        more = end_row - first_row if end_row - first_row > 1 else 0
        return super().num_tokens(batch, index) + more


@mutant(
    "lengths_beyond_1024_cut",
    "Keys past the first 1024 of a sequence are not seen.",
)
class _LengthsBeyond1024Cut(PlainBackend):
    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        seen = super().key_range(layer, sequence)
        return range(min(seen.start, 1024), min(seen.stop, 1024))


@mutant(
    "sequence_without_tokens_reads_slot_zero",
    "A row of a sequence without tokens returns the value in the first slot of the cache.",
)
class _SequenceWithoutTokensReadsSlotZero(PlainBackend):
    def attend_keys(
        self,
        layer: AttentionSpec,
        rows: Tensor,
        cache: KVCache,
        sequence: PlannedSequence,
        seen: range,
    ) -> Attended:
        attended = super().attend_keys(layer, rows, cache, sequence, seen)
        if not sequence.num_tokens:
            value = cache.v[0, 0, self.kv_heads()].to(attended.out.dtype)
            attended.out[:] = value[:, None, :]
        return attended


@mutant(
    "values_of_short_sequences_from_keys",
    "A sequence of one token returns the key instead of the value where their sizes agree.",
)
class _ValuesOfShortSequencesFromKeys(PlainBackend):
    def attend_decode(self, rows: Tensor, cache: KVCache, sequence: PlannedSequence) -> Attended:
        if sequence.num_tokens == 1 and self.spec.head_size == self.spec.v_head_size:
            cache = replace(cache, v=cache.k)
        return super().attend_decode(rows, cache, sequence)
