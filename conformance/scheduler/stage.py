"""Where a story takes place: a scheduler with its parts, and the requests so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.request import Request
from ...core.scheduler import StepPlan
from . import laws
from .order import OrderJudge
from .policy import ProbingPolicy
from .sight import Checker
from .telling import Telling
from .world import Operation, Subject, World


class Stage:
    """The parts of one story.

    Attributes:
        operations: what was done so far.
        log: what came of it, one entry for each call; two tellings must agree on it.
        lines: what came of each operation, in words.
        live: requests that have not ended, by id, in order of arrival.
        judged: whether laws are checked; a story that is told again only has to leave its log.

    Args:
        subject: the parts.
        world: their sizes.
        checker: takes what is found.
        telling: how it is told.
    """

    def __init__(
        self, subject: Subject, world: World, checker: Checker, telling: Telling | None = None
    ) -> None:
        self.world = world
        self.checker = checker
        self.operations: list[Operation] = []
        self.log: list[Any] = []
        self.lines: list[str] = []
        self.telling = telling or Telling()
        self.judged = True
        self.clock = 0.0
        self.num_added = 0
        self.expected: dict[str, list[int]] = {}
        self.manager = subject.manager(world.manager_config(), subject.manager_options)
        inner = subject.policy(subject.policy_options)
        self.policy = ProbingPolicy(inner, self.manager, world.mode)
        self.scheduler = subject.scheduler(
            world.scheduler_config(), self.manager, self.policy, subject.options
        )
        fcfs = "fcfs" in subject.powers
        self.judge = OrderJudge(world, self.scheduler, self.manager, self.policy, checker, fcfs)
        self.live = self.judge.live

    @property
    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.telling.start + self.clock

    @property
    def longest(self) -> int:
        """Most tokens of a request that must be taken; the last of them is never computed."""
        return min(self.world.max_model_len, int(self.manager.largest_request()) + 1)

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Exception | None:
        """Make a call that may be refused; what it raised."""
        try:
            function(*arguments)
        except Exception as error:
            return error
        return None

    def right(self, method: str, *arguments: Any) -> Any:
        """Make a call that must not raise; what it returned."""
        value: Any = None
        error: Exception | None = None
        try:
            value = getattr(self.scheduler, method)(*arguments)
        except Exception as raised:
            error = raised
        self.checker.demand(
            laws.Errors,
            error is None,
            lambda: f"{method}({', '.join(map(repr, arguments))}) raised {said(error)}",
        )
        return value

    def joined(self, request: Request) -> None:
        """A request has been taken."""
        name = request.request_id
        self.num_added += 1
        self.live[name] = request
        self.expected[name] = self.telling.alone(request)
        self.judge.known[name] = list(request.prompt_token_ids)
        self.judge.cached.pop(name, None)
        self.judge.preempted_times.pop(name, None)
        self.judge.started.discard(name)

    def told_of_ends(self, names: list[str]) -> None:
        """The policy was told of these ends, each once."""
        told = list(self.policy.finished)
        self.checker.check(
            laws.Told,
            sorted(told) == sorted(names),
            lambda: f"on_finish was told of {told}, ended have {names}",
        )


def said(error: Exception | None) -> str:
    """An error in words."""
    return "nothing" if error is None else f"{type(error).__name__}: {error}"


def plan_line(plan: StepPlan) -> str:
    """A plan in words."""
    shares = " ".join(
        f"{one.request_id}:{one.num_computed_tokens}+{one.num_new_tokens}" for one in plan.scheduled
    )
    parts = [shares or "nothing scheduled"]
    for what in ("preempted", "swapped_out", "swapped_in", "forked", "prefix_hits", "clipped"):
        if getattr(plan, what):
            parts.append(f"{what} {list(getattr(plan, what))}")
    return ", ".join(parts)
