"""Mutants of admission: blocks, prefix hits, what comes back."""

from __future__ import annotations

from dataclasses import replace

from ....core.block_manager import Allocation
from ....core.scheduler import KVMove, MoveKind, StepPlan
from ..plain_limits import Limits
from ..plain_scheduler import PlainScheduler
from .registry import mutant


@mutant("hit_covers_the_last_token", "A prompt that is cached whole has nothing left to compute.")
class _HitCoversAll(PlainScheduler):
    def try_admit(self, name: str, limits: Limits) -> bool:
        admitted = super().try_admit(name, limits)
        request = self.live[name]
        if admitted and self.hits and request.num_tokens_to_compute == 1:
            request.num_computed_tokens += 1
            self.hits[-1] = (name, request.num_computed_tokens)
        return admitted


@mutant("hit_too_long_by_one", "One token more than was found counts as cached.")
class _HitTooLong(PlainScheduler):
    def hit(self, num_cached_tokens: int) -> int:
        return num_cached_tokens + (num_cached_tokens > 0)


@mutant("admission_copies_lost", "The block copies of an admission are not done.")
class _CopiesLost(PlainScheduler):
    def try_admit(self, name: str, limits: Limits) -> bool:
        before = list(self.moves)
        admitted = super().try_admit(name, limits)
        self.moves = before
        return admitted


@mutant("salt_forgotten", "Prefixes are looked up without the salt of the request.")
class _SaltForgotten(PlainScheduler):
    def allocate(self, name: str) -> Allocation | None:
        tokens = self.live[name].token_ids
        return self.block_manager.allocate(name, tokens, len(tokens))


@mutant(
    "resumed_with_a_wrong_prefix",
    "A preempted request is admitted with the tokens of the oldest request.",
    ("vllm#16832",),
)
class _WrongPrefix(PlainScheduler):
    def allocate(self, name: str) -> Allocation | None:
        if name not in self.returned or not self.block_manager.config.enable_prefix_caching:
            return super().allocate(name)
        own, oldest = self.live[name].token_ids, next(iter(self.live.values())).token_ids
        tokens = [*oldest, *own[len(oldest) :]][: len(own)]
        salt = self.live[name].hints.cache_salt
        return self.block_manager.allocate(name, tokens, len(tokens), salt=salt)


@mutant(
    "admitted_with_one_block",
    "An admission gets one block, and whoever grows takes it away again.",
)
class _OneBlock(PlainScheduler):
    most = 0

    def allocate(self, name: str) -> Allocation | None:
        request, manager = self.live[name], self.block_manager
        tokens, config = request.token_ids, manager.config
        salt = {"salt": request.hints.cache_salt} if config.enable_prefix_caching else {}
        self.most = len(tokens)
        if self.config.enable_chunked_prefill and not manager.match_prefix(tokens, **salt):
            self.most = min(len(tokens), config.block_size)
        return manager.allocate(name, tokens, self.most, **salt)

    def share(self, name: str, left: int, limits: Limits) -> int:
        share = super().share(name, left, limits)
        return min(share, self.most) if name in self.waiting else share


@mutant("swap_in_reads_anothers_blocks", "A swapped request gets the contents of the next block.")
class _AnothersBlocks(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        most = self.block_manager.config.num_host_blocks
        self.moves = [
            (
                name,
                KVMove(
                    one.kind,
                    tuple(replace(copy, source=(copy.source + 1) % most) for copy in one.copies),
                )
                if one.kind is MoveKind.SWAP_IN
                else one,
            )
            for name, one in self.moves
        ]
        return super().build(number)


@mutant("swap_in_not_told", "The plan does not tell who came back.")
class _NotToldBack(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        self.swapped_in = []
        return super().build(number)
