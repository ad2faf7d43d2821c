"""The plain scheduler's admission: who comes back, and who gets a seat."""

from __future__ import annotations

from ...core.block_manager import Allocation
from ...core.scheduler import MoveKind
from .plain_limits import Limits
from .plain_preemption import PlainPreemption


class PlainAdmission(PlainPreemption):
    """Gives blocks to swapped and waiting requests."""

    def resume(self, limits: Limits) -> bool:
        """Bring swapped requests back; False if nobody may be admitted after that."""
        for name in self.guard.order("resume_order", limits.resume_order, self.swapped):
            if name in self.preempted or name not in self.swapped:
                continue
            if self.free_seats() > 0 and self.try_resume(name, limits):
                continue
            if self.skips < 1:
                return False
            self.skips -= 1
        return not self.swapped or limits.resume_order is not None

    def try_resume(self, name: str, limits: Limits) -> bool:
        """Bring a swapped request back with its share."""
        request = self.live[name]
        left = request.num_tokens_to_compute
        share = self.share(name, left, limits)
        needed = request.num_computed_tokens + share
        usage, config = self.block_manager.usage(), self.block_manager.config
        kept = config.watermark_blocks if usage.used else 0
        # One block more than it had, at most, for its next tokens.
        if share < 1 or config.blocks_for(max(needed, request.num_tokens)) + kept > usage.available:
            return False
        copies = self.block_manager.swap_in(name)
        if copies is None:
            return False
        self.move(name, MoveKind.SWAP_IN, copies)
        self.swapped.remove(name)
        self.running.append(name)
        self.swapped_in.append(name)
        more = self.block_manager.append(name, needed)
        if more is not None:
            self.move(name, MoveKind.COPY, more)
            self.give(name, share, left)
        return True

    def admit(self, limits: Limits) -> None:
        """Admit waiting requests while budget, seats and blocks last."""
        admitted = 0
        for name in self.guard.order("admission_order", limits.admission_order, self.waiting):
            if admitted == limits.max_admissions or self.free_seats() < 1 or not self.tokens_left:
                return
            if name in self.preempted or name not in self.waiting or self.follows(name):
                continue
            if self.try_admit(name, limits):
                admitted += 1
            elif self.skips < 1:
                return
            else:
                self.skips -= 1

    def try_admit(self, name: str, limits: Limits) -> bool:
        """Give a waiting request its blocks and its share."""
        request = self.live[name]
        allocation = self.allocate(name)
        if allocation is None:
            return False
        hit = self.hit(allocation.num_cached_tokens)
        left = request.num_tokens - hit
        share = self.share(name, left, limits)
        if share < 1:
            self.block_manager.free(name)
            return False
        if self.must_be_whole(name, left):
            self.whole.add(name)
        request.num_computed_tokens = hit
        if hit:
            self.hits.append((name, hit))
        if not request.num_preemptions:
            request.num_cached_tokens = hit
        self.move(name, MoveKind.COPY, allocation.copies)
        self.waiting.remove(name)
        self.returned.discard(name)
        self.running.append(name)
        self.give(name, share, left)
        return True

    def allocate(self, name: str) -> Allocation | None:
        """Get blocks for all known tokens of a request."""
        manager, request = self.block_manager, self.live[name]
        tokens, salt = request.token_ids, request.hints.cache_salt
        if manager.config.enable_prefix_caching:
            return manager.allocate(name, tokens, len(tokens), salt=salt)
        return manager.allocate(name, tokens, len(tokens))

    def hit(self, num_cached_tokens: int) -> int:
        """Tokens that an admitted request need not compute."""
        return num_cached_tokens
