"""What stands between the plain scheduler and its policy: views, calls, and what is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...core.block_manager import BlockUsage
from ...core.errors import PluginError
from ...core.request import Request
from ...core.scheduler import SchedulerConfig
from ...core.scheduling_policy import (
    PreemptionMode,
    Proposal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
)

if TYPE_CHECKING:
    from .plain_requests import PlainRequests
    from .plain_scheduler import PlainScheduler

T = TypeVar("T")


class Look:
    """A request as a policy sees it."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is read-only")


class PlainView:
    """The scheduler as a policy sees it.

    Attributes:
        passing: requests that are arriving or have just ended.
    """

    def __init__(self, scheduler: PlainRequests) -> None:
        self._scheduler = scheduler
        self.passing: dict[str, Request] = {}

    @property
    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._scheduler.now

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._scheduler.number

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step."""
        return self._scheduler.config.max_num_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        """Seats."""
        return self._scheduler.config.max_num_seqs

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._scheduler.block_manager.config.block_size

    @property
    def num_waiting(self) -> int:
        """Requests without blocks that could be admitted."""
        return len(self._admissible())

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._scheduler.running)

    @property
    def num_swapped(self) -> int:
        """Requests in host memory."""
        return len(self._scheduler.swapped)

    def look(self, request: Request) -> RequestView:
        """A request, read-only."""
        return cast(RequestView, Look(request))

    def _queue(self, names: Sequence[str]) -> Iterator[RequestView]:
        live = self._scheduler.live
        return (self.look(live[name]) for name in list(names) if name in live)

    def waiting(self) -> Iterator[RequestView]:
        """Requests without blocks that could be admitted."""
        return self._queue(self._admissible())

    def _admissible(self) -> list[str]:
        scheduler = self._scheduler
        return [name for name in scheduler.waiting if not scheduler.follows(name)]

    def running(self) -> Iterator[RequestView]:
        """Requests with blocks."""
        return self._queue(self._scheduler.running)

    def swapped(self) -> Iterator[RequestView]:
        """Requests in host memory."""
        return self._queue(self._scheduler.swapped)

    def request(self, request_id: str) -> RequestView:
        """One request."""
        request = self._scheduler.live.get(request_id) or self.passing[request_id]
        return self.look(request)

    def block_usage(self) -> BlockUsage:
        """How the blocks stand."""
        return self._scheduler.block_manager.usage()

    def num_blocks_of(self, request_id: str) -> int:
        """Device blocks of a request."""
        try:
            return len(self._scheduler.block_manager.block_table(request_id))
        except KeyError:
            return 0

    def match_prefix(self, request_id: str) -> int:
        """Leading tokens of a request that are cached."""
        request = self._scheduler.live[request_id]
        manager = self._scheduler.block_manager
        if not manager.config.enable_prefix_caching:
            return 0
        return manager.match_prefix(request.token_ids, salt=request.hints.cache_salt)


class Guard:
    """Calls a policy.

    Attributes:
        clipped: what it proposed and did not get.
    """

    def __init__(self, policy: SchedulingPolicy, view: SchedulerView, strict: bool) -> None:
        self.clipped: list[str] = []
        self._policy = policy
        self._view = view
        self._strict = strict

    def report(self, sentence: str) -> None:
        """Something impossible was proposed. Raises PluginError in strict mode."""
        if self._strict:
            raise PluginError(f"scheduling policy {self._policy.name!r}: {sentence}")
        self.clipped.append(sentence)

    def call(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call the policy; what it raises is put down to it."""
        try:
            return function(*arguments)
        except Exception as error:
            raise PluginError(
                f"scheduling policy {self._policy.name!r} failed in {method}: {error}"
            ) from error

    def pull(self, method: str, items: Iterable[T]) -> Iterator[T]:
        """What the policy returned, item by item."""
        iterator, end = self.call(method, iter, items), object()
        while (item := self.call(method, next, iterator, end)) is not end:
            yield cast(T, item)

    def propose(self) -> Proposal:
        """Ask what the step should do."""
        return self.call("propose", self._policy.propose, self._view)

    def order(
        self, what: str, proposed: Iterable[str] | None, queue: Sequence[str]
    ) -> Iterator[str]:
        """Who may come next: those of a queue that are proposed, or all of them."""
        if proposed is None:
            yield from list(queue)
            return
        possible, seen = set(queue), set[str]()
        for name in self.pull("propose", proposed):
            if name in possible and name not in seen:
                seen.add(name)
                yield name
            else:
                self.report(f"{what} names {name!r}, which cannot be")


@dataclass(frozen=True)
class Limits:
    """What a step keeps to; the fields are those of ``Proposal``, made possible."""

    token_budget: int
    prefill_budget: int
    chunk: int
    max_admissions: int
    max_skips: int = 0
    preempt: tuple[str, ...] = ()
    modes: Mapping[str, PreemptionMode] = field(default_factory=dict)
    pause: tuple[str, ...] = ()
    running_order: tuple[str, ...] = ()
    grants: Mapping[str, int] = field(default_factory=dict)
    admission_order: Iterable[str] | None = None
    resume_order: Iterable[str] | None = None

    @staticmethod
    def default(config: SchedulerConfig) -> Limits:
        """For a step about which nothing is proposed."""
        most = config.max_num_batched_tokens
        chunk = config.long_prefill_token_threshold
        return Limits(most, most, most if chunk is None else chunk, config.max_num_seqs)


def limits_of(scheduler: PlainScheduler, proposal: Proposal, default: Limits) -> Limits:
    """A proposal, clipped to what is possible."""
    if proposal == Proposal():
        return default
    guard, running = scheduler.guard, list(scheduler.running)

    def number(what: str, value: int | None, least: int, most: int, otherwise: int) -> int:
        if value is None:
            return otherwise
        if not least <= value <= most:
            guard.report(f"{what}={value} is not between {least} and {most}")
        return min(max(value, least), most)

    def chosen(what: str, names: Iterable[str], possible: Sequence[str]) -> tuple[str, ...]:
        return tuple(guard.order(what, names, possible))

    most = default.token_budget
    preempt = chosen("preempt", proposal.preempt, running)
    for name in preempt:
        if not scheduler.has_advanced(name):
            guard.report(f"preempt names {name!r}, which has not advanced since")
    preempt = tuple(name for name in preempt if scheduler.has_advanced(name))
    left = [name for name in running if name not in preempt]
    grants = {}
    for name, grant in proposal.grants.items():
        if name not in scheduler.live:
            guard.report(f"grants names {name!r}, which is not live")
        else:
            grants[name] = number(f"grants[{name!r}]", grant, 1, default.chunk, default.chunk)
    return replace(
        default,
        token_budget=number("token_budget", proposal.token_budget, 1, most, most),
        prefill_budget=number("prefill_budget", proposal.prefill_budget, 0, most, most),
        max_admissions=number(
            "max_admissions", proposal.max_admissions, 0, 10**6, default.max_admissions
        ),
        max_skips=number("max_skips", proposal.max_skips, 0, 10**6, 0),
        preempt=preempt,
        modes={name: mode for name, mode in proposal.preemption_modes.items() if name in preempt},
        pause=chosen("pause", proposal.pause, left),
        running_order=chosen("running_order", proposal.running_order, left),
        grants=grants,
        admission_order=proposal.admission_order,
        resume_order=proposal.resume_order,
    )
