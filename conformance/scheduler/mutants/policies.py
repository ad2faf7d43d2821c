"""Mutants of what a policy sees, proposes, and may break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from ....core.block_manager import BlockManager
from ....core.options import PartOptions
from ....core.request import Request
from ....core.scheduler import SchedulerConfig, StepPlan
from ....core.scheduling_policy import Proposal, RequestView, SchedulingPolicy
from ..plain_limits import Guard, Limits, PlainView
from ..plain_scheduler import PlainScheduler
from .registry import mutant

T = TypeVar("T")


class _OpenView(PlainView):
    def look(self, request: Request) -> RequestView:
        return cast(RequestView, request)


@mutant("view_can_be_written", "A policy gets the requests themselves.")
class _ViewWritten(PlainScheduler):
    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        self.view = _OpenView(self)
        self.guard = Guard(policy, self.view, config.strict_policy)


class _TurningView(PlainView):
    def waiting(self) -> Iterator[RequestView]:
        queue = self._scheduler.waiting
        queue[:] = [*queue[1:], *queue[:1]]
        return super().waiting()


@mutant("looking_changes_the_queue", "Whoever looks at the waiting requests turns the queue.")
class _LookingChanges(PlainScheduler):
    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        self.view = _TurningView(self)
        self.guard = Guard(policy, self.view, config.strict_policy)


class _OpenGuard(Guard):
    def call(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)


class _Guarded(PlainScheduler):
    guard_class: type[Guard] = Guard

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        self.guard = self.guard_class(policy, self.view, config.strict_policy)


@mutant("policy_errors_not_attributed", "What a policy raises comes out as it is.")
class _NotAttributed(_Guarded):
    guard_class = _OpenGuard


class _SilentGuard(Guard):
    def report(self, sentence: str) -> None:
        pass


@mutant("clipping_not_reported", "What a policy does not get is not reported.")
class _NotReported(_Guarded):
    guard_class = _SilentGuard


class _LenientGuard(Guard):
    def report(self, sentence: str) -> None:
        self.clipped.append(sentence)


@mutant("strict_policy_ignored", "With strict_policy proposals are clipped and nothing is raised.")
class _StrictIgnored(_Guarded):
    guard_class = _LenientGuard


class _ForgivingGuard(Guard):
    def propose(self) -> Proposal:
        try:
            return super().propose()
        except Exception:
            return Proposal()


@mutant("policy_errors_swallowed", "A policy that fails counts as one that proposes nothing.")
class _Swallowed(_Guarded):
    guard_class = _ForgivingGuard


@mutant("failed_step_loses_requests", "A step in which the policy fails empties the queue.")
class _LosesRequests(PlainScheduler):
    def schedule(self, now: float) -> StepPlan:
        try:
            return super().schedule(now)
        except Exception:
            self.waiting.clear()
            raise


@mutant("failed_step_forgets_progress", "A step in which the policy fails resets running requests.")
class _ForgetsProgress(PlainScheduler):
    def schedule(self, now: float) -> StepPlan:
        try:
            return super().schedule(now)
        except Exception:
            for name in self.running:
                self.live[name].num_computed_tokens = 0
            raise


@mutant("pause_ignored", "A request that the policy pauses gets its tokens.")
class _PauseIgnored(PlainScheduler):
    def fill(self, limits: Limits) -> None:
        super().fill(replace(limits, pause=()))


@mutant("admissions_not_limited", "max_admissions is ignored.")
class _AdmissionsNotLimited(PlainScheduler):
    def admit(self, limits: Limits) -> None:
        super().admit(replace(limits, max_admissions=10))


@mutant("token_budget_ignored", "The policy's token_budget is ignored.")
class _BudgetIgnored(PlainScheduler):
    def fill(self, limits: Limits) -> None:
        super().fill(replace(limits, token_budget=self.config.max_num_batched_tokens))


@mutant("left_out_are_admitted", "Waiting requests that the policy left out are admitted too.")
class _LeftOut(PlainScheduler):
    def admit(self, limits: Limits) -> None:
        super().admit(limits)
        super().admit(replace(limits, admission_order=None))


@mutant("grants_ignored", "The policy's chunk sizes are ignored.")
class _GrantsIgnored(PlainScheduler):
    def share(self, name: str, left: int, limits: Limits) -> int:
        return super().share(name, left, replace(limits, grants={}))


@mutant("victims_not_asked", "The policy is not asked for victims.")
class _NotAsked(PlainScheduler):
    def policy_victims(self, name: str) -> Iterable[tuple[str, Any]]:
        running: Sequence[str] = self.running[:1]
        return ((victim, None) for victim in running)


@mutant("proposed_preemption_ignored", "Proactive preemptions are not done.")
class _PreemptionIgnored(PlainScheduler):
    def schedule(self, now: float) -> StepPlan:
        original = self.preempt
        self.preempt = lambda name, wished: (  # type: ignore[method-assign]
            original(name, wished) if self.out_of_blocks else None
        )
        try:
            return super().schedule(now)
        finally:
            del self.preempt


@mutant("named_first_are_left_out", "Whom the policy names first gets nothing if others run.")
class _LeftOutFirst(PlainScheduler):
    def in_turn(self, limits: Limits) -> list[str]:
        names = super().in_turn(limits)
        return names[len(limits.running_order) :] or names


@mutant("prefill_budget_ignored", "The policy's prefill_budget is ignored.")
class _PrefillIgnored(PlainScheduler):
    def fill(self, limits: Limits) -> None:
        super().fill(replace(limits, prefill_budget=self.config.max_num_batched_tokens))


@mutant("left_out_come_back", "Swapped requests that the policy left out come back too.")
class _ComeBack(PlainScheduler):
    def resume(self, limits: Limits) -> bool:
        return super().resume(replace(limits, resume_order=None))


class _CountingView(PlainView):
    def match_prefix(self, request_id: str) -> int:
        found = super().match_prefix(request_id)
        request, manager = self._scheduler.live[request_id], self._scheduler.block_manager
        if found and manager.allocate("probe", request.token_ids, found) is not None:
            manager.free("probe")
        return found


@mutant("probes_are_counted", "A probe for prefixes counts as an admission.")
class _ProbesCounted(PlainScheduler):
    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(config, block_manager, policy, options)
        self.view = _CountingView(self)
        self.guard = Guard(policy, self.view, config.strict_policy)
