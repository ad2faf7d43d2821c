"""Mutants of ``write_kv``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import AttentionSpec, KVCache
from ..plain_backend import PlainBackend
from .registry import mutant


def _packed_rows(tokens: Tensor) -> Tensor:
    """The memory of ``tokens`` read as if its rows followed each other without gaps."""
    return tokens.as_strided(tokens.shape, torch.empty(tokens.shape, device="meta").stride())


class _OtherCall(PlainBackend):
    """Changes what ``write_kv`` is given."""

    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and slot mapping to go on with."""
        return key, value, slots

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """As in ``PlainBackend``, with the changed arguments."""
        key, value, slots = self.changed(key, value, slot_mapping)
        super().write_kv(key, value, cache, slots)


@mutant("slot_minus_one_writes_the_last_slot", "Slot -1 counts from the end of the cache.")
class _SlotMinusOneWritesTheLastSlot(PlainBackend):
    def stored_rows(self, slot_mapping: Tensor) -> Tensor:
        return torch.arange(len(slot_mapping), device=slot_mapping.device)


@mutant("slot_minus_one_writes_slot_zero", "Slot -1 is clamped to slot 0.")
class _SlotMinusOneWritesSlotZero(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return key, value, slots.clamp(min=0)


@mutant("slot_minus_one_shifts_rows", "After a slot of -1, rows go to the slot of the row before.")
class _SlotMinusOneShiftsRows(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slots = slots[slots != -1]
        return key[: len(slots)], value[: len(slots)], slots


@mutant("slot_minus_one_ends_the_call", "Rows after a slot of -1 are not stored.")
class _SlotMinusOneEndsTheCall(PlainBackend):
    def stored_rows(self, slot_mapping: Tensor) -> Tensor:
        stored = (slot_mapping == -1).cumsum(0) == 0
        return torch.nonzero(stored).squeeze(1)


@mutant("slot_minus_one_raises", "A slot of -1 fails.")
class _SlotMinusOneRaises(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if bool((slots < 0).any()):
            raise IndexError("slot out of range")
        return key, value, slots


@mutant("written_through_float16", "New keys and values are rounded to float16.")
class _WrittenThroughFloat16(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        super().store_tokens(stored, slots, tokens.to(torch.float16))


@mutant("written_through_bfloat16", "New keys and values are rounded to bfloat16.")
class _WrittenThroughBfloat16(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        super().store_tokens(stored, slots, tokens.to(torch.bfloat16))


@mutant("written_with_truncation", "Rounding to a smaller cache dtype cuts bits off.")
class _WrittenWithTruncation(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        if stored.dtype.itemsize == 1:
            # Within the normal numbers, 3 bits of the significand are left.
            bits = tokens.to(torch.float32).view(torch.int32) & ~0xFFFFF
            super().store_tokens(stored, slots, bits.view(torch.float32))
            return
        rounded = tokens.to(stored.dtype)
        smaller = torch.nextafter(rounded, torch.zeros_like(rounded))
        too_far = rounded.double().abs() > tokens.double().abs()
        super().store_tokens(stored, slots, torch.where(too_far, smaller, rounded))


@mutant("only_keys_written", "New values are not stored.")
class _OnlyKeysWritten(PlainBackend):
    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        super().write_kv(key, value, replace(cache, v=cache.v.clone()), slot_mapping)


@mutant("value_is_the_key", "Where sizes agree, the new key is stored as the value too.")
class _ValueIsTheKey(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return key, (key if key.shape == value.shape else value), slots


@mutant("rest_of_block_cleared", "Storing a token clears the slots behind it in its block.")
class _RestOfBlockCleared(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        for block, offset in zip(*(part.tolist() for part in self.place(slots)), strict=True):
            stored[block, offset + 1 :] = 0
        super().store_tokens(stored, slots, tokens)


@mutant("whole_block_written", "A token fills its whole block if it is the only one of a call.")
class _WholeBlockWritten(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        if len(slots) == 1:
            stored[self.place(slots)[0]] = tokens[:, None].to(stored.dtype)
        super().store_tokens(stored, slots, tokens)


@mutant("neighbour_slot_touched", "The slot before the first stored one is rounded to float16.")
class _NeighbourSlotTouched(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        before = slots[:1][slots[:1] > 0] - 1
        neighbour = stored[self.place(before)].to(torch.float16)
        super().store_tokens(stored, before, neighbour)
        super().store_tokens(stored, slots, tokens)


@mutant("last_token_not_stored", "The last of several tokens is not stored.")
class _LastTokenNotStored(PlainBackend):
    def stored_rows(self, slot_mapping: Tensor) -> Tensor:
        rows = super().stored_rows(slot_mapping)
        return rows[: max(1, len(rows) - 1)]


@mutant("only_first_256_tokens_stored", "Tokens past the first 256 of a call are not stored.")
class _OnlyFirst256TokensStored(PlainBackend):
    def stored_rows(self, slot_mapping: Tensor) -> Tensor:
        rows = super().stored_rows(slot_mapping)
        return rows[rows < 256]


@mutant("slots_sorted", "Slots are sorted, so that rows go to each other's slot.")
class _SlotsSorted(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unique = torch.unique(slots[slots != -1])
        stored = slots != -1
        return key[stored][: len(unique)], value[stored][: len(unique)], unique


@mutant("equal_tokens_stored_once", "Of tokens with equal keys only the first is stored.")
class _EqualTokensStoredOnce(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = key.flatten(1)
        same = (flat[:, None] == flat[None]).all(dim=-1).tril(-1).any(dim=1)
        return key, value, torch.where(same, -1, slots)


@mutant(
    "new_keys_read_as_packed",
    "Rows of the new keys are looked for as if they followed each other without gaps.",
    ("sglang#31667", "flashinfer#3800"),
)
class _NewKeysReadAsPacked(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _packed_rows(key), value, slots


@mutant(
    "new_values_read_with_key_strides",
    "Rows of the new values are looked for at the distance of packed rows.",
    ("sglang#31667",),
)
class _NewValuesReadWithKeyStrides(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return key, _packed_rows(value), slots


@mutant(
    "cache_written_with_strides_from_shape",
    "Tokens are stored as if the cache had no gaps, whatever its strides are.",
    ("vllm#49716",),
)
class _CacheWrittenWithStridesFromShape(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        super().store_tokens(_packed_rows(stored), slots, tokens)


@mutant(
    "slot_address_in_32_bits",
    "Addresses of slots are computed in 32 bits and wrap past 2**31 elements.",
    ("flash-attention#772",),
)
class _SlotAddressIn32Bits(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        stride = stored.stride(0)
        blocks, offsets = self.place(slots)
        wrapped = (blocks * stride).to(torch.int32).long() // stride % len(stored)
        stored[wrapped, offsets] = tokens.to(stored.dtype)


@mutant("block_size_of_sixteen_assumed", "Slots are split into blocks of 16, whatever the size is.")
class _BlockSizeOfSixteenAssumed(PlainBackend):
    def place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        block_size = self.cache_spec.block_size
        return slots // 16 % self.cache_spec.num_blocks, slots % 16 % block_size


@mutant("heads_written_in_reverse", "Key/value heads are stored in the opposite order.")
class _HeadsWrittenInReverse(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        super().store_tokens(stored, slots, tokens.flip(1))


@mutant("added_to_the_cache", "New keys and values are added to what the slot held before.")
class _AddedToTheCache(PlainBackend):
    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        before = stored[self.place(slots)]
        super().store_tokens(stored, slots, tokens.double() + before.double())


@mutant("new_keys_scaled", "New keys are stored times the scale, which forward then leaves out.")
class _NewKeysScaled(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.spec.scale * key, value, slots

    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        return self.dot_products(rows, keys)


@mutant("key_changed_in_place", "The caller's key is multiplied by the scale.")
class _KeyChangedInPlace(_OtherCall):
    def changed(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = key.clone()
        key *= self.spec.scale
        return before, value, slots


@mutant(
    "first_cache_written_always",
    "All layers' keys and values go to the cache that the instance was given first.",
)
class _FirstCacheWrittenAlways(PlainBackend):
    _first: KVCache | None = None

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        self._first = self._first or cache
        super().write_kv(key, value, self._first, slot_mapping)


@mutant("slot_mapping_changed_in_place", "Slots of -1 become 0 in the caller's slot mapping.")
class _SlotMappingChangedInPlace(PlainBackend):
    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        super().write_kv(key, value, cache, slot_mapping)
        slot_mapping.clamp_(min=0)
