"""Mutants of where keys and values are read: block table, strides, heads, blocks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionBatch, AttentionPlan, AttentionSpec, KVCache
from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .memory import AnyMemory, end_of_last_block
from .registry import mutant


@mutant("keys_and_values_swapped", "Keys are read as values and values as keys if sizes agree.")
class _KeysAndValuesSwapped(PlainBackend):
    def attend_keys(
        self,
        layer: AttentionSpec,
        rows: Tensor,
        cache: KVCache,
        sequence: PlannedSequence,
        seen: range,
    ) -> Attended:
        if self.spec.head_size == self.spec.v_head_size:
            cache = replace(cache, k=cache.v, v=cache.k)
        return super().attend_keys(layer, rows, cache, sequence, seen)


@mutant("block_table_of_a_neighbour", "A sequence reads the block table row of the next one.")
class _BlockTableOfANeighbour(AnyMemory):
    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        return super().block_ids(batch, (index + 1) % batch.num_seqs, num_tokens)


@mutant(
    "block_table_read_past_the_sequence",
    "One entry past a sequence's blocks is looked up, and its values count with weight zero.",
)
class _BlockTableReadPastTheSequence(AnyMemory):
    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        return super().block_ids(batch, index, num_tokens + self.cache_spec.block_size)

    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        end = len(sequence.block_ids) * self.cache_spec.block_size
        return range(super().key_range(layer, sequence).start, end)

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().visible(layer, rows_at, keys_at) & (keys_at <= rows_at[-1])


@mutant(
    "whole_block_table_checked",
    "All entries of the block table have to be block ids, even those past a sequence's blocks.",
)
class _WholeBlockTableChecked(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        table = batch.block_table_cpu
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < (
            self.cache_spec.num_blocks
        ):
            raise IndexError("block id out of range")
        return super().plan(batch, into)


@mutant("block_zero_means_none", "Block 0 is taken for an empty entry and read as zeros.")
class _BlockZeroMeansNone(PlainBackend):
    def read_tokens(self, stored: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        return super().read_tokens(stored, blocks, offsets) * (blocks > 0)[:, None, None]


@mutant(
    "key_address_in_32_bits",
    "Addresses of keys and values are computed in 32 bits and wrap past 2**31 elements.",
    ("vllm#47671", "vllm#50427", "intel-xpu-backend-for-triton#5581"),
)
class _KeyAddressIn32Bits(PlainBackend):
    def read_tokens(self, stored: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        stride = stored.stride(0)
        address = (blocks * stride).to(torch.int32).long()
        return super().read_tokens(stored, address // stride % len(stored), offsets)


@mutant(
    "shared_block_belongs_to_the_last",
    "A physical block has one owner: of sequences that share it, only the last one sees it.",
)
class _SharedBlockBelongsToTheLast(PlainBackend):
    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        self._owner = torch.full((self.cache_spec.num_blocks,), -1, device=self.device)
        return super().plan(batch, into)

    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        ids = super().block_ids(batch, index, num_tokens)
        self._owner[ids] = index
        return ids

    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        blocks, _ = self.key_places(sequence, positions)
        return positions[self._owner[blocks] == sequence.index]


@mutant(
    "summed_in_physical_order",
    "Keys are summed up in the order of their physical blocks, which shows in the last bits.",
    ("pytorch#182593",),
)
class _SummedInPhysicalOrder(PlainBackend):
    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        positions = super().key_positions(sequence, seen)
        blocks, _ = self.key_places(sequence, positions)
        return positions[torch.argsort(blocks, stable=True)]


@mutant("blocks_in_physical_order", "Blocks are read in ascending order of their ids.")
class _BlocksInPhysicalOrder(PlainBackend):
    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        return super().block_ids(batch, index, num_tokens).sort().values


@mutant("blocks_assumed_adjacent", "The second block of a sequence is taken to follow the first.")
class _BlocksAssumedAdjacent(PlainBackend):
    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        ids = super().block_ids(batch, index, num_tokens)
        ids[1:2] = (ids[:1] + 1)[: len(ids[1:2])] % self.cache_spec.num_blocks
        return ids


@mutant(
    "cache_strides_from_shape",
    "Keys and values are read as if the cache had no gaps, whatever its strides are.",
    ("vllm#49716",),
)
class _CacheStridesFromShape(PlainBackend):
    def read_tokens(self, stored: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        packed = torch.empty(stored.shape, device="meta").stride()
        return super().read_tokens(stored.as_strided(stored.shape, packed), blocks, offsets)


@mutant(
    "value_heads_as_wide_as_key_heads",
    "The value of a head is looked for where it would be if v_head_size were head_size.",
)
class _ValueHeadsAsWideAsKeyHeads(PlainBackend):
    def gather(self, stored: Tensor, sequence: PlannedSequence, keys_at: Tensor) -> Tensor:
        width = stored.shape[-1]
        if width == self.spec.head_size:
            return super().gather(stored, sequence, keys_at)
        tokens = self.read_tokens(stored, *self.key_places(sequence, keys_at)).flatten(1)
        starts = self.kv_heads()[:, None] * self.spec.head_size
        elements = (starts + torch.arange(width, device=self.device)) % tokens.shape[1]
        return tokens[:, elements].to(self.arithmetic_dtype())


@mutant(
    "value_tail_beyond_head_size_lost",
    "Value elements at or past head_size come out as zero.",
)
class _ValueTailBeyondHeadSizeLost(PlainBackend):
    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        out = super().weighted_sum(weights, values)
        out[..., self.spec.head_size :] = 0
        return out


@mutant("head_takes_kv_head_by_remainder", "Query head h reads key/value head h % K, not h // G.")
class _HeadTakesKVHeadByRemainder(PlainBackend):
    def kv_heads(self) -> Tensor:
        return torch.arange(self.spec.num_heads, device=self.device) % self.spec.num_kv_heads


@mutant(
    "group_rounded_to_power_of_two",
    "Heads are grouped as if the group size were the next power of two.",
    ("pytorch#151359", "pytorch#143117"),
)
class _GroupRoundedToPowerOfTwo(PlainBackend):
    def kv_heads(self) -> Tensor:
        padded = 1 << (self.spec.group_size - 1).bit_length()
        return torch.arange(self.spec.num_heads, device=self.device) // padded


@mutant("group_of_more_than_eight_cut", "Past the eighth, heads of a group read the next KV head.")
class _GroupOfMoreThanEightCut(PlainBackend):
    def kv_heads(self) -> Tensor:
        heads = torch.arange(self.spec.num_heads, device=self.device)
        within = heads % self.spec.group_size
        return (super().kv_heads() + within // 8) % self.spec.num_kv_heads


@mutant(
    "block_size_rounded_to_power_of_two",
    "A block size that is no power of two is taken for the next smaller one when keys are read.",
)
class _BlockSizeRoundedToPowerOfTwo(PlainBackend):
    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        block_size = 1 << (self.cache_spec.block_size.bit_length() - 1)
        columns = (keys_at // block_size).clamp(max=len(sequence.block_ids) - 1)
        return sequence.block_ids[columns], keys_at % block_size


@mutant(
    "blocks_of_one_token_taken_for_a_run",
    "With a block size of 1, a sequence is read from its first block on as if in one piece.",
)
class _BlocksOfOneTokenTakenForARun(PlainBackend):
    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        blocks, offsets = super().key_places(sequence, keys_at)
        if self.cache_spec.block_size == 1:
            blocks = (sequence.block_ids[0] + keys_at) % self.cache_spec.num_blocks
        return blocks, offsets


@mutant(
    "blocks_of_more_than_128_cut",
    "Offsets past the first 128 of a block wrap to its beginning.",
)
class _BlocksOfMoreThan128Cut(PlainBackend):
    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        blocks, offsets = super().key_places(sequence, keys_at)
        return blocks, offsets % 128


@mutant(
    "head_sizes_192_and_128_need_blocks_of_128",
    "With head_size 192 and v_head_size 128, blocks of another size than 128 are read shifted.",
    ("flash-attention#2367", "flash-attention#2368"),
)
class _HeadSizes192And128NeedBlocksOf128(PlainBackend):
    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        blocks, offsets = super().key_places(sequence, keys_at)
        sizes = (self.spec.head_size, self.spec.v_head_size)
        shifted = sizes == (192, 128) and self.cache_spec.block_size != 128
        return blocks, (offsets + shifted) % self.cache_spec.block_size


@mutant("cache_tail_zeroed", "Forward zeroes the slots of the last block past the sequence.")
class _CacheTailZeroed(PlainBackend):
    def attend_keys(
        self,
        layer: AttentionSpec,
        rows: Tensor,
        cache: KVCache,
        sequence: PlannedSequence,
        seen: range,
    ) -> Attended:
        end = end_of_last_block(sequence, self.cache_spec.block_size)
        tail = torch.arange(sequence.num_tokens, end, device=self.device)
        if len(tail):
            blocks, offsets = self.key_places(sequence, tail)
            cache.k[blocks, offsets] = 0
            cache.v[blocks, offsets] = 0
        return super().attend_keys(layer, rows, cache, sequence, seen)
