"""What a plan must be, whatever policy stands behind it."""

from __future__ import annotations

from ...core.scheduler import ScheduledRequest, StepPlan
from ...core.scheduling_policy import PreemptionMode
from . import laws
from .inspection import Inspection
from .sight import Before


class Judge(Inspection):
    """Checks the plans of one story."""

    def judge(self, plan: StepPlan, before: Before) -> None:
        """Check a plan, before anything of it is carried out."""
        self._batch(plan)
        for name in self.live:
            self.same_tokens(name)
        self._preempted(plan, before)
        self._hits(plan, before)
        self.standing = after = self.look()
        for item in plan.scheduled:
            self._share(item, plan, before)
        for name, request in self.live.items():
            expected = self._expected(name, plan, before)
            self.checker.demand(
                laws.Computed,
                request.num_computed_tokens == expected,
                lambda name=name, request=request, expected=expected: (  # type: ignore[misc]
                    f"num_computed_tokens of {name!r} is {request.num_computed_tokens}, and should "
                    f"be {expected}: it was {before.computed[name]} before the step"
                ),
            )
        self.checker.check(
            laws.Progress,
            bool(plan.scheduled or plan.preempted or not self.live),
            lambda: f"nothing is scheduled, although {list(self.live)} are live",
        )
        self.transitions(plan, before, after)
        self._forked(plan)
        self._first_admissions(plan, after)
        modes = {True: PreemptionMode.SWAP, False: PreemptionMode.RECOMPUTE}
        self.count((name, modes[name in plan.swapped_out]) for name in plan.preempted)
        self.started |= after.resident
        for what, some in (
            ("preempted", plan.preempted),
            ("swapped out", plan.swapped_out),
            ("swapped in", plan.swapped_in),
            ("forked", plan.forked),
            ("prefix hit", plan.prefix_hits),
            ("clipped", plan.clipped),
        ):
            if some:
                self.checker.covered("plan", what)

    def _batch(self, plan: StepPlan) -> None:
        names = [item.request_id for item in plan.scheduled]
        self.checker.demand(
            laws.Once,
            len(set(names)) == len(names) and set(names) <= self.live.keys(),
            lambda: f"the step schedules {names}, live are {list(self.live)}",
        )
        self.checker.check(
            laws.Budget,
            plan.num_tokens <= self.world.budget,
            lambda: f"{plan.num_tokens} tokens are scheduled, the budget is {self.world.budget}",
        )
        both = sorted(set(names) & set(plan.preempted))
        self.checker.demand(
            laws.NotBoth, not both, lambda: f"{both} are preempted and scheduled in one step"
        )

    def _expected(self, name: str, plan: StepPlan, before: Before) -> int:
        if name in plan.preempted and name not in plan.swapped_out:
            return 0
        return dict(plan.prefix_hits).get(name, before.computed[name])

    def _preempted(self, plan: StepPlan, before: Before) -> None:
        check, told = self.checker.check, self.policy.preempted
        check(
            laws.Told,
            [name for name, _ in told] == list(plan.preempted)
            and [name for name, mode in told if mode.value == "swap"] == list(plan.swapped_out),
            lambda: (
                f"the plan preempts {plan.preempted} and swaps {plan.swapped_out} of them; "
                f"the policy was told of {told}"
            ),
        )
        twice = len(set(plan.preempted)) != len(plan.preempted)
        self.checker.demand(
            laws.Victims,
            not twice and set(plan.preempted) <= before.resident | set(plan.swapped_in),
            lambda: (
                f"{plan.preempted} are preempted; only {sorted(before.resident)} held blocks, and "
                "each can lose them once"
            ),
        )
        for name in plan.preempted:
            kept = name in plan.swapped_out
            where = self.holds(name), self.manager.is_swapped(name)
            self.checker.demand(
                laws.Release,
                where == (False, kept),
                lambda name=name, kept=kept, where=where: (  # type: ignore[misc]
                    f"{name!r} is preempted{' and swapped' if kept else ''}; it has device blocks: "
                    f"{where[0]}, host blocks: {where[1]}"
                ),
            )
            if name in self.policy.proposal.preempt:
                continue
            check(
                laws.Victims,
                name in self.policy.offered or self.policy.exhausted,
                lambda name=name: (  # type: ignore[misc]
                    f"{name!r} gave way, whom the policy had not named; it named "
                    f"{list(self.policy.offered)} so far"
                ),
            )

    def _hits(self, plan: StepPlan, before: Before) -> None:
        for name, hit in plan.prefix_hits:
            request = self.live.get(name)
            self.checker.demand(
                laws.LastToken,
                request is not None and 0 < hit < request.num_tokens,
                lambda name=name, hit=hit: (  # type: ignore[misc]
                    f"a hit of {hit} tokens is reported for {name!r}, which has "
                    f"{self.live[name].num_tokens if name in self.live else 'ended'}"
                ),
            )
            self.checker.demand(
                laws.Chunks,
                name not in before.resident | before.swapped,
                lambda name=name: f"{name!r} has a prefix hit and held blocks before",  # type: ignore[misc]
            )

    def _share(self, item: ScheduledRequest, plan: StepPlan, before: Before) -> None:
        demand, world, name = self.checker.demand, self.world, item.request_id
        request, expected = self.live[name], self._expected(name, plan, before)
        start, count = item.num_computed_tokens, item.num_new_tokens
        demand(
            laws.Chunks,
            start == expected == request.num_computed_tokens,
            lambda: f"the share of {name!r} begins at {start}; {expected} tokens are in the cache",
        )
        left = request.num_tokens - start
        chunk = left if world.chunk is None or left == 1 else world.chunk
        demand(
            laws.Shares,
            1 <= count <= min(left, chunk),
            lambda: f"{name!r} gets {count} tokens; it has {left} left, and a chunk is {chunk}",
        )
        if not world.chunked and name not in before.resident and name not in before.swapped:
            self.checker.check(
                laws.Shares,
                count == left or left > world.budget,
                lambda: (
                    f"{name!r} gets {count} of {left} tokens, and enable_chunked_prefill is off"
                ),
            )
        self.checker.check(
            laws.Sampling,
            item.samples == (count == left),
            lambda: f"{name!r} gets {count} of {left} tokens, and samples is {item.samples}",
        )
        table = self.table(name)
        slots = 0 if table is None else len(table) * world.block_size
        needed = max(start + count, min(start + count + world.lookahead, world.max_model_len))
        demand(
            laws.Slots,
            slots >= needed,
            lambda: f"{name!r} needs {needed} slots, and its block table has {slots}",
        )

    def _forked(self, plan: StepPlan) -> None:
        """Forks are told once, in the next plan, and are among completions of one prompt."""
        told = [child for _, child in plan.forked if child in self.live]
        born = sorted(self.born & self.live.keys())
        strangers = [
            child
            for parent, child in plan.forked
            if {parent, child} <= self.live.keys()
            and self.live[parent].parent_id != self.live[child].parent_id
        ]
        self.checker.check(
            laws.Forks,
            sorted(told) == born and not strangers,
            lambda: (
                f"the plan tells of the forks {plan.forked}; {born} got blocks since the last plan "
                "without an admission, and only completions of one prompt share it"
            ),
        )
        self.born.clear()

    def _first_admissions(self, plan: StepPlan, after: Before) -> None:
        hits = dict(plan.prefix_hits)
        for name in after.resident - self.started:
            self.cached[name] = hits.get(name, 0)
