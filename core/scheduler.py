"""The scheduler contract: which tokens of which requests are computed in the next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .block_manager import BlockCopy, BlockManager
from .options import NoOptions, PartOptions
from .request import FinishReason, Request
from .scheduling_policy import SchedulingPolicy


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits that hold whatever a policy proposes.

    Attributes:
        max_num_batched_tokens: most tokens of one step, all requests together.
        max_num_seqs: most requests that hold blocks at a time.
        max_model_len: most tokens of one request.
        long_prefill_token_threshold: most tokens of one request in one step (its chunk); None is
            no limit of its own.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        strict_policy: raise, instead of clipping, when a policy proposes the impossible.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool = True
    strict_policy: bool = False


class ScheduledRequest(NamedTuple):
    """One request's share of a step; a tuple, because every step makes one for every request.

    Attributes:
        request_id: whose.
        num_computed_tokens: tokens in the cache before the step.
        num_new_tokens: tokens to compute now, at least 1.
        samples: whether the last of them is the request's last known token, so that the step
            yields its next token.
    """

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything decided for one step: plain data, no tensors.

    Attributes:
        step: counts from 0.
        scheduled: who computes how much, in batch order.
        preempted: who lost its blocks in this step, and is in no batch.
        copies: block copies to be done before anything is computed.
        clipped: what a policy proposed and did not get, one sentence each.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    clipped: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, all requests together."""
        return sum(item.num_new_tokens for item in self.scheduled)


@dataclass(frozen=True)
class SchedulerStats:
    """Where the requests stand.

    Attributes:
        running: hold blocks and compute.
        waiting: hold no blocks.
        swapped: have their blocks in host memory.
        paused: hold blocks and were held back in the last step.
        num_preemptions: since the start.
    """

    running: int
    waiting: int
    swapped: int = 0
    paused: int = 0
    num_preemptions: int = 0


class Scheduler(ABC):
    """Decides step by step; owns the requests' progress and the calls to the block manager.

    It reads no clock (the engine passes ``now``) and draws no random numbers, and its decisions
    depend on counts of tokens, never on their values.
    """

    name: ClassVar[str]
    Options: ClassVar[type[PartOptions]] = NoOptions

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.policy = policy
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def add(self, request: Request, now: float) -> None:
        """Take a request.

        Raises:
            RequestError: its id is in use, the policy rejects it, or it can never fit; nothing
                has changed then.
        """

    @abstractmethod
    def finish(self, request_id: str) -> bool:
        """End a request from outside (abort, stop string) and give back all it holds.

        Returns:
            False if no such request is live, which is no error.
        """

    @abstractmethod
    def schedule(self, now: float) -> StepPlan:
        """Plan the next step and reserve its slots.

        An empty ``scheduled`` means that nothing can run now.

        Raises:
            PluginError: the policy failed, or proposed the impossible under ``strict_policy``.
        """

    @abstractmethod
    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], now: float
    ) -> Mapping[str, FinishReason]:
        """Take note that a plan was carried out.

        Args:
            plan: what ``schedule`` returned. Requests that have ended since are skipped.
            sampled: the new token of every request that samples.
            now: seconds on the engine's clock.

        Returns:
            The requests that have ended by it, with the reason; their blocks are free.

        Raises:
            ValueError: a live request that samples has no token in ``sampled``.
            PluginError: the policy failed when it was told; the step has been noted all the same.
        """

    @abstractmethod
    def get(self, request_id: str) -> Request | None:
        """The live request of this id."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Where the requests stand; constant time."""

    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        stats = self.stats()
        return bool(stats.running or stats.waiting or stats.swapped or stats.paused)
