"""Carries out the operations of a story on a scheduler, as an engine would."""

from __future__ import annotations

from ...core.errors import PluginError, RequestError
from ...core.request import Request
from ...core.scheduler import StepPlan
from . import laws
from .policy import NO_WISH
from .runner import Runner
from .sight import Before
from .stage import plan_line, said
from .world import MAX_REQUESTS, Abort, Arrive, Misfit, Operation, Step

#: What arrives with the id of a request that ended while it was computed.
_RENEWED = Arrive(pattern=1, length=3, completion=2)


class Tale(Runner):
    """One story of one scheduler; see ``Stage`` for what it is made of."""

    def perform(self, operation: Operation) -> None:
        """Do what an operation says, and check what comes of it."""
        self.operations.append(operation)
        self.lines.append("")
        if isinstance(operation, Arrive):
            self._arrive(operation)
        elif isinstance(operation, Misfit):
            self._misfit(operation.kind)
        elif isinstance(operation, Abort):
            if self.live:
                self._finish(list(self.live)[operation.index % len(self.live)])
            else:
                self.lines[-1] = "nobody is live"
        else:
            self._step(operation)
        if self.judged:
            self.judge.inspect()

    def end(self) -> None:
        """Let all requests run to their ends, and see that nothing is left.

        The policy goes on proposing its last wish: no policy may stop the engine.
        """
        wishes = [one.wish for one in self.operations if isinstance(one, Step)]
        wishes = [wish for wish in wishes if wish != NO_WISH and not self.world.strict]
        last = wishes[-1] if wishes else NO_WISH
        bound = self.judge.drain_bound(wished=last != NO_WISH)
        for _ in range(bound):
            if not self.live:
                break
            self.perform(Step(last))
        self.checker.demand(
            laws.Drain,
            not self.live,
            lambda: f"after {bound} steps without an arrival {list(self.live)} are live",
        )
        usage = self.manager.usage()
        self.checker.check(
            laws.NoLeak,
            usage.used == usage.host_used == 0 and usage.available == usage.total,
            lambda: f"all requests have ended, and usage() of the block manager says {usage}",
        )

    # Arrivals and ends.

    def _arrive(self, arrive: Arrive) -> None:
        if self.longest < 2 or len(self.live) + arrive.n > MAX_REQUESTS:
            self.lines[-1] = "no room in the story"
            return
        self.clock += arrive.later
        length, total = self._size(arrive)
        parent, before = f"group {self.num_added}", self.judge.standing
        for _ in range(arrive.n):
            request = self._request(self.telling.name(self.num_added), arrive)
            if arrive.n > 1:
                request.parent_id = parent
            self._add(request)
        self.judge.has_groups |= arrive.n > 1
        if self.judged:
            self.judge.unmoved(before, "add")
        self.lines[-1] = f"{', '.join(list(self.live)[-arrive.n :])}: {length} of {total} tokens"

    def _size(self, arrive: Arrive) -> tuple[int, int]:
        """Tokens of a prompt, and of it with its completion, cut to what fits."""
        length = min(arrive.length, self.longest - 1)
        if not self.world.chunked:
            length = min(length, self.world.budget)
        return length, min(length + arrive.completion, self.longest)

    def _request(self, name: str, arrive: Arrive) -> Request:
        length, total = self._size(arrive)
        return self.telling.request(name, arrive, length, total, self.num_added, self.now)

    def _add(self, request: Request) -> None:
        error = self.attempt(self.scheduler.add, request, self.now)
        self.checker.demand(
            laws.Arrivals,
            error is None,
            lambda: (
                f"{request.request_id!r} with {request.num_prompt_tokens} tokens, at most "
                f"{request.max_total_tokens} in all, fits; add raised {said(error)}"
            ),
        )
        self.joined(request)
        self.judge.event()
        self.log.append(("add", request.num_prompt_tokens, request.max_total_tokens))

    def _misfit(self, kind: str) -> None:
        expected: type[Exception] = RequestError
        length, total = (self.longest, self.longest + 1) if kind == "long" else (1, 2)
        name = self.telling.name(self.num_added)
        if kind == "twice":
            if not self.live:
                self.lines[-1] = "nobody is live"
                return
            name = next(iter(self.live))
        request = self.telling.request(name, Arrive(), length, total, self.num_added, self.now)
        self.policy.rejects = kind == "rejected"
        if kind == "failing":
            self.policy.begin(NO_WISH, "on_arrival")
            expected = PluginError
        if kind != "long" and self.longest < 2:
            expected = RequestError
        before, seen = self.scheduler.stats(), self.judge.standing
        error = self.attempt(self.scheduler.add, request, self.now)
        self.policy.rejects = False
        self.checker.demand(
            laws.Failures if kind == "failing" else laws.Arrivals,
            isinstance(error, expected)
            and self.scheduler.stats() == before
            and self.scheduler.get(name) is self.live.get(name),
            lambda: (
                f"a request that is {kind} must be refused with {expected.__name__} and change "
                f"nothing; add raised {said(error)}, and stats() went from {before} to "
                f"{self.scheduler.stats()}"
            ),
        )
        self.policy.begin(NO_WISH, "")
        if self.judged:
            self.judge.unmoved(seen, "add")
        self.lines[-1] = type(error).__name__

    def _finish(self, name: str) -> None:
        self.policy.begin(NO_WISH, "")
        before = self.judge.standing
        once, again = self.right("finish", name), self.right("finish", name)
        self.checker.demand(
            laws.Errors,
            once is True and again is False,
            lambda: f"finish({name!r}) said {once}, then {again}; it must be True, then False",
        )
        self.told_of_ends([name])
        del self.live[name]
        if self.judged:
            self.judge.unblocked([name])
            self.judge.unmoved(before, "finish")
        self.judge.event()
        self.log.append(("finish", name))
        self.lines[-1] = f"{self.lines[-1]} ends {name}".strip()

    # Steps.

    def _step(self, step: Step) -> None:
        self.clock += 1.0
        fails = step.fails
        self.policy.begin(step.wish, "" if fails in ("on_progress", "on_finish") else fails)
        before = self.judge.standing
        error: Exception | None = None
        plan: StepPlan | None = None
        try:
            plan = self.scheduler.schedule(self.now)
        except Exception as raised:
            error = raised
        if plan is None:
            self.log.append(("failed", type(error).__name__))
            self.lines[-1] = said(error)
            if self.judged:
                self._failed(step, error, before)
            return
        self.checker.check(
            laws.Failures,
            not self.policy.raised,
            lambda: f"the policy raised in {step.fails}, and schedule raised nothing",
        )
        self.log.append(plan)
        self.lines[-1] = plan_line(plan)
        if self.judged:
            self.judge.judge(plan, before)
        self.move(plan)
        gone = ""
        if step.abort >= 0 and self.live:
            gone = list(self.live)[step.abort % len(self.live)]
            self._finish(gone)
            if step.renew and self.longest > 1:
                self._add(self._request(gone, _RENEWED))
                self.lines[-1] += f", and {gone} arrives anew"
        self.compute(plan, step, gone)

    def _failed(self, step: Step, error: Exception | None, before: Before) -> None:
        name = str(self.policy.name)
        # Only of fcfs it is known that all it proposes by itself is possible.
        strict = self.world.strict and (step.wish != NO_WISH or not self.judge.fcfs)
        came = "schedule returned None" if error is None else f"schedule raised {said(error)}"
        self.checker.demand(
            laws.Failures if self.policy.raised else laws.Errors,
            isinstance(error, PluginError)
            and f"{name!r}" in str(error)
            and (self.policy.raised or strict),
            lambda: (
                f"{came}; "
                + (
                    f"it must be PluginError with the policy's name, for it failed in {step.fails}"
                    if self.policy.raised
                    else "there is no reason to"
                )
            ),
        )
        self.checker.covered("failure", step.fails if self.policy.raised else "strict")
        lost = {one for one, mode in self.policy.preempted if mode.value == "recompute"}
        for one, request in self.live.items():
            was, computed = before.computed[one], request.num_computed_tokens
            fine = computed in ((0,) if one in lost else (was,)) or (
                one not in before.resident | before.swapped
            )
            self.checker.demand(
                laws.Failures,
                fine,
                lambda one=one, was=was, computed=computed: (  # type: ignore[misc]
                    f"the failed step took num_computed_tokens of {one!r} from {was} to {computed}"
                ),
            )
        self.judge.event()
        self.judge.count(self.policy.preempted)
        after = self.judge.standing = self.judge.look()
        for one in after.resident - self.judge.started:
            # No plan says what it found.
            self.judge.cached[one] = self.live[one].num_cached_tokens
        self.judge.started |= after.resident
        self.judge.has_groups = True  # who was admitted cannot be known, nor who was overtaken
