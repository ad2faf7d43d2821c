"""Mutants of prefix caching and eviction."""

from __future__ import annotations

from collections.abc import Sequence

from ..plain_manager import Holding, Key, PlainBlockManager
from .registry import mutant


@mutant("hit_without_reference", "A found block is shared without counting the new holder.")
class _HitWithoutReference(PlainBlockManager):
    def hold(self, block: int) -> None:
        if self.references[block] == 0:
            super().hold(block)


@mutant(
    "evicted_block_still_found",
    "An evicted block keeps its entry in the prefix cache.",
    ("vllm#4764", "nano-vllm#163"),
)
class _EvictedBlockStillFound(PlainBlockManager):
    def forget(self, block: int) -> None:
        self.keys.pop(block)

    def publish(self, holding: Holding, token_ids: Sequence[int], count: int) -> None:
        for index in range(count if self.config.enable_prefix_caching else 0):
            key, block = self.key(token_ids, index, holding.salt), holding.blocks[index]
            if self.found.get(key) in (None, block) and block not in self.keys:
                self.found[key], self.keys[block] = block, key

    def hold(self, block: int) -> None:
        if self.references[block] == 0 and block in self.free_blocks:
            self.free_blocks.remove(block)
            self.cached.append(block)
        super().hold(block)


@mutant("stale_key_after_reuse", "A block that is reused keeps its old key beside the new one.")
class _StaleKeyAfterReuse(PlainBlockManager):
    def evict(self) -> int:
        return self.cached.pop(0)


@mutant("used_block_evicted", "The block that was found longest ago is evicted, used or not.")
class _UsedBlockEvicted(PlainBlockManager):
    def evict(self) -> int:
        oldest = next(iter(self.keys))
        if oldest not in self.cached:
            self.cached.insert(0, oldest)
            self.cached.pop()
        return super().evict()


@mutant("parent_evicted_first", "The first block of a request is evicted before the later ones.")
class _ParentEvictedFirst(PlainBlockManager):
    def give_back(self, holding: Holding) -> None:
        for block in holding.blocks:
            self.drop(block)

    def forget(self, block: int) -> None:
        del self.found[self.keys.pop(block)]


@mutant("evicted_before_free_blocks", "Cached blocks are evicted while there are free ones.")
class _EvictedBeforeFreeBlocks(PlainBlockManager):
    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block = self.evict() if self.cached else self.free_blocks.pop(0)
            self.references[block] = 1
            taken.append(block)
        return taken


@mutant("freed_blocks_forgotten", "The prefix cache loses a block when its last holder goes.")
class _FreedBlocksForgotten(PlainBlockManager):
    def drop(self, block: int) -> None:
        if self.references[block] == 1 and block in self.keys:
            self.forget(block)
        super().drop(block)


@mutant("generated_tokens_not_cached", "Only the first blocks of a request are ever found.")
class _GeneratedTokensNotCached(PlainBlockManager):
    def publish(self, holding: Holding, token_ids: Sequence[int], count: int) -> None:
        super().publish(holding, token_ids, min(count, 2))


@mutant(
    "key_without_parent",
    "A block is found by its own tokens, whatever stood before them.",
    ("vllm#8229",),
)
class _KeyWithoutParent(PlainBlockManager):
    def key(self, token_ids: Sequence[int], index: int, salt: str) -> Key:
        size = self.config.block_size
        return salt, tuple(token_ids[index * size : (index + 1) * size])


@mutant(
    "key_collides",
    "Blocks are found by the sum of their tokens, without comparing them.",
    ("vllm#8229",),
)
class _KeyCollides(PlainBlockManager):
    def key(self, token_ids: Sequence[int], index: int, salt: str) -> Key:
        tokens = super().key(token_ids, index, salt)[1]
        return salt, (len(tokens), sum(tokens))


@mutant(
    "salt_ignored",
    "Requests with different salts share blocks.",
    ("vllm#3264",),
)
class _SaltIgnored(PlainBlockManager):
    def key(self, token_ids: Sequence[int], index: int, salt: str) -> Key:
        return super().key(token_ids, index, "")


