"""The scheduler contract: which tokens of which requests are computed in the next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, NamedTuple

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
        preemption_mode: what becomes of a victim whose mode the policy leaves open: it is computed
            anew, it is moved to host memory, or (``auto``) the scheduler decides for each.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool = True
    strict_policy: bool = False
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"


class ScheduledRequest(NamedTuple):
    """One request's share of a step; a tuple, because every step makes one for every request.

    Attributes:
        request_id: whose.
        num_computed_tokens: tokens in the cache before the step.
        num_new_tokens: tokens to compute now, at least 1.
        samples: whether the last of them is the request's last known token, so that the step
            yields its next token.
        writes: whether their keys and values go into the cache. False for the last prompt token
            of a request that was forked when its prompt had been computed: they are there, in a
            block that others read, and only the logits are wanted.
    """

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool
    writes: bool = True


class MoveKind(Enum):
    """Between which memories a move copies blocks: source first."""

    COPY = "device to device"
    SWAP_OUT = "device to host"
    SWAP_IN = "host to device"


class KVMove(NamedTuple):
    """The block copies that one call of the block manager asked for.

    Attributes:
        kind: which pools the block ids belong to.
        copies: in any order among themselves: no source is a destination too.
    """

    kind: MoveKind
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything decided for one step: plain data, no tensors.

    Attributes:
        step: counts from 0.
        scheduled: who computes how much, in batch order.
        preempted: who lost its device blocks in this step, and is in no batch.
        swapped_out: those of them whose blocks went to host memory; the others are computed anew.
        swapped_in: who has its blocks back from host memory.
        forked: pairs (parent, child) of requests that have shared blocks since the last plan.
        prefix_hits: admitted requests with the number of tokens that they found in the cache.
        moves: contents of blocks to be moved before anything is computed, in this order, even if
            nothing is scheduled.
        clipped: what a policy proposed and did not get, one sentence each.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...] = ()
    swapped_out: tuple[str, ...] = ()
    swapped_in: tuple[str, ...] = ()
    forked: tuple[tuple[str, str], ...] = ()
    prefix_hits: tuple[tuple[str, int], ...] = ()
    moves: tuple[KVMove, ...] = ()
    clipped: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, all requests together."""
        return sum(item.num_new_tokens for item in self.scheduled)

    def num_copies(self, kind: MoveKind) -> int:
        """Blocks that the moves of one kind copy."""
        return sum(len(move.copies) for move in self.moves if move.kind is kind)


@dataclass(frozen=True)
class SchedulerStats:
    """Where the requests stand.

    Attributes:
        running: hold blocks and compute.
        waiting: hold no blocks.
        swapped: have their blocks in host memory.
        paused: hold blocks and were held back in the last step.
        num_preemptions: since the start, of either mode.
        num_swaps: those of them that moved blocks to host memory.
    """

    running: int
    waiting: int
    swapped: int = 0
    paused: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0


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
