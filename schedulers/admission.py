"""Who gets a seat: swapped requests first, then waiting ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..core.block_manager import Allocation, BlockManager
from ..core.scheduler import MoveKind, SchedulerConfig
from .entry import Entry, State
from .groups import Groups
from .policy_guard import PolicyGuard
from .queues import Queues
from .step_builder import StepBuilder


class Admission:
    """Resumes and admits requests while token budget, seats and blocks last."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        queues: Queues,
        groups: Groups,
        guard: PolicyGuard,
    ) -> None:
        self._config = config
        self._manager = manager
        self._queues = queues
        self._groups = groups
        self._guard = guard
        self._forks = "fork" in manager.powers
        self._caches_prefixes = "prefix_caching" in manager.powers

    def resume(self, step: StepBuilder) -> bool:
        """Bring swapped requests back; False if one had to be left that nobody may overtake."""
        resumed: list[Entry] = []
        try:
            # Queues change only afterwards: a lazy order may be iterating over them.
            for entry in self._candidates(step, State.SWAPPED):
                seats = self._queues.num_free_seats - sum(other.num_seats for other in resumed)
                if entry.num_seats <= seats and self._try_resume(step, entry):
                    resumed.append(entry)
                elif step.skips == 0:
                    return False
                else:
                    step.skips -= 1
        finally:
            for entry in resumed:
                self._queues.seat(entry)
        return True

    def admit(self, step: StepBuilder) -> None:
        """Admit waiting requests. If the policy's order fails, nobody has been admitted."""
        most, seats = step.limits.max_admissions, self._queues.num_free_seats
        admitted: list[tuple[Entry, list[Entry]]] = []
        taken: set[str] = set()
        try:
            if most > 0 and seats > 0 and step.token_budget > 0:
                for entry in self._candidates(step, State.WAITING):
                    if entry.request_id in taken:
                        continue
                    followers = self._followers(entry, taken)
                    if len(followers) < seats and self._try_admit(step, entry):
                        admitted.append((entry, followers))
                        taken.update(follower.request_id for follower in followers)
                        seats -= 1 + len(followers)
                        if len(admitted) == most or seats == 0 or step.token_budget == 0:
                            break
                    elif step.skips == 0:
                        break
                    else:
                        step.skips -= 1
        except BaseException:
            for entry, _ in admitted:
                self._manager.free(entry.request_id)
                step.drop_moves(entry)
                entry.capacity = entry.request.num_computed_tokens = 0
            raise
        for entry, followers in admitted:
            self._queues.follow(entry, followers)
            self._queues.seat(entry)

    def _candidates(self, step: StepBuilder, state: State) -> Iterator[Entry]:
        """Who may come next, in the policy's order or that of arrival."""
        queue: Iterable[Entry]
        if state is State.SWAPPED:
            what, order, queue = "resume_order", step.limits.resume_order, self._queues.swapped
        else:
            what, order, queue = (
                "admission_order",
                step.limits.admission_order,
                self._queues.waiting,
            )
        if order is None:
            return (entry for entry in queue if entry.preempted_in != step.number)
        return self._guard.entries(what, order, self._finder(step, state))

    def _finder(self, step: StepBuilder, state: State) -> Callable[[str], Entry | str]:
        def find(name: str) -> Entry | str:
            entry = self._queues.live.get(name)
            if entry is not None and entry.leader is not None:
                return f"which waits for {entry.leader.request_id!r} to compute their prompt"
            if entry is None or entry.state is not state:
                return f"which is not {state.value}"
            return entry if entry.preempted_in != step.number else "which this step preempted"

        return find

    def _followers(self, entry: Entry, taken: set[str]) -> list[Entry]:
        """Who waits until a request that is about to be admitted has computed their prompt."""
        if not self._forks or entry.request.params.n == 1:
            return []
        others = [m for m in self._groups.others(entry) if m.request_id not in taken]
        return others[: self._config.max_num_seqs - 1]

    def _try_resume(self, step: StepBuilder, entry: Entry) -> bool:
        """Bring a swapped request back with its share; False, and nothing has changed."""
        num_left = entry.num_tokens_to_compute
        share = 1 if num_left == 1 else step.share(entry, num_left, entry.may_split)
        needed = entry.request.num_computed_tokens + share
        if min(share, step.token_budget) == 0 or not self._has_room(entry, needed):
            return False
        moved = self._manager.swap_in(entry.request_id)
        if moved is None:
            return False
        step.move(entry, MoveKind.SWAP_IN, moved)
        step.swapped_in.append(entry.request_id)
        if entry.rereads:
            entry.capacity = needed
        else:
            copied = self._manager.append(entry.request_id, needed)
            if copied is None:  # it has its blocks, and waits for more as a running request
                entry.capacity = 0
                return True
            step.move(entry, MoveKind.COPY, copied)
            entry.capacity = self._manager.config.writable_tokens(needed)
        step.give(entry, share, num_left)
        return True

    def _has_room(self, entry: Entry, needed: int) -> bool:
        """Whether a swapped request and its next tokens find blocks, the watermark kept unless
        nobody else holds any."""
        usage, config = self._manager.usage(), self._manager.config
        num_blocks = max(entry.num_host_blocks, config.blocks_for(needed))
        kept = config.watermark_blocks if usage.used else 0
        return num_blocks + kept <= usage.available

    def _try_admit(self, step: StepBuilder, entry: Entry) -> bool:
        """Give a waiting request its blocks and its share; False, and nothing has changed."""
        num_tokens = entry.num_tokens
        may_split = self._may_split(num_tokens)
        if step.share(entry, num_tokens, may_split) == 0:
            num_cached = self._match_prefix(entry)
            may_split = self._may_split(num_tokens - num_cached)
            if num_cached == 0 or step.share(entry, num_tokens - num_cached, may_split) == 0:
                return False
        allocation = self._allocate(entry)
        if allocation is None:
            return False
        num_cached = allocation.num_cached_tokens
        may_split = self._may_split(num_tokens - num_cached)
        share = step.share(entry, num_tokens - num_cached, may_split)
        if share < 1:
            self._manager.free(entry.request_id)
            return False
        entry.request.num_computed_tokens = num_cached
        entry.may_split = may_split
        entry.capacity = self._manager.config.writable_tokens(num_tokens)
        step.move(entry, MoveKind.COPY, allocation.copies)
        step.give(entry, share, num_tokens - num_cached)
        if num_cached:
            step.prefix_hits.append((entry.request_id, num_cached))
        if not entry.request.num_preemptions:
            entry.request.num_cached_tokens = num_cached
        return True

    def _may_split(self, num_left: int) -> bool:
        config = self._config
        return config.enable_chunked_prefill or num_left > config.max_num_batched_tokens

    def _match_prefix(self, entry: Entry) -> int:
        if not self._caches_prefixes:
            return 0
        return self._manager.match_prefix(entry.tokens, salt=entry.request.hints.cache_salt)

    def _allocate(self, entry: Entry) -> Allocation | None:
        name, tokens = entry.request_id, entry.tokens
        if not self._caches_prefixes:
            return self._manager.allocate(name, tokens, entry.num_tokens)
        salt = entry.request.hints.cache_salt
        return self._manager.allocate(name, tokens, entry.num_tokens, salt=salt)
