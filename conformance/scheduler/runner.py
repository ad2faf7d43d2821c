"""What a runner does with a plan: moves, writes, reads, samples; and what is noted of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import PluginError
from ...core.request import FinishReason, Request
from ...core.scheduler import ScheduledRequest, StepPlan
from . import laws
from .cache import SimulatedCache
from .policy import NO_WISH
from .sight import Checker
from .stage import Stage, said
from .telling import Telling
from .world import Step, Subject, World


class Runner(Stage):
    """Carries out plans on a simulated cache."""

    def __init__(
        self, subject: Subject, world: World, checker: Checker, telling: Telling | None = None
    ) -> None:
        super().__init__(subject, world, checker, telling)
        self._cache = SimulatedCache(world.block_size)

    def move(self, plan: StepPlan) -> None:
        """Do the moves of a plan."""
        self._cache.move(plan.moves)

    def compute(self, plan: StepPlan, step: Step, gone: str) -> None:
        """Compute a plan and have the scheduler take note.

        Args:
            plan: what was planned.
            step: the operation.
            gone: id of a request that ended after the plan was made; "" is nobody.
        """
        items = [item for item in plan.scheduled if item.request_id != gone]
        if self.judged:
            self._fill(items)
        sampled = {
            item.request_id: self._sampled(self.live[item.request_id])
            for item in items
            if item.samples
        }
        if step.forgets and sampled:
            error = self.attempt(self.scheduler.update, plan, {}, self.now)
            self.checker.demand(
                laws.Errors,
                isinstance(error, ValueError),
                lambda: f"update without tokens must raise ValueError, and raised {said(error)}",
            )
            # What it had noted before it raised stays; the whole plan again finishes it.
        self._update(plan, items, sampled, step)

    def _fill(self, items: list[ScheduledRequest]) -> None:
        """Write the shares, then read everything back."""
        tables = {name: self.judge.table(name) or () for name in self.live}
        for item in items:
            if item.writes:
                self._write(item, tables)
        reached = {one.request_id: one.num_computed_tokens + one.num_new_tokens for one in items}
        for name, request in self.live.items():
            if tables[name]:
                self._read(request, tables[name], reached.get(name, request.num_computed_tokens))

    def _sampled(self, request: Request) -> int:
        return self.telling.next_token(request.token_ids, request.seed)

    def _write(self, item: ScheduledRequest, tables: Mapping[str, tuple[int, ...]]) -> None:
        request, table = self.live[item.request_id], tables[item.request_id]
        tokens, salt = request.token_ids, request.hints.cache_salt
        for at in range(item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens):
            block = table[at // self.world.block_size]
            holders = [name for name, held in tables.items() if block in held]
            self.checker.check(
                laws.Private,
                len(holders) == 1,
                lambda holders=holders, block=block: (  # type: ignore[misc]
                    f"{holders} hold block {block}, which is written"
                ),
            )
            self._cache.write(table, at, (salt, tuple(tokens[: at + 1])))

    def _read(self, request: Request, table: tuple[int, ...], end: int) -> None:
        name, salt = request.request_id, request.hints.cache_salt
        wrong = self._cache.wrong(table, request.token_ids, end, salt)
        self.checker.demand(
            laws.Contents,
            not wrong,
            lambda: f"{name!r} reads keys at positions {wrong} of {end} that are not its own",
        )

    # What the scheduler makes of it.

    def _update(
        self,
        plan: StepPlan,
        items: list[ScheduledRequest],
        sampled: dict[str, int],
        step: Step,
    ) -> None:
        fails = step.fails if step.fails in ("on_progress", "on_finish") else ""
        ends, before = self._ends(sampled), self.judge.standing
        self.policy.begin(NO_WISH, fails)
        got: Any = ends
        try:
            got = dict(self.scheduler.update(plan, sampled, self.now))
        except Exception as error:
            self.checker.demand(
                laws.Failures if self.policy.raised else laws.Errors,
                isinstance(error, PluginError)
                and self.policy.raised
                and f"{self.policy.name!r}" in str(error),
                lambda error=error: f"update raised {said(error)}",  # type: ignore[misc]
            )
        else:
            self.checker.check(
                laws.Failures,
                not self.policy.raised,
                lambda: f"the policy raised in {fails}, and update raised nothing",
            )
        self.checker.demand(
            laws.Endings, got == ends, lambda: f"update says {got} ended; {ends} should have"
        )
        self._noted(items, sampled, ends)
        if self.policy.raised:
            self.checker.covered("failure", fails)
            self.checker.checked_failure()
        else:
            if not step.forgets:
                self._told_of_progress(items)
            self.told_of_ends(list(ends))
        self.policy.begin(NO_WISH, "")
        self._end(ends)
        if not self.judged:
            return
        self.judge.born |= self.judge.unmoved(before, "update")
        self.judge.started |= self.judge.born
        for child in self.judge.born:
            self.judge.cached.setdefault(child, self.live[child].num_cached_tokens)

    def _ends(self, sampled: Mapping[str, int]) -> dict[str, FinishReason]:
        ends: dict[str, FinishReason] = {}
        for name, token in sampled.items():
            request = self.live[name]
            if token in request.stop_token_ids:
                ends[name] = FinishReason.STOP
            elif request.num_tokens + 1 >= request.max_total_tokens:
                ends[name] = FinishReason.LENGTH
        return ends

    def _noted(
        self,
        items: list[ScheduledRequest],
        sampled: Mapping[str, int],
        ends: Mapping[str, FinishReason],
    ) -> None:
        for name, token in sampled.items():
            self.judge.known[name].append(token)
        for item in items:
            name = item.request_id
            request, known = self.live[name], self.judge.known[name]
            end = item.num_computed_tokens + item.num_new_tokens
            self.checker.demand(
                laws.Chunks,
                name in ends or request.num_computed_tokens == end,
                lambda name=name, end=end, request=request: (  # type: ignore[misc]
                    f"{name!r} has computed {end} tokens, and num_computed_tokens says "
                    f"{request.num_computed_tokens}"
                ),
            )
            self.checker.demand(
                laws.Sampling,
                request.token_ids == known,
                lambda name=name, request=request, known=known: (  # type: ignore[misc]
                    f"after the step the tokens of {name!r} are {request.token_ids}, and {known} "
                    "are right"
                ),
            )

    def _end(self, ends: Mapping[str, FinishReason]) -> None:
        for name in ends:
            request, alone = self.live.pop(name), self.expected[name]
            self.checker.check(
                laws.Resumption,
                request.output_token_ids == alone,
                lambda name=name, request=request, alone=alone: (  # type: ignore[misc]
                    f"{name!r} emitted {request.output_token_ids}; alone it emits {alone}"
                ),
            )
            self.judge.event()
            self.lines[-1] += f"; {name} ends: {ends[name].value}"
        if self.judged:
            self.judge.unblocked(ends)
        self.log.append([(name, reason.value) for name, reason in ends.items()])

    def _told_of_progress(self, items: list[ScheduledRequest]) -> None:
        told = sorted(
            (one.request_id, one.num_computed, one.num_generated) for one in self.policy.progress
        )
        wanted = sorted((item.request_id, item.num_new_tokens, int(item.samples)) for item in items)
        self.checker.check(
            laws.Told, told == wanted, lambda: f"on_progress was told {told}, the step did {wanted}"
        )
