"""What becomes of a policy's proposal: all of it, or what the plan says is missing."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.scheduler import StepPlan
from ...core.scheduling_policy import Proposal
from . import laws
from .judge import Judge
from .policy import BOGUS, NO_WISH
from .sight import Before

Rules = Iterator[tuple[bool, str]]


class ProposalJudge(Judge):
    """Compares plans with what was proposed."""

    def judge(self, plan: StepPlan, before: Before) -> None:
        """Check a plan, before anything of it is carried out."""
        started = set(self.started)
        super().judge(plan, before)
        self._impossible(plan, before)
        if self.policy.wish == NO_WISH or plan.clipped:
            return
        for rules in (
            self._budgets(plan, before),
            self._seating(plan, before, started),
            self._running(plan, before),
        ):
            for holds, what in rules:
                self._kept(holds, what, plan)

    def _kept(self, holds: bool, what: str, plan: StepPlan) -> None:
        shares = {item.request_id: item.num_new_tokens for item in plan.scheduled}
        self.checker.check(
            laws.Clipping,
            holds,
            lambda: (
                f"{what}; the plan schedules {shares}, preempts {plan.preempted}, brings back "
                f"{plan.swapped_in}, and reports nothing clipped"
            ),
        )

    def _impossible(self, plan: StepPlan, before: Before) -> None:
        check, strict = self.checker.check, self.world.strict
        check(
            laws.Impossible,
            set(plan.swapped_in) <= before.swapped,
            lambda: f"{plan.swapped_in} are swapped in; swapped were {sorted(before.swapped)}",
        )
        proposal = self.policy.proposal
        if self.policy.wish == NO_WISH or self.policy.fails:
            return
        reasons = [f"the policy named {BOGUS!r}"] * self._names_nobody(proposal)
        reasons += [
            f"{what} was {value}"
            for what, value in (
                ("token_budget", proposal.token_budget),
                ("max_admissions", proposal.max_admissions),
                ("prefill_budget", proposal.prefill_budget),
                ("max_skips", proposal.max_skips),
            )
            if value is not None and value < (what == "token_budget")
        ]
        check(
            laws.Impossible,
            not reasons or (bool(plan.clipped) and not strict),
            lambda: (
                f"{' and '.join(reasons)}, and the plan says nothing of it"
                + (" and nothing was raised, although strict_policy is on" * strict)
            ),
        )
        check(
            laws.Impossible,
            not (plan.clipped and strict),
            lambda: f"strict_policy is on, and {plan.clipped} was not raised",
        )

    @staticmethod
    def _names_nobody(proposal: Proposal) -> bool:
        named = (*proposal.preempt, *proposal.pause, *proposal.running_order, *proposal.grants)
        return BOGUS in named

    def _budgets(self, plan: StepPlan, before: Before) -> Rules:
        wishes = self.policy.proposal
        shares = {item.request_id: item.num_new_tokens for item in plan.scheduled}
        if wishes.token_budget is not None:
            most = wishes.token_budget
            yield plan.num_tokens <= most, f"token_budget is {most}"
        if wishes.prefill_budget is not None:
            most = wishes.prefill_budget
            longer = [share for name, share in shares.items() if self._left(name) > 1]
            yield sum(longer) <= most, f"prefill_budget is {most}"
        if self.world.chunked:
            for name, grant in wishes.grants.items():
                yield shares.get(name, 0) <= grant, f"the grant of {name!r} is {grant}"

    def _seating(self, plan: StepPlan, before: Before, started: set[str]) -> Rules:
        wishes = self.policy.proposal
        held = before.resident | before.swapped
        fresh = [item.request_id for item in plan.scheduled if item.request_id not in held]
        order = self.policy.waiting if wishes.admission_order is None else wishes.admission_order
        names = list(order)
        if wishes.admission_order is not None:
            yield set(fresh) <= set(names), f"only {names} may be admitted"
        if wishes.max_admissions is not None:
            most = wishes.max_admissions
            groups = {self.live[name].parent_id for name in fresh}
            yield len(groups) <= most, f"at most {most} are to be admitted"
        if not self.has_groups:
            last = max((names.index(name) for name in fresh if name in names), default=0)
            over = [name for name in names[:last] if name not in fresh]
            most = wishes.max_skips
            yield len(over) <= most, f"{over} are passed over, and max_skips is {most}"
        if wishes.resume_order is not None:
            names = list(wishes.resume_order)
            yield set(plan.swapped_in) <= set(names), f"only {names} may come back"

    def _running(self, plan: StepPlan, before: Before) -> Rules:
        wishes = self.policy.proposal
        shares = {item.request_id for item in plan.scheduled}
        yield not shares & set(wishes.pause), f"{list(wishes.pause)} are paused"
        missing = set(wishes.preempt) - set(plan.preempted)
        yield not missing, f"{list(wishes.preempt)} are to be preempted"
        others = before.resident - set(wishes.running_order)
        splits = self.world.chunked and wishes.prefill_budget is None
        gone = set(plan.preempted) | set(wishes.pause)
        named = [name for name in wishes.running_order if name not in gone]
        for name in named:
            if splits or before.left[name] == 1:
                yield (
                    name in shares or not shares & others,
                    f"{name!r} is to come before {sorted(shares & others)}",
                )
        if named and splits and not wishes.grants:
            first = named[0]
            most = self.world.budget if wishes.token_budget is None else wishes.token_budget
            most = min(before.left[first], most, self.world.chunk or most)
            got = sum(item.num_new_tokens for item in plan.scheduled if item.request_id == first)
            yield got == most, f"{first!r} is to come first, and could have {most} tokens"

    def _left(self, name: str) -> int:
        return self.live[name].num_tokens_to_compute
