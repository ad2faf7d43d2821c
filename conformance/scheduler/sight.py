"""What the judges of a story look at: the requests, the blocks, and whom they tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...core.block_manager import BlockManager
from ...core.request import Request
from ...core.scheduler import Scheduler
from ..stateful.laws import StatefulLaw
from .policy import ProbingPolicy
from .world import World

Law = type[StatefulLaw]


class Checker(Protocol):
    """Takes what is found: the machine, or a replay."""

    def check(self, law: Law, holds: bool, message: Callable[[], str]) -> bool:
        """A law holds or not; False only for a law that is known to be broken."""

    def demand(self, law: Law, holds: bool, message: Callable[[], str]) -> None:
        """A law without which the story cannot go on."""

    def covered(self, axis: str, value: str) -> None:
        """Something occurred."""

    def checked_failure(self) -> None:
        """A failure of the policy came through as it should."""


@dataclass
class Before:
    """How requests stood at some time.

    Attributes:
        computed: tokens in the cache, by id.
        left: tokens to compute, by id.
        resident: ids of those with device blocks.
        swapped: ids of those with host blocks.
    """

    computed: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)
    swapped: set[str] = field(default_factory=set)

    def where(self, name: str) -> str:
        """In which memory a request has its blocks."""
        if name in self.resident:
            return "the device"
        return "the host" if name in self.swapped else "neither memory"


class Sight:
    """The parts of one story, and its requests.

    Attributes:
        live: the story's requests, by id, in order of arrival.
        known: the tokens of each, as the model knows them.
        started: ids of those that have held blocks.
        has_groups: whether any prompt has several completions.
        born: ids of requests that got device blocks in ``update``, and that no plan has told of.
        preempted_times: preemptions, by id.
        preemptions_in_all: preemptions of all requests, those that have ended included.
        swaps_in_all: those of them that moved blocks to host memory.
        cached: leading tokens that were found at the first admission, by id.
        standing: how the requests stood after the last call.
    """

    def __init__(
        self,
        world: World,
        scheduler: Scheduler,
        manager: BlockManager,
        policy: ProbingPolicy,
        checker: Checker,
        fcfs: bool,
    ) -> None:
        self.world = world
        self.scheduler = scheduler
        self.manager = manager
        self.policy = policy
        self.checker = checker
        self.fcfs = fcfs
        self.live: dict[str, Request] = {}
        self.known: dict[str, list[int]] = {}
        self.started: set[str] = set()
        self.has_groups = False
        self.born: set[str] = set()
        self.preempted_times: Counter[str] = Counter()
        self.preemptions_in_all = 0
        self.swaps_in_all = 0
        self.cached: dict[str, int] = {}
        self.standing = Before()

    def table(self, name: str) -> tuple[int, ...] | None:
        """A request's block table; None if it holds no device blocks."""
        try:
            return tuple(self.manager.block_table(name).tolist())
        except KeyError:
            return None

    def holds(self, name: str) -> bool:
        """Whether a request holds device blocks."""
        try:
            self.manager.block_table(name)
        except KeyError:
            return False
        return True

    def look(self) -> Before:
        """How the requests stand."""
        seen = Before()
        for name, request in self.live.items():
            seen.computed[name] = request.num_computed_tokens
            seen.left[name] = request.num_tokens_to_compute
            if self.holds(name):
                seen.resident.add(name)
            elif self.manager.is_swapped(name):
                seen.swapped.add(name)
        return seen
