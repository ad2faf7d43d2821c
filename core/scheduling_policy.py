"""The scheduling policy contract: a policy proposes, the scheduler disposes.

A policy sees read-only views, keeps whatever counters it likes, and answers with a ``Proposal``
whose fields are all optional: an empty one is first come, first served. What it proposes is clipped
to the limits, and the clipping is reported in the step plan (with ``strict_policy`` it raises). A
policy reads no clock and no global, so the same object runs in the engine and in a simulator.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol

from .block_manager import BlockUsage
from .options import NoOptions, PartOptions
from .request import SchedulingHints


class RequestView(Protocol):
    """A live, read-only look at one request.

    Attributes (all read-only): as in ``core.request.Request``; ``num_generated_tokens`` counts the
    completion so far, ``max_total_tokens`` bounds prompt and completion together.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def arrival_index(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_generated_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_tokens_to_compute(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def hints(self) -> SchedulingHints: ...


class SchedulerView(Protocol):
    """What a policy sees of the scheduler.

    ``waiting`` iterates in arrival order, preempted requests first; ``running`` in the order of
    admission; ``swapped`` (requests with their blocks in host memory) in arrival order. All are
    lazy: a policy that looks at the first few pays for the first few. Completions of one prompt
    that wait for one of them to compute it are in none of them until they run.
    """

    @property
    def now(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_swapped(self) -> int: ...
    def waiting(self) -> Iterator[RequestView]: ...
    def running(self) -> Iterator[RequestView]: ...
    def swapped(self) -> Iterator[RequestView]: ...
    def request(self, request_id: str) -> RequestView: ...
    def block_usage(self) -> BlockUsage: ...
    def num_blocks_of(self, request_id: str) -> int: ...
    def match_prefix(self, request_id: str) -> int: ...


class PreemptionMode(Enum):
    """What becomes of a victim's keys and values: they are computed anew, or they go to host
    memory. A full swap space makes ``SWAP`` fall back to ``RECOMPUTE``."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True)
class Verdict:
    """A policy's answer to an arrival: accept, or reject with a reason for the client."""

    accepted: bool
    reason: str = ""


ACCEPT = Verdict(accepted=True)


def reject(reason: str) -> Verdict:
    """Refuse a request on arrival; the client is told why."""
    return Verdict(accepted=False, reason=reason)


@dataclass(frozen=True)
class Proposal:
    """What a policy wants for the next step; None or empty leaves the default.

    Attributes:
        admission_order: ids of waiting requests, best first, pulled lazily; waiting requests that
            are left out are not admitted in this step. Default: arrival order.
        max_skips: how many requests that do not fit may be passed over before admission ends.
        max_admissions: most waiting requests to admit in this step; completions of one prompt that
            are admitted together count once.
        resume_order: ids of swapped requests, best first, pulled lazily; those that are left out
            stay swapped in this step. Default: arrival order. Swapped requests come back before
            waiting ones are admitted.
        running_order: ids of running requests that get their tokens first; the others follow in
            order of admission.
        grants: most tokens for a request in this step (its chunk size), at least 1.
        token_budget: most tokens of the step, at least 1, at most ``max_num_batched_tokens``.
        prefill_budget: most tokens of the step for requests that have more than one token to
            compute.
        pause: ids of running requests that keep their blocks and compute nothing in this step.
        preempt: ids of running requests that give up their blocks before anything is scheduled.
        preemption_modes: the modes of those in ``preempt``; default: the setting
            ``preemption_mode``.
    """

    admission_order: Iterable[str] | None = None
    max_skips: int = 0
    max_admissions: int | None = None
    running_order: Sequence[str] = ()
    grants: Mapping[str, int] = field(default_factory=dict)
    token_budget: int | None = None
    prefill_budget: int | None = None
    pause: Collection[str] = ()
    preempt: Sequence[str] = ()
    resume_order: Iterable[str] | None = None
    preemption_modes: Mapping[str, PreemptionMode] = field(default_factory=dict)


class Progress(NamedTuple):
    """What a step did for one request: tokens computed and tokens generated (0 or 1)."""

    request_id: str
    num_computed: int
    num_generated: int


class SchedulingPolicy(ABC):
    """Order, chunk sizes, budgets and victims; every method has the default of first come, first
    served, so a policy overrides what it cares about."""

    name: ClassVar[str]
    Options: ClassVar[type[PartOptions]] = NoOptions
    #: Whether ``victims`` or ``Proposal.preemption_modes`` may name ``PreemptionMode.SWAP``. A
    #: policy that never does may say so; then unused swap space is warned of more plainly.
    may_ask_for_swap: ClassVar[bool] = True

    def __init__(self, options: PartOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    def on_arrival(self, view: SchedulerView, request: RequestView) -> Verdict:
        """Accept or reject a request that has just arrived and is in no queue yet."""
        return ACCEPT

    def propose(self, view: SchedulerView) -> Proposal:
        """Say what the next step should do."""
        return Proposal()

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode | None]]:
        """Who gives up its blocks when ``beneficiary`` has no room, best victim first.

        Each comes with a mode; None leaves it to the setting ``preemption_mode``. A victim whose
        blocks are all shared with others frees none: it is passed over as long as there are others.

        Args:
            view: the state now.
            beneficiary: the running request that needs a block; it may name itself.
            candidates: running requests that may be preempted, in order of admission.

        The default takes the most recently admitted.
        """
        return ((request_id, None) for request_id in reversed(candidates))

    def on_progress(self, view: SchedulerView, progress: Sequence[Progress]) -> None:
        """A step was carried out."""

    def on_preempt(self, view: SchedulerView, request_id: str, mode: PreemptionMode) -> None:
        """A request lost its device blocks, in the mode that was possible."""

    def on_finish(self, view: SchedulerView, request_id: str) -> None:
        """A request ended or was aborted."""