@mutant("salt_of_the_first_block_only", "Later blocks are found under any salt.")
class _SaltOfTheFirstBlockOnly(PlainBlockManager):
    def key(self, token_ids: Sequence[int], index: int, salt: str) -> Key:
        return super().key(token_ids, index, salt if index else "")


@mutant(
    "hit_covers_the_last_token",
    "A prompt that is cached whole leaves nothing to compute.",
    ("nano-vllm#144", "vllm#30320"),
)
class _HitCoversTheLastToken(PlainBlockManager):
    def covers_all(self, chain: Sequence[int], token_ids: Sequence[int]) -> bool:
        return False


@mutant("whole_hit_written_in_place", "The last block of a cached prompt is shared, not copied.")
class _WholeHitWrittenInPlace(PlainBlockManager):
    def find(
        self, token_ids: Sequence[int], num_tokens: int, salt: str
    ) -> tuple[list[int], int | None]:
        blocks, whole = super().find(token_ids, num_tokens, salt)
        return (blocks, None) if whole is None else ([*blocks, whole], None)


@mutant("committed_before_full", "The block that is being filled can be found already.")
class _CommittedBeforeFull(PlainBlockManager):
    def publish(self, holding: Holding, token_ids: Sequence[int], count: int) -> None:
        more = len(token_ids) // self.config.block_size
        super().publish(holding, token_ids, min(more, len(holding.blocks)))


@mutant("found_before_committed", "Blocks of a prompt can be found before they are computed.")
class _FoundBeforeCommitted(PlainBlockManager):
    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        holding = self.on_device(request_id)
        super().commit(request_id, token_ids, num_computed_tokens)
        full = min(len(token_ids) // self.config.block_size + 1, len(holding.blocks))
        self.publish(holding, token_ids, full)


@mutant("mutable_tail_shared", "A prefix is found up to its last, partly filled block.")
class _MutableTailShared(PlainBlockManager):
    def find(
        self, token_ids: Sequence[int], num_tokens: int, salt: str
    ) -> tuple[list[int], int | None]:
        blocks, whole = super().find(token_ids, num_tokens, salt)
        if whole is None and self.config.enable_prefix_caching:
            start = len(blocks)
            for holding in self.holdings.values():
                same = holding.blocks[:start] == blocks and holding.salt == salt
                if same and start and len(holding.blocks) > start < self.blocks_for(num_tokens):
                    return [*blocks, holding.blocks[start]], None
        return blocks, whole

    def hold(self, block: int) -> None:
        if self.references[block]:
            self.references[block] += 1
        else:
            super().hold(block)


@mutant("reset_while_in_use", "The prefix cache is forgotten while requests hold its blocks.")
class _ResetWhileInUse(PlainBlockManager):
    def reset_prefix_cache(self) -> bool:
        self.free_blocks += self.cached
        self.cached, self.keys, self.found = [], {}, {}
        return True


@mutant("reset_ignores_swapped_requests", "The cache is reset while requests are on the host.")
class _ResetIgnoresSwappedRequests(PlainBlockManager):
    def reset_prefix_cache(self) -> bool:
        swapped = {name: one for name, one in self.holdings.items() if one.host}
        for name in swapped:
            del self.holdings[name]
        done = super().reset_prefix_cache()
        self.holdings |= swapped
        return done


@mutant("reset_leaves_the_index", "After a reset the blocks are free, but still found.")
class _ResetLeavesTheIndex(PlainBlockManager):
    def reset_prefix_cache(self) -> bool:
        keys, found = self.keys, self.found
        done = super().reset_prefix_cache()
        if done:
            self.found = dict(found)
            self.keys = dict(keys)
        return done

    def hold(self, block: int) -> None:
        if block in self.free_blocks:
            self.free_blocks.remove(block)
            self.cached.append(block)
        super().hold(block)


@mutant("cache_that_cannot_be_switched_off", "Prefixes are shared although caching is disabled.")
class _CacheThatCannotBeSwitchedOff(PlainBlockManager):
    def publish(self, holding: Holding, token_ids: Sequence[int], count: int) -> None:
        for index in range(count):
            key, block = self.key(token_ids, index, holding.salt), holding.blocks[index]
            if key not in self.found and block not in self.keys:
                self.found[key], self.keys[block] = block, key
