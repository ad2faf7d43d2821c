"""The built-in scheduler with the built-in block managers, in tiny worlds, under any policy.

A simulated KV cache stands beside them: each step moves blocks, writes tokens into the slots that
the block tables name and reads them back before a token is sampled, so that a lost, wrongly shared
or repeated slot shows. Behaviours: S1 to S10, S12, S14 to S25, S34, S40.
"""

from __future__ import annotations

from dataclasses import replace
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
from support.kv_double import SimulatedCache
from support.scheduler_wishes import Arrival, Wish, WishfulPolicy, sizes, token_of, wishes

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.contiguous import ContiguousBlockManager
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.block_managers.radix import RadixBlockManager
from jackfield.core.block_managers.sharing import SharingBlockManager
from jackfield.core.errors import RequestError
from jackfield.core.request import FinishReason, Request
from jackfield.core.scheduler import SchedulerConfig, StepPlan
from jackfield.core.scheduling_policy import PreemptionMode, Proposal
from jackfield.schedulers.queue_scheduler import QueueScheduler


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order; after each step every rule is checked."""

    scheduler_class: type[QueueScheduler] = QueueScheduler
    manager_class: type[SharingBlockManager] = PagedBlockManager
    only_default_policy = False

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        draw = Random(seed)  # spreads the worlds more evenly than separate draws
        chunked = draw.random() < 0.7
        host = draw.choice([0, 0, 2, 4, 12])
        self.manager_config = BlockManagerConfig(
            num_blocks=draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]),
            block_size=draw.randint(1, 4),
            max_model_len=20,
            watermark=draw.choice([0.0, 0.0, 0.2, 0.5]),
            num_host_blocks=host,
            enable_prefix_caching=draw.random() < 0.5,
        )
        modes = ["recompute", "swap", "swap", "auto"] if host else ["recompute", "auto"]
        self.config = SchedulerConfig(
            max_num_batched_tokens=draw.randint(1, 8),
            max_num_seqs=draw.choice([1, 2, 3, 4, 4]),
            max_model_len=20,
            long_prefill_token_threshold=draw.choice([None, 1, 2, 4]) if chunked else None,
            enable_chunked_prefill=chunked,
            preemption_mode=draw.choice(modes),  # type: ignore[arg-type]
        )
        self.make_manager: Any = self.manager_class
        if self.manager_class is PagedBlockManager:
            self.make_manager = draw.choice([PagedBlockManager, RadixBlockManager])
            if draw.random() < 0.1:
                self.manager_config = replace(
                    self.manager_config, num_host_blocks=0, enable_prefix_caching=False
                )
                self.config = replace(self.config, preemption_mode="recompute")
                self.make_manager = ContiguousBlockManager
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self.plans: list[StepPlan] = []
        self.build()
        self.num_added = 0
        self.live: dict[str, Request] = {}
        self.cache = SimulatedCache(self.manager_config.block_size)
        self.first_admissions: list[str] = []
        self.preemptions_since_event = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.has_groups = False

    def build(self) -> None:
        self.manager = self.make_manager(self.manager_config)
        self.policy = WishfulPolicy()
        self.scheduler = self.scheduler_class(self.config, self.manager, self.policy)

    @property
    def longest(self) -> int:
        """Most tokens of a request that is taken; the last of them is never computed."""
        return min(self.config.max_model_len, int(self.manager.largest_request()) + 1)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 6))
    def add_what_fits(self, seed: int, count: int) -> None:
        if self.longest < 2:
            return
        draw = Random(seed)
        for _ in range(count):
            prompt = min(draw.randint(1, 8), self.longest - 1)
            if not self.config.enable_chunked_prefill:
                prompt = min(prompt, self.config.max_num_batched_tokens)
            completion = min(draw.randint(1, 12), self.longest - prompt)
            n = draw.choice([1, 1, 1, 2, 3, 5])
            self.add(prompt, completion, n, draw.choice([1, 1, 1, 2]), draw.choice(["", "", "s"]))

    @rule(size=sizes)
    def add_anything(self, size: tuple[int, int]) -> None:
        prompt, completion = size
        if prompt + completion <= self.longest and (
            self.config.enable_chunked_prefill or prompt <= self.config.max_num_batched_tokens
        ):
            self.add(prompt, completion)
            return
        before = self.scheduler.stats()
        with pytest.raises(RequestError):  # S10
            self.scheduler.add(Arrival("0", 1, prompt, prompt + completion).request(), 0.0)
        assert self.scheduler.stats() == before
        assert self.scheduler.get("0") is None

    def add(self, prompt: int, completion: int, n: int = 1, text: int = 1, salt: str = "") -> None:
        parent = str(self.num_added + 1)
        self.has_groups |= n > 1
        for _ in range(n):
            self.num_added += 1
            name = str(self.num_added)
            arrival = Arrival(name, text, prompt, prompt + completion, parent, n, salt)
            self.operations.append(("add", (arrival,)))
            self.live[name] = arrival.request()
            self.scheduler.add(self.live[name], 0.0)
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
        waited, swapped = self.waiting_ids(), self.swapped_ids()
        plan = self.scheduler.schedule(0.0)
        self.plans.append(plan)
        self.cache.move(plan.moves)
        self.check_plan(plan, wish, computed, waited, swapped)
        if aborted is not None:
            self.scheduler.finish(aborted)
            del self.live[aborted]
            self.preemptions_since_event = 0
        self.execute(plan)

    def waiting_ids(self) -> list[str]:
        view = self.policy.view  # there since the first arrival
        return [] if view is None else [request.request_id for request in view.waiting()]

    def swapped_ids(self) -> list[str]:
        view = self.policy.view
        return [] if view is None else [request.request_id for request in view.swapped()]

    def check_plan(
        self,
        plan: StepPlan,
        wish: Wish,
        computed: dict[str, int],
        waited: list[str],
        swapped: list[str],
    ) -> None:
        config, proposal = self.config, self.policy.proposal
        names = [item.request_id for item in plan.scheduled]
        assert plan.num_tokens <= config.max_num_batched_tokens  # S1
        assert len(set(names)) == len(names)  # S5
        assert set(names) <= set(self.live)
        assert not set(names) & set(plan.preempted)  # S20
        modes = {True: PreemptionMode.SWAP, False: PreemptionMode.RECOMPUTE}
        told = [(name, modes[name in plan.swapped_out]) for name in plan.preempted]
        assert told == self.policy.preempted
        for item in plan.scheduled:
            self.check_share(item.request_id, item.num_computed_tokens, item.num_new_tokens)
            todo = self.live[item.request_id].num_tokens - item.num_computed_tokens
            assert item.samples == (item.num_new_tokens == todo)  # S9
        for name in plan.preempted:  # S16, S17
            request, keeps = self.live[name], name in plan.swapped_out
            assert request.num_computed_tokens == (computed[name] if keeps else 0)
            assert (name in self.swapped_ids()) == keeps
            assert self.manager.is_swapped(name) == keeps
            with pytest.raises(KeyError):
                self.manager.block_table(name)
        for name, request in self.live.items():
            if name not in plan.preempted:
                expected = dict(plan.prefix_hits).get(name, computed[name])
                assert request.num_computed_tokens == expected  # S8
        for name, hit in plan.prefix_hits:
            assert 0 < hit < self.live[name].num_tokens  # S12
            assert name in waited or self.has_groups  # a follower whose leader was preempted
        assert set(plan.swapped_in) <= set(swapped)
        if self.live and not plan.scheduled:  # S23
            assert plan.preempted
            left = {*self.waiting_ids(), *self.swapped_ids()}  # and their followers
            assert set(plan.preempted) >= left
        if not any("leaves nothing to run" in sentence for sentence in plan.clipped):
            self.check_wishes(plan, proposal, waited)
        admitted = [name for name in names if name in waited]
        self.check_order(plan, wish, waited, admitted)
        self.num_preemptions += len(plan.preempted)
        self.num_swaps += len(plan.swapped_out)

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
        if self.make_manager is not ContiguousBlockManager:
            assert num_slots < request.num_tokens + self.manager_config.block_size

    def check_wishes(self, plan: StepPlan, proposal: Proposal, waited: list[str]) -> None:
        """S14: a plan is at most what was proposed."""
        shares = {item.request_id: item.num_new_tokens for item in plan.scheduled}
        paused = set(proposal.pause)
        if proposal.admission_order is not None:
            assert set(shares) & set(waited) <= set(proposal.admission_order)
        if proposal.resume_order is not None:
            assert set(plan.swapped_in) <= set(proposal.resume_order)
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
        left = [name for name in waited if name in admitted or name in self.waiting_ids()]
        if plan.preempted:
            assert not admitted  # S20
            assert not plan.swapped_in
        assert not (admitted and self.swapped_ids()), "a swapped request was overtaken"
        assert admitted == left[: len(admitted)]  # S25, followers aside
        if self.only_default_policy:
            arrivals = [int(name) for name in self.first_admissions]
            assert self.has_groups or arrivals == sorted(arrivals)
            self.check_progress(plan)
            self.preemptions_since_event += len(plan.preempted)
            assert self.preemptions_since_event <= len(self.live)  # S22

    def check_progress(self, plan: StepPlan) -> None:
        """S31: running requests are not held up; prompts are only by the completions of others."""
        scheduled = {item.request_id for item in plan.scheduled}
        for request in self.policy.view.running() if self.policy.view is not None else ():
            if self.has_groups and (
                request.num_tokens_to_compute > 1
                or self.config.max_num_batched_tokens < self.config.max_num_seqs
            ):
                continue
            assert request.request_id in scheduled, "a running request was held up"

    def execute(self, plan: StepPlan) -> None:
        sampled = {}
        running = [r.request_id for r in self.policy.view.running()] if self.policy.view else []
        holders = [set(map(int, self.manager.block_table(name))) for name in running]
        for item in plan.scheduled:
            request = self.live.get(item.request_id)
            if request is None or not item.writes:
                continue
            table, tokens = self.manager.block_table(item.request_id), request.token_ids
            end = item.num_computed_tokens + item.num_new_tokens
            for position in range(item.num_computed_tokens, end):
                block = self.cache.write(table, position, tokens[position])
                assert sum(block in held for held in holders) == 1, "a shared block is written"
        for item in plan.scheduled:
            request = self.live.get(item.request_id)
            if request is None or not item.samples:
                continue
            table = self.manager.block_table(item.request_id)
            read = self.cache.read(table, request.num_tokens)
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
            places = range(request.num_prompt_tokens, request.max_total_tokens)
            assert request.output_token_ids == [token_of(name, place) for place in places]  # S16
            self.preemptions_since_event = 0
        assert self.policy.finished[len(self.policy.finished) - len(finished) :] == list(finished)

    @invariant()
    def queues_agree(self) -> None:
        if not hasattr(self, "scheduler") or self.policy.view is None:
            return
        stats, view = self.scheduler.stats(), self.policy.view
        waiting, swapped = self.waiting_ids(), self.swapped_ids()
        running = [request.request_id for request in view.running()]
        following = set(self.live) - {*waiting, *swapped, *running}
        assert len(waiting) + len(swapped) + len(running) + len(following) == len(self.live)  # S4
        for name in following:
            members = [r for r in self.live.values() if r.parent_id == self.live[name].parent_id]
            assert any(member.request_id in (*running, *swapped) for member in members)
            assert view.num_blocks_of(name) == 0
        assert swapped == sorted(swapped, key=int)
        if not self.has_groups:
            assert waiting == sorted(  # preempted ones in front, each group in order of arrival
                waiting, key=lambda name: (self.live[name].num_preemptions == 0, int(name))
            )
        assert stats.waiting == len(waiting) + len(following)
        assert view.num_waiting == len(waiting)
        assert stats.swapped == view.num_swapped == len(swapped)
        assert stats.running + stats.paused == view.num_running == len(running)
        assert len(running) <= self.config.max_num_seqs  # S2
        assert (stats.num_preemptions, stats.num_swaps) == (self.num_preemptions, self.num_swaps)
        assert self.scheduler.has_unfinished() == bool(self.live)
        usage = self.manager.usage()
        held = {int(block) for name in running for block in self.manager.block_table(name)}
        assert usage.used == len(held)
        assert (usage.host_used > 0) == bool(swapped)
        for name, request in self.live.items():
            assert self.scheduler.get(name) is request
            assert request.num_computed_tokens < request.num_tokens  # S8
            assert (view.num_blocks_of(name) > 0) == (name in running)  # S6
            assert self.manager.is_swapped(name) == (name in swapped)

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
        assert (usage.used, usage.available, usage.host_used) == (0, usage.total, 0)
        self.check_replay()

    def check_replay(self) -> None:
        """S34: the same calls lead to the same plans, whatever the values of tokens, except that
        other values are not found in the prefix cache."""
        plans = self.plans
        self.build()
        replayed = []
        for operation, arguments in self.operations:
            if operation == "add":
                self.scheduler.add(arguments[0].request(), 0.0)
            elif operation == "finish":
                self.scheduler.finish(*arguments)
            else:
                self.policy.wish, aborted = arguments
                plan = self.scheduler.schedule(0.0)
                replayed.append(plan)
                if aborted is not None:
                    self.scheduler.finish(aborted)
                sampled = dict.fromkeys((item.request_id for item in plan.scheduled), 7)
                if self.manager_config.enable_prefix_caching:
                    for name in sampled:
                        request = self.scheduler.get(name)
                        sampled[name] = token_of(name, request.num_tokens if request else 0)
                self.scheduler.update(plan, sampled, 0.0)
        assert replayed == plans


class DefaultPolicyMachine(SchedulerMachine):
    """First come, first served: the order of admission and the bound on preemptions hold too."""

    only_default_policy = True
