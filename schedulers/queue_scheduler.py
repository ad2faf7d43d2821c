"""The built-in scheduler: queues, continuous batching, preemption, groups that share a prompt.

Iteration-level scheduling (https://www.usenix.org/conference/osdi22/presentation/yu) with chunked
prefill mixed with decoding (https://arxiv.org/abs/2403.02310). A step is planned in this order:

1. The policy's proposal is clipped, proactive preemptions are done.
2. Running requests get their tokens: first those that the policy names, then those with one token
   to compute, then the others, each in order of admission.
3. Swapped requests are brought back in order of arrival, and then waiting ones are admitted, while
   token budget, seats and blocks last: preempted ones first, each group in order of arrival. Nobody
   overtakes a request that does not fit, unless the policy allows skips.

**Decodes advance in every step**, as long as ``max_num_batched_tokens`` is not below
``max_num_seqs``. Under the default policy a request is admitted only when budget is left after
everybody before it, and nobody's share grows afterwards, so prompts advance in every step too,
unless completions that were forked meanwhile take their tokens. A prompt longer than the budget
leaves none for newcomers until its last chunk; with ``long_prefill_token_threshold`` below
``max_num_batched_tokens`` a short newcomer starts in the next step.

**Blocks.** An admission reserves slots for all known tokens of a request, so a half computed prompt
is never thrown away. When a running request finds no block for its next token, requests are
preempted until it does: the policy's victims, by default the most recently admitted one, which may
be that request itself. A victim keeps its tokens and loses its blocks. Either it is computed anew,
as if its completion were part of its prompt, or its blocks go to host memory and come back whole
(see ``preemption.py`` for the choice; a full swap space means the former). A step in which that
happened brings nobody back and admits nobody. A swapped request comes back when there is room for
its blocks and its next token, so it advances before it can be a victim again.

**Groups.** Completions of one prompt share its blocks if the block manager can fork. The first of
them that is admitted leads: it computes the prompt, and the others follow it, without blocks but
each with a seat, so the group is admitted when it finds a seat for each (as many as there are, if
it is larger). When the prompt is computed, all followers are forked and run. Each computes the last
prompt token once more for its logits, and writes nothing: its first write is that of a generated
token, for which it gets a block of its own. If the leader ends or has to be computed anew before
that, its followers wait on their own in front of the queue, and the next that is admitted leads; a
leader that is swapped keeps them.

**Whole prompts.** Without ``enable_chunked_prefill`` a prompt is computed in one step, whatever
chunk size a policy grants. Only a preempted request that has grown past ``max_num_batched_tokens``
is computed in parts, as there is no other way.

**No policy can stop the engine.** If a proposal leaves a step with nothing to do, that is reported
and the step is planned again without it; so a plan is empty only if nothing is live, or if all that
was left has been preempted by the policy in this very step, or follows what was. A policy may
preempt a request again only after it has passed the point it had reached before. Each reactive
preemption is paid for by a token generated since the beneficiary was admitted. Hence every request
ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import ClassVar

from ..core.block_manager import AllocationStatus, BlockManager
from ..core.errors import CapacityError, RequestError
from ..core.options import PartOptions
from ..core.request import FinishReason, Request
from ..core.scheduler import MoveKind, Scheduler, SchedulerConfig, SchedulerStats, StepPlan
from ..core.scheduling_policy import PreemptionMode, Progress, SchedulingPolicy
from .admission import Admission
from .checks import MORE_BLOCKS, check_config, check_request
from .clipping import Clipper
from .entry import NO_STEP, Entry, State
from .groups import Groups
from .policy_guard import PolicyGuard
from .preemption import Preemption
from .queues import Queues
from .step_builder import Moves, StepBuilder
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
        check_config(config, block_manager.config.num_host_blocks)
        self._queues = Queues(config.max_num_seqs)
        self._live, self._running = self._queues.live, self._queues.running
        self._groups = Groups()
        self._num_added = 0
        self._num_preemptions = 0
        self._num_swaps = 0
        # What a step that failed could not say is said by the next plan.
        self._moves: Moves = []
        self._forked: list[tuple[str, str]] = []
        self._rereading: list[Entry] = []
        self._view = QueueView(config, block_manager, self._queues)
        self._guard = PolicyGuard(policy, self._view, config.strict_policy)
        self._clipper = Clipper(config, self._guard, self._live)
        self._preemption = Preemption(config, block_manager, self._guard)
        self._admission = Admission(config, block_manager, self._queues, self._groups, self._guard)
        own_commit = getattr(block_manager.commit, "__func__", None)
        self._commits = own_commit is not BlockManager.commit

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
        self._queues.add(entry)
        self._groups.add(entry)

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
        step = StepBuilder(self._view.step, limits, self._moves)
        try:
            self._plan(step)
        finally:
            self._view.step += 1  # a step that failed keeps its number
        plan = step.build(self._guard.clipped, self._forked)
        self._moves.clear()
        self._forked.clear()
        return plan

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
        if self._rereading:
            self._note_reread()
        if self._queues.leaders:
            self._fork_followers()
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
        queues = self._queues
        num_paused = len(queues.paused)
        return SchedulerStats(
            running=len(queues.running) - num_paused,
            waiting=len(queues.waiting) + queues.num_following,
            swapped=len(queues.swapped),
            paused=num_paused,
            num_preemptions=self._num_preemptions,
            num_swaps=self._num_swaps,
        )

    def _plan(self, step: StepBuilder) -> None:
        limits = step.limits
        for entry in limits.preempt:
            self._preempt(step, entry, limits.preemption_modes.get(entry.request_id))
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
            raise self._no_room(next(self._in_order()))

    def _fill(self, step: StepBuilder) -> None:
        self._queues.paused.clear()
        self._queues.paused.update(step.limits.pause)
        self._schedule_running(step)
        if not step.out_of_blocks and (not self._queues.swapped or self._admission.resume(step)):
            self._admission.admit(step)

    def _schedule_running(self, step: StepBuilder) -> None:
        order, pause = step.limits.running_order, step.limits.pause
        entries = list(self._running.values())
        if pause:
            entries = [entry for entry in entries if entry.request_id not in pause]
        if order:
            self._give_shares(step, [entry for entry in order if entry.request_id not in pause])
            named = {entry.request_id for entry in order}
            entries = [entry for entry in entries if entry.request_id not in named]
        longer: list[Entry] = []
        running, give_one = State.RUNNING, step.give_one
        for entry in entries:
            needed = entry.num_tokens
            if needed - entry.request.num_computed_tokens > 1:
                longer.append(entry)
            elif entry.state is running:  # else it was the victim of one before it
                if step.token_budget == 0:
                    return
                if needed <= entry.capacity or self._grow(step, entry, needed):
                    give_one(entry)
        self._give_shares(step, longer)

    def _give_shares(self, step: StepBuilder, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if not entry.running:
                continue
            if step.token_budget == 0:
                return
            num_left = entry.num_tokens_to_compute
            share = 1 if num_left == 1 else step.share(entry, num_left, entry.may_split)
            needed = entry.request.num_computed_tokens + share
            if share and (needed <= entry.capacity or self._grow(step, entry, needed)):
                step.give(entry, share, num_left)

    def _grow(self, step: StepBuilder, entry: Entry, needed: int) -> bool:
        """Get slots for ``needed`` tokens, at the cost of others; False if it cost the request's
        own."""
        copies = self.block_manager.append(entry.request_id, needed)
        if copies is None:
            step.out_of_blocks = True
            for victim, mode in self._preemption.victims(entry, self._running):
                self._preempt(step, victim, mode)
                if victim is entry:
                    return False
                copies = self.block_manager.append(entry.request_id, needed)
                if copies is not None:
                    break
            else:
                raise self._no_room(entry)
        step.move(entry, MoveKind.COPY, copies)
        entry.capacity = self.block_manager.config.writable_tokens(needed)
        return True

    def _preempt(
        self, step: StepBuilder, entry: Entry, wished: PreemptionMode | None = None
    ) -> None:
        request = entry.request
        if entry.step == step.number:
            step.take_back(entry)
        entry.step = NO_STEP
        mode, copies = self._preemption.take(entry, wished)
        entry.high_water = max(entry.high_water, request.num_computed_tokens)
        entry.preempted_in = step.number
        entry.capacity = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        step.preempted.append(entry.request_id)
        if mode is PreemptionMode.SWAP:
            self._num_swaps += 1
            step.swapped_out.append(entry.request_id)
            step.move(entry, MoveKind.SWAP_OUT, copies)
            self._queues.unseat(entry, State.SWAPPED)
        else:
            step.drop_moves(entry)
            request.num_computed_tokens = 0
            entry.rereads = False
            self._queues.unseat(entry, State.WAITING)
        self._guard.on_preempt(entry.request_id, mode)

    def _fork_followers(self) -> None:
        """Let the followers of each prompt that has been computed share its blocks, and run."""
        for leader in list(self._queues.leaders.values()):
            num_prompt = leader.request.num_prompt_tokens
            if leader.request.num_computed_tokens < num_prompt:
                continue
            leader.capacity = num_prompt  # it appends before it writes again
            for follower in self._queues.promote(leader):
                self.block_manager.fork(leader.request_id, follower.request_id)
                follower.request.num_computed_tokens = num_prompt - 1
                if not follower.request.num_preemptions:  # else it was admitted before
                    follower.request.num_cached_tokens = leader.request.num_cached_tokens
                follower.may_split = leader.may_split
                follower.capacity = num_prompt
                follower.rereads = True
                self._rereading.append(follower)
                self._forked.append((leader.request_id, follower.request_id))

    def _note_reread(self) -> None:
        """Forked requests whose last prompt token has been computed write like all others."""
        left = []
        for entry in self._rereading:
            if entry.request.num_computed_tokens >= entry.request.num_prompt_tokens:
                entry.rereads = False
            elif entry.rereads and self._live.get(entry.request_id) is entry:
                left.append(entry)
        self._rereading = left

    def _remove(self, entry: Entry) -> None:
        self.block_manager.free(entry.request_id)
        self._queues.remove(entry)
        self._groups.remove(entry)

    def _in_order(self) -> Iterator[Entry]:
        return chain(self._running.values(), self._queues.swapped, self._queues.waiting)

    def _no_room(self, entry: Entry) -> CapacityError:
        return CapacityError(
            f"request {entry.request_id!r} is alone and finds no room for "
            f"{entry.num_tokens} tokens: block manager {self.block_manager.name!r} declares room "
            f"for {self.block_manager.largest_request()}; {MORE_BLOCKS}"
        )
