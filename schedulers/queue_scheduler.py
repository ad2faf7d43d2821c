"""The built-in scheduler: waiting and running queues, continuous batching, preemption.

Iteration-level scheduling (https://www.usenix.org/conference/osdi22/presentation/yu) with chunked
prefill mixed with decoding (https://arxiv.org/abs/2403.02310). A step is planned in this order:

1. The policy's proposal is clipped, proactive preemptions are done.
2. Running requests get their tokens, in order of admission unless the policy says otherwise.
3. Waiting requests are admitted while token budget, seats and blocks last, preempted ones first,
   each group in order of arrival; nobody overtakes a request that does not fit, unless the policy
   allows skips.

**Decodes advance in every step.** Under the default policy a request is admitted only when budget
is left after everybody before it, and nobody's share grows afterwards, so each running request
finds at least one token of budget. A prompt longer than the budget leaves none for newcomers until
its last chunk; with ``long_prefill_token_threshold`` below ``max_num_batched_tokens`` a short
newcomer starts in the next step.

**Blocks.** An admission reserves slots for all known tokens of a request, so a half computed prompt
is never thrown away. When a running request finds no block for its next token, requests are
preempted until it does: the policy's victims, by default the most recently admitted one, which may
be that request itself. A victim loses its blocks, keeps its tokens, and is computed anew, as if its
completion were part of its prompt. A step in which that happened admits nobody.

**Whole prompts.** Without ``enable_chunked_prefill`` a prompt is computed in one step, whatever
chunk size a policy grants. Only a preempted request that has grown past ``max_num_batched_tokens``
is computed in parts, as there is no other way.

**No policy can stop the engine.** If a proposal leaves a step with nothing to do, that is reported
and the step is planned again without it; so a plan is empty only if nothing is live, or if all that
was left has been preempted by the policy in this very step. A policy may preempt a request again
only after it has passed the point it had reached before. Each reactive preemption is paid for by
a token generated since the beneficiary was admitted. Hence every request ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ..core.block_manager import AllocationStatus, BlockManager
from ..core.errors import CapacityError, RequestError
from ..core.options import PartOptions
from ..core.request import FinishReason, Request
from ..core.scheduler import Scheduler, SchedulerConfig, SchedulerStats, StepPlan
from ..core.scheduling_policy import PreemptionMode, Progress, SchedulingPolicy
from .checks import MORE_BLOCKS, check_config, check_request
from .clipping import Clipper
from .entry import NO_STEP, Entry
from .policy_guard import PolicyGuard
from .queues import WaitingQueue
from .step_builder import StepBuilder
from .views import QueueView


class QueueScheduler(Scheduler):
    """Keeps the queues, the budgets and the state of every request; see the module's text.

    Raises:
        ConfigError: a limit is below 1, or ``long_prefill_token_threshold`` is set although
            ``enable_chunked_prefill`` is off.
    """

    name: ClassVar[str] = "queue"

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        check_config(config)
        self._live: dict[str, Entry] = {}
        self._running: dict[str, Entry] = {}
        self._paused: set[str] = set()
        self._waiting = WaitingQueue()
        self._num_added = 0
        self._num_preemptions = 0
        self._view = QueueView(config, block_manager, self._waiting, self._running, self._live)
        self._guard = PolicyGuard(policy, self._view, config.strict_policy)
        self._clipper = Clipper(config, self._guard, self._live)
        own_commit = getattr(block_manager.commit, "__func__", None)
        self._commits = own_commit is not BlockManager.commit
        self._caches_prefixes = "prefix_caching" in block_manager.powers

    def add(self, request: Request, now: float) -> None:
        self._view.now = now
        if request.request_id in self._live:
            raise RequestError(f"a request with id {request.request_id!r} is live already")
        check_request(request, self.config, self.block_manager.largest_request())
        prompt = request.prompt_token_ids
        if self.block_manager.can_allocate(prompt, len(prompt)) is AllocationStatus.NEVER:
            raise RequestError(
                f"request {request.request_id!r} has a prompt of {len(prompt)} tokens, which block "
                f"manager {self.block_manager.name!r} can never hold: {MORE_BLOCKS}"
            )
        entry = Entry(request, self._num_added)
        with self._view.showing(entry):
            verdict = self._guard.on_arrival(entry.view)
        if not verdict.accepted:
            raise RequestError(
                f"request {request.request_id!r} was refused by scheduling policy "
                f"{self.policy.name!r}: {verdict.reason or 'no reason given'}"
            )
        self._num_added += 1
        self._live[request.request_id] = entry
        self._waiting.add(entry)

    def finish(self, request_id: str) -> bool:
        entry = self._live.get(request_id)
        if entry is None:
            return False
        self._remove(entry)
        with self._view.showing(entry):
            self._guard.on_finish(request_id)
        return True

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step and reserve its slots.

        Raises:
            PluginError: the policy raised, or ``strict_policy`` is on and it proposed the
                impossible. No request has been admitted then.
            CapacityError: the block manager has no room for a request that is alone.
        """
        self._view.now = now
        self._guard.clipped = []
        limits = self._clipper.clip(self._guard.propose())
        step = StepBuilder(self._view.step, limits)
        try:
            self._plan(step)
        finally:
            self._view.step += 1  # a step that failed keeps its number
        return step.build(self._guard.clipped)

    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], now: float
    ) -> Mapping[str, FinishReason]:
        """As in the contract. A plan that was carried out before changes nothing.

        Raises:
            ValueError: a request that samples is not in ``sampled``.
            PluginError: the policy raised; the step has been taken note of nevertheless.
        """
        self._view.now = now
        finished: dict[str, FinishReason] = {}
        progress: list[Progress] = []
        number, live = plan.step, self._live
        commits, wants_progress = self._commits, self._guard.wants_progress
        for item in plan.scheduled:
            request_id = item.request_id
            entry = live.get(request_id)
            if entry is None or entry.step != number:
                continue
            request = entry.request
            num_computed = item.num_computed_tokens + item.num_new_tokens
            token = sampled.get(request_id) if item.samples else None
            if token is None and item.samples:
                raise ValueError(f"step {number} has no sampled token for request {request_id!r}")
            entry.step = NO_STEP
            request.num_computed_tokens = num_computed
            if token is not None:
                entry.num_tokens += 1
                reason = request.append_token(token)
                if reason is not None:
                    finished[request_id] = reason
            if commits:
                self.block_manager.commit(request_id, entry.tokens, num_computed)
            if wants_progress:
                progress.append(Progress(request_id, item.num_new_tokens, int(item.samples)))
        ended = [live[request_id] for request_id in finished]
        for entry in ended:
            self._remove(entry)
        with self._view.showing(*ended):
            if progress:
                self._guard.on_progress(progress)
            for request_id in finished:
                self._guard.on_finish(request_id)
        return finished

    def get(self, request_id: str) -> Request | None:
        entry = self._live.get(request_id)
        return None if entry is None else entry.request

    def stats(self) -> SchedulerStats:
        num_paused = len(self._paused)
        return SchedulerStats(
            running=len(self._running) - num_paused,
            waiting=len(self._waiting),
            paused=num_paused,
            num_preemptions=self._num_preemptions,
        )

    def _plan(self, step: StepBuilder) -> None:
        limits = step.limits
        for entry in limits.preempt:
            self._preempt(step, entry)
        self._fill(step)
        if step.num_scheduled or not self._live:
            return
        if limits is not self._clipper.default:
            self._guard.report(
                f"the proposal leaves nothing to run although {len(self._live)} requests are "
                "live: the default holds in this step"
            )
            step.restart(self._clipper.default)
            self._fill(step)
        if step.num_scheduled == 0 and not step.preempted:
            stuck = next(iter(self._running.values()), None) or next(iter(self._waiting))
            raise self._no_room(stuck)

    def _fill(self, step: StepBuilder) -> None:
        self._paused.clear()
        self._paused.update(step.limits.pause)
        self._schedule_running(step)
        if not step.out_of_blocks:
            self._admit(step)

    def _schedule_running(self, step: StepBuilder) -> None:
        entries = list(self._running.values())
        if step.limits.running_order:
            entries = list(dict.fromkeys((*step.limits.running_order, *entries)))
        if step.limits.pause:
            entries = [entry for entry in entries if entry.request_id not in step.limits.pause]
        for entry in entries:
            if not entry.running:  # a victim of one before it
                continue
            if step.token_budget == 0:
                break
            num_computed = entry.request.num_computed_tokens
            num_left = entry.num_tokens - num_computed
            share = 1 if num_left == 1 else step.share(entry, num_left, entry.may_split)
            needed = num_computed + share
            if share and (needed <= entry.capacity or self._grow(step, entry, needed)):
                step.give(entry, share, num_left)

    def _grow(self, step: StepBuilder, entry: Entry, needed: int) -> bool:
        """Get slots for ``needed`` tokens, at the cost of others; False if it cost the request's
        own."""
        copies = self.block_manager.append(entry.request_id, needed)
        if copies is None:
            step.out_of_blocks = True
            for victim in self._victims(entry):
                self._preempt(step, victim)
                if victim is entry:
                    return False
                copies = self.block_manager.append(entry.request_id, needed)
                if copies is not None:
                    break
        if copies:
            step.copies[entry.request_id] = copies
        entry.capacity = self._slots(needed)
        return True

    def _victims(self, entry: Entry) -> Iterator[Entry]:
        """The policy's victims, then the most recently admitted; raises when ``entry`` is alone."""
        if len(self._running) > 1:
            for victim in self._guard.victims(entry.request_id, self._running):
                yield victim
                if len(self._running) == 1:
                    break
        while len(self._running) > 1:
            self._guard.report(
                f"victims names too few for {entry.request_id!r}: the most recently admitted "
                "request gives way"
            )
            yield next(reversed(self._running.values()))
        raise self._no_room(entry)

    def _preempt(self, step: StepBuilder, entry: Entry) -> None:
        request = entry.request
        if entry.step == step.number:
            step.take_back(entry)
        entry.step = NO_STEP
        self._release(entry)
        entry.high_water = max(entry.high_water, request.num_computed_tokens)
        entry.preempted_in = step.number
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        step.preempted.append(entry.request_id)
        self._waiting.put_back(entry)
        self._guard.on_preempt(entry.request_id, PreemptionMode.RECOMPUTE)

    def _admit(self, step: StepBuilder) -> None:
        seats = self.config.max_num_seqs - len(self._running)
        most = min(seats, step.limits.max_admissions)
        skips = step.limits.max_skips
        admitted: list[Entry] = []
        try:
            # Queues change only afterwards: a lazy order may be iterating over them.
            if most > 0 and step.token_budget > 0:
                for entry in self._candidates(step):
                    if self._try_admit(step, entry):
                        admitted.append(entry)
                        if len(admitted) == most or step.token_budget == 0:
                            break
                    elif skips == 0:
                        break
                    else:
                        skips -= 1
        except BaseException:
            for entry in admitted:
                self._release(entry)
                entry.request.num_computed_tokens = 0
            raise
        for entry in admitted:
            self._waiting.remove(entry)
            self._running[entry.request_id] = entry
            entry.running = True

    def _candidates(self, step: StepBuilder) -> Iterator[Entry]:
        order = step.limits.admission_order
        if order is None:
            return (entry for entry in self._waiting if entry.preempted_in != step.number)

        def find(name: str) -> Entry | str:
            entry = self._live.get(name)
            if entry is None or entry.running:
                return "which is not waiting"
            return entry if entry.preempted_in != step.number else "which this step preempted"

        return self._guard.entries("admission_order", order, find)

    def _try_admit(self, step: StepBuilder, entry: Entry) -> bool:
        """Give a waiting request its blocks and its share; False, and nothing has changed."""
        request, num_tokens = entry.request, entry.num_tokens
        num_cached = self.block_manager.match_prefix(entry.tokens) if self._caches_prefixes else 0
        may_split = (
            self.config.enable_chunked_prefill
            or num_tokens - num_cached > self.config.max_num_batched_tokens
        )
        if step.share(entry, num_tokens - num_cached, may_split) == 0:
            return False
        allocation = self.block_manager.allocate(entry.request_id, entry.tokens, num_tokens)
        if allocation is None:
            return False
        num_left = num_tokens - allocation.num_cached_tokens
        share = step.share(entry, num_left, may_split)
        if share < 1:
            self.block_manager.free(entry.request_id)
            return False
        request.num_computed_tokens = allocation.num_cached_tokens
        entry.may_split = may_split
        entry.capacity = self._slots(num_tokens)
        step.give(entry, share, num_left)
        if allocation.copies:
            step.copies[entry.request_id] = allocation.copies
        return True

    def _release(self, entry: Entry) -> None:
        self.block_manager.free(entry.request_id)
        self._running.pop(entry.request_id, None)
        self._paused.discard(entry.request_id)
        entry.running = False
        entry.capacity = 0

    def _remove(self, entry: Entry) -> None:
        if not entry.running:
            self._waiting.remove(entry)
        self._release(entry)
        del self._live[entry.request_id]

    def _slots(self, num_tokens: int) -> int:
        block_size = self.block_manager.config.block_size
        return -(-num_tokens // block_size) * block_size

    def _no_room(self, entry: Entry) -> CapacityError:
        return CapacityError(
            f"request {entry.request_id!r} is alone and finds no room for "
            f"{entry.num_tokens} tokens: block manager {self.block_manager.name!r} declares room "
            f"for {self.block_manager.largest_request()}; {MORE_BLOCKS}"
        )
