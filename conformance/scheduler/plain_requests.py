"""The plain scheduler's requests: where they are, how they arrive, share a prompt and end."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.block_manager import AllocationStatus, BlockManager
from ...core.errors import RequestError
from ...core.options import PartOptions
from ...core.request import FinishReason, Request
from ...core.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerStats
from ...core.scheduling_policy import SchedulingPolicy
from .plain_limits import Guard, PlainView


class PlainRequests(Scheduler):
    """Keeps the queues.

    Attributes:
        live: all requests, in order of arrival.
        waiting, running, swapped: their ids; ``running`` in order of admission.
        paused: ids of running requests that were held back in the last step.
        returned: ids of waiting requests that had a seat before.
        whole: ids of running requests whose prompt must not be split.
        rereads: ids of forked requests that compute their last prompt token for its logits only.
        peak: most tokens that a request had computed whenever it was preempted.
        forked: pairs of parent and child that no plan has told of.
        planned: shares of the last plan that have not been carried out.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        self.live: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.swapped: list[str] = []
        self.paused: set[str] = set()
        self.returned: set[str] = set()
        self.whole: set[str] = set()
        self.rereads: set[str] = set()
        self.peak: dict[str, int] = {}
        self.forked: list[tuple[str, str]] = []
        self.planned: dict[str, int] = {}
        self.number = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.now = 0.0
        self.view = PlainView(self)
        self.guard = Guard(policy, self.view, config.strict_policy)
        self.can_fork = "fork" in block_manager.powers

    # The contract.

    def add(self, request: Request, now: float) -> None:
        self.now = now
        if request.request_id in self.live:
            raise RequestError(f"{request.request_id!r} is live already")
        self.check_size(request)
        self.view.passing = {request.request_id: request}
        verdict = self.guard.call(
            "on_arrival", self.policy.on_arrival, self.view, self.view.look(request)
        )
        if not verdict.accepted:
            raise RequestError(f"{request.request_id!r} was refused: {verdict.reason}")
        self.live[request.request_id] = request
        self.enqueue(request.request_id)

    def finish(self, request_id: str) -> bool:
        if request_id not in self.live:
            return False
        self.remove(request_id)
        self.tell_of_end(request_id)
        return True

    def get(self, request_id: str) -> Request | None:
        return self.live.get(request_id)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running) - len(self.paused),
            waiting=len(self.waiting),
            swapped=len(self.swapped),
            paused=len(self.paused),
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
        )

    # Arrivals and ends.

    def check_size(self, request: Request) -> None:
        """Refuse what can never be served."""
        prompt, total = request.num_prompt_tokens, request.max_total_tokens
        if not 1 <= prompt < total <= self.config.max_model_len:
            raise RequestError(f"{prompt} of {total} tokens do not fit into max_model_len")
        if total - 1 > self.block_manager.largest_request():
            raise RequestError(f"{total - 1} tokens do not fit into the cache")
        if prompt > self.config.max_num_batched_tokens and not self.config.enable_chunked_prefill:
            raise RequestError(f"{prompt} tokens do not fit into a step")
        tokens = request.token_ids
        if self.block_manager.can_allocate(tokens, prompt) is AllocationStatus.NEVER:
            raise RequestError(f"{prompt} tokens can never be allocated")

    def enqueue(self, name: str) -> None:
        """A newcomer waits behind all others."""
        self.waiting.append(name)

    def put_back(self, name: str) -> None:
        """A preempted request waits before all that never had a seat."""
        self.returned.add(name)
        front = [other for other in self.waiting if other in self.returned]
        rest = [other for other in self.waiting if other not in self.returned]
        front = sorted([*front, name], key=list(self.live).index)
        self.waiting = [*front, *rest]

    def remove(self, name: str) -> None:
        """Let go of a request."""
        self.release(name)
        for queue in (self.waiting, self.running, self.swapped):
            if name in queue:
                queue.remove(name)
        for names in (self.paused, self.returned, self.whole, self.rereads):
            names.discard(name)
        self.peak.pop(name, None)
        self.planned.pop(name, None)
        self.view.passing = {name: self.live.pop(name), **self.view.passing}

    def release(self, name: str) -> None:
        """Give the blocks of a request back."""
        self.block_manager.free(name)

    def tell_of_end(self, name: str) -> None:
        """Tell the policy that a request ended."""
        self.guard.call("on_finish", self.policy.on_finish, self.view, name)

    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        """Take note of a request's share; why it ended by it."""
        name = item.request_id
        request = self.live[name]
        leads = not request.output_token_ids and name not in self.rereads
        request.num_computed_tokens = item.num_computed_tokens + item.num_new_tokens
        reason = request.append_token(sampled[name]) if item.samples else None
        self.block_manager.commit(name, request.token_ids, request.num_computed_tokens)
        self.rereads.discard(name)
        if leads and self.has_prompt(request):
            self.fork(request)
        return reason

    def has_advanced(self, name: str) -> bool:
        """Whether a request has passed the point at which it was preempted."""
        return self.live[name].num_computed_tokens > self.peak.get(name, 0)

    # Completions of one prompt.

    def follows(self, name: str) -> bool:
        """Whether a waiting request waits for another to compute their prompt."""
        leaders = (*self.running, *self.swapped)
        return any(name in self.followers(self.live[one]) for one in leaders if self.leads(one))

    def leads(self, name: str) -> bool:
        """Whether a request computes a prompt that others may share."""
        return not self.live[name].output_token_ids and name not in self.rereads

    def followers(self, leader: Request) -> list[str]:
        """Who could share a request's prompt: waiting completions of it that never had a seat."""
        if not self.can_fork:
            return []
        newcomers = [name for name in self.waiting if name not in self.returned]
        return [name for name in newcomers if self.same_prompt(leader, self.live[name])]

    def same_prompt(self, leader: Request, other: Request) -> bool:
        """Whether two requests are completions of one prompt."""
        return other.parent_id == leader.parent_id

    def has_prompt(self, leader: Request) -> bool:
        """Whether a request has computed its prompt."""
        return leader.num_computed_tokens >= leader.num_prompt_tokens

    def fork(self, leader: Request) -> None:
        """Let those who waited for a prompt share it, as far as there are seats."""
        for name in self.followers(leader):
            if self.free_seats() > 0:
                self.fork_one(leader, self.live[name])

    def fork_one(self, leader: Request, child: Request) -> None:
        """Let a request run on the blocks of another."""
        name = child.request_id
        self.block_manager.fork(leader.request_id, name)
        child.num_computed_tokens = child.num_prompt_tokens - 1
        child.num_cached_tokens = leader.num_cached_tokens
        self.waiting.remove(name)
        self.running.append(name)
        self.rereads.add(name)
        self.forked.append((leader.request_id, name))

    def free_seats(self) -> int:
        """Seats that nobody has."""
        return self.config.max_num_seqs - len(self.running)
