"""The built-in scheduler with the default block manager, in tiny worlds, under any policy.

A simulated KV cache stands beside them: each step writes tokens into the slots that the block
tables name and reads them back before a token is sampled, so that a lost, shared or repeated slot
shows. Behaviours: S1 to S10, S14 to S20, S22 to S25, S34, S40.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.scheduler_wishes import (
    PARAMS,
    Wish,
    WishfulPolicy,
    make_request,
    sizes,
    token_of,
    wishes,
)

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.errors import RequestError
from jackfield.core.paged_block_manager import PagedBlockManager
from jackfield.core.request import FinishReason, Request
from jackfield.core.scheduler import SchedulerConfig, StepPlan
from jackfield.core.scheduling_policy import Proposal
from jackfield.schedulers.queue_scheduler import QueueScheduler


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order; after each step every rule is checked."""

    scheduler_class: type[QueueScheduler] = QueueScheduler
    manager_class: type[PagedBlockManager] = PagedBlockManager
    only_default_policy = False

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        draw = Random(seed)  # spreads the worlds more evenly than separate draws
        chunked = draw.random() < 0.7
        self.manager_config = BlockManagerConfig(
            num_blocks=draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]),
            block_size=draw.randint(1, 4),
            max_model_len=20,
            watermark=draw.choice([0.0, 0.0, 0.2, 0.5]),
        )
        self.config = SchedulerConfig(
            max_num_batched_tokens=draw.randint(1, 8),
            max_num_seqs=draw.choice([1, 2, 3, 4, 4]),
            max_model_len=20,
            long_prefill_token_threshold=draw.choice([None, 1, 2, 4]) if chunked else None,
            enable_chunked_prefill=chunked,
        )
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self.plans: list[StepPlan] = []
        self.build()
        self.num_added = 0
        self.live: dict[str, Request] = {}
        self.cache: dict[tuple[int, int], int] = {}
        self.first_admissions: list[str] = []
        self.preemptions_since_event = 0
        self.num_preemptions = 0

    def build(self) -> None:
        self.manager = self.manager_class(self.manager_config)
        self.policy = WishfulPolicy()
        self.scheduler = self.scheduler_class(self.config, self.manager, self.policy)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 6))
    def add_what_fits(self, seed: int, count: int) -> None:
        draw = Random(seed)
        slots = self.manager_config.num_blocks * self.manager_config.block_size
        longest = min(self.config.max_model_len, slots + 1)
        for _ in range(count):
            prompt = min(draw.randint(1, 8), longest - 1)
            if not self.config.enable_chunked_prefill:
                prompt = min(prompt, self.config.max_num_batched_tokens)
            self.add(prompt, min(draw.randint(1, 12), longest - prompt))

    @rule(size=sizes)
    def add_anything(self, size: tuple[int, int]) -> None:
        prompt, completion = size
        slots = self.manager_config.num_blocks * self.manager_config.block_size
        if prompt + completion <= min(self.config.max_model_len, slots + 1) and (
            self.config.enable_chunked_prefill or prompt <= self.config.max_num_batched_tokens
        ):
            self.add(prompt, completion)
            return
        before = self.scheduler.stats()
        request = Request("0", range(prompt), PARAMS, 0.0, 0, prompt + completion)
        with pytest.raises(RequestError):  # S10
            self.scheduler.add(request, 0.0)
        assert self.scheduler.stats() == before
        assert self.scheduler.get("0") is None

    def add(self, prompt: int, completion: int) -> None:
        self.num_added += 1
        name, total = str(self.num_added), prompt + completion
        request = make_request(name, prompt, total)
        self.operations.append(("add", (name, prompt, total)))
        self.scheduler.add(request, 0.0)
        self.live[name] = request
        self.preemptions_since_event = 0

    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        name = [*self.live, "0"][index % (len(self.live) + 1)]
        self.operations.append(("finish", (name,)))
        assert self.scheduler.finish(name) == (name in self.live)
        assert not self.scheduler.finish(name)
        if self.live.pop(name, None) is not None:
            assert self.policy.finished[-1] == name
            self.preemptions_since_event = 0

    @precondition(lambda self: self.live)
    @rule(wish=wishes, count=st.integers(2, 8))
    def steps(self, wish: Wish, count: int) -> None:
        for _ in range(count):
            self.run_step(Wish() if self.only_default_policy else wish)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 5))
    def abort_in_flight(self, index: int) -> None:
        self.run_step(Wish(), [*self.live, None][index % (len(self.live) + 1)])

    def run_step(self, wish: Wish, aborted: str | None = None) -> None:
        self.operations.append(("step", (wish, aborted)))
        self.policy.wish = wish
        computed = {name: request.num_computed_tokens for name, request in self.live.items()}
        waited = self.waiting_ids()
        plan = self.scheduler.schedule(0.0)
        self.plans.append(plan)
        self.check_plan(plan, wish, computed, waited)
        if aborted is not None:
            self.scheduler.finish(aborted)
            del self.live[aborted]
            self.preemptions_since_event = 0
        self.execute(plan)

    def waiting_ids(self) -> list[str]:
        view = self.policy.view  # there since the first arrival
        return [] if view is None else [request.request_id for request in view.waiting()]

    def check_plan(
        self, plan: StepPlan, wish: Wish, computed: dict[str, int], waited: list[str]
    ) -> None:
        config, proposal = self.config, self.policy.proposal
        names = [item.request_id for item in plan.scheduled]
        assert plan.num_tokens <= config.max_num_batched_tokens  # S1
        assert len(set(names)) == len(names)  # S5
        assert set(names) <= set(self.live)
        assert not set(names) & set(plan.preempted)  # S20
        assert list(plan.preempted) == self.policy.preempted
        for item in plan.scheduled:
            self.check_share(item.request_id, item.num_computed_tokens, item.num_new_tokens)
            todo = self.live[item.request_id].num_tokens - item.num_computed_tokens
            assert item.samples == (item.num_new_tokens == todo)  # S9
        for name in plan.preempted:  # S16, S17
            request = self.live[name]
            assert request.num_computed_tokens == 0
            assert name in self.waiting_ids()
            with pytest.raises(KeyError):
                self.manager.block_table(name)
        for name, request in self.live.items():
            if name not in plan.preempted:
                assert request.num_computed_tokens == computed[name]  # S8
        if self.live and not plan.scheduled:  # S23
            assert plan.preempted
            assert set(plan.preempted) == set(self.live)
        if not any("leaves nothing to run" in sentence for sentence in plan.clipped):
            self.check_wishes(plan, proposal, waited)
        admitted = [name for name in names if name in waited]
        self.check_order(plan, wish, waited, admitted)
        self.num_preemptions += len(plan.preempted)

    def check_share(self, name: str, num_computed: int, num_new: int) -> None:
        config, request = self.config, self.live[name]
        todo = request.num_tokens - request.num_computed_tokens
        assert num_computed == request.num_computed_tokens  # S7
        assert 1 <= num_new <= todo  # S3
        if config.long_prefill_token_threshold is not None:
            assert num_new <= config.long_prefill_token_threshold
        if not config.enable_chunked_prefill and num_computed == 0:
            assert num_new == todo or todo > config.max_num_batched_tokens
        num_slots = len(self.manager.block_table(name)) * self.manager_config.block_size
        assert num_computed + num_new <= num_slots  # S15
        assert num_slots < request.num_tokens + self.manager_config.block_size

    def check_wishes(self, plan: StepPlan, proposal: Proposal, waited: list[str]) -> None:
        """S14: a plan is at most what was proposed."""
        shares = {item.request_id: item.num_new_tokens for item in plan.scheduled}
        paused = set(proposal.pause)
        if proposal.admission_order is not None:
            assert set(shares) & set(waited) <= set(proposal.admission_order)
        if proposal.max_admissions is not None:
            assert len(set(shares) & set(waited)) <= max(0, proposal.max_admissions)
        if proposal.token_budget is not None:
            assert plan.num_tokens <= max(1, proposal.token_budget)
        if proposal.prefill_budget is not None:
            prefill = sum(
                share for name, share in shares.items() if self.live[name].num_tokens_to_compute > 1
            )
            assert prefill <= max(0, proposal.prefill_budget)
        if self.config.enable_chunked_prefill:
            for name in set(proposal.grants) & set(shares):
                assert shares[name] <= max(1, proposal.grants[name])
        assert not (set(shares) - set(waited)) & paused

    def check_order(
        self, plan: StepPlan, wish: Wish, waited: list[str], admitted: list[str]
    ) -> None:
        fresh = [name for name in admitted if name not in self.first_admissions]
        self.first_admissions.extend(fresh)
        if wish != Wish():
            return
        if plan.preempted:
            assert not admitted  # S20
        assert admitted == waited[: len(admitted)]  # S25
        if self.only_default_policy:
            arrivals = [int(name) for name in self.first_admissions]
            assert arrivals == sorted(arrivals)
            scheduled = {item.request_id for item in plan.scheduled}
            holders = set(self.live) - set(self.waiting_ids())
            assert holders <= scheduled, "a running request was held up"
            self.preemptions_since_event += len(plan.preempted)
            assert self.preemptions_since_event <= len(self.live)  # S22

    def execute(self, plan: StepPlan) -> None:
        block_size = self.manager_config.block_size
        sampled = {}
        for item in plan.scheduled:
            request = self.live.get(item.request_id)
            if request is None:
                continue
            table = self.manager.block_table(item.request_id)
            tokens = request.token_ids
            end = item.num_computed_tokens + item.num_new_tokens
            for position in range(item.num_computed_tokens, end):
                slot = int(table[position // block_size]), position % block_size
                self.cache[slot] = tokens[position]
        for item in plan.scheduled:
            request = self.live.get(item.request_id)
            if request is None or not item.samples:
                continue
            table = self.manager.block_table(item.request_id)
            read = [
                self.cache[int(table[position // block_size]), position % block_size]
                for position in range(request.num_tokens)
            ]
            assert read == request.token_ids  # S7, S16
            sampled[item.request_id] = token_of(item.request_id, request.num_tokens)
        self.policy.progress.clear()
        planned = {item.request_id: item for item in plan.scheduled}
        finished = self.scheduler.update(plan, sampled, 0.0)
        assert [(p.request_id, p.num_computed, p.num_generated) for p in self.policy.progress] == [
            (item.request_id, item.num_new_tokens, int(item.samples))
            for item in plan.scheduled
            if item.request_id in self.live
        ]
        for name in set(planned) & set(self.live):
            item = planned[name]
            reached = item.num_computed_tokens + item.num_new_tokens
            assert self.live[name].num_computed_tokens == reached  # S7
        for name, reason in finished.items():
            request = self.live.pop(name)
            assert reason is FinishReason.LENGTH
            expected = [token_of(name, position) for position in range(request.max_total_tokens)]
            assert request.token_ids == expected  # S16
            self.preemptions_since_event = 0
        assert self.policy.finished[len(self.policy.finished) - len(finished) :] == list(finished)

    @invariant()
    def queues_agree(self) -> None:
        if not hasattr(self, "scheduler") or self.policy.view is None:
            return
        stats, view = self.scheduler.stats(), self.policy.view
        waiting = self.waiting_ids()
        running = [request.request_id for request in view.running()]
        assert sorted(waiting + running) == sorted(self.live)  # S4
        assert waiting == sorted(  # preempted ones in front, each group in order of arrival
            waiting, key=lambda name: (self.live[name].num_preemptions == 0, int(name))
        )
        assert stats.waiting == view.num_waiting == len(waiting)
        assert stats.running + stats.paused == view.num_running == len(running)
        assert len(running) <= self.config.max_num_seqs  # S2
        assert stats.num_preemptions == self.num_preemptions
        assert self.scheduler.has_unfinished() == bool(self.live)
        held = sum(len(self.manager.block_table(name)) for name in running)
        assert self.manager.usage().used == held
        for name, request in self.live.items():
            assert self.scheduler.get(name) is request
            assert request.num_computed_tokens < request.num_tokens  # S8
            assert view.num_blocks_of(name) > 0 or name in waiting  # S6

    def drain_bound(self) -> int:
        """S24: work of each request, repeated for each preemption that can happen."""
        totals = [request.max_total_tokens for request in self.live.values()]
        preemptions = sum(totals) * (self.config.max_num_seqs + 1)
        return sum(totals) + preemptions * (1 + max(totals, default=0))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        wish = self.policy.wish
        for _ in range(self.drain_bound()):
            if not self.live:
                break
            self.run_step(wish)
            self.queues_agree()
        assert not self.live, "requests are left after the bound"
        usage = self.manager.usage()
        assert (usage.used, usage.free) == (0, usage.total)
        self.check_replay()

    def check_replay(self) -> None:
        """S34: the same calls lead to the same plans."""
        plans = self.plans
        self.build()
        replayed = []
        for operation, arguments in self.operations:
            if operation == "add":
                self.scheduler.add(make_request(*arguments), 0.0)
            elif operation == "finish":
                self.scheduler.finish(*arguments)
            else:
                self.policy.wish, aborted = arguments
                plan = self.scheduler.schedule(0.0)
                replayed.append(plan)
                if aborted is not None:
                    self.scheduler.finish(aborted)
                sampled = {item.request_id: 7 for item in plan.scheduled}  # other values
                self.scheduler.update(plan, sampled, 0.0)
        assert replayed == plans


class DefaultPolicyMachine(SchedulerMachine):
    """First come, first served: the order of admission and the bound on preemptions hold too."""

    only_default_policy = True
