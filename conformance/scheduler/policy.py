"""The policy of a story: the one under test, which now and then proposes odd things or fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...core.block_manager import BlockManager
from ...core.scheduling_policy import (
    PreemptionMode,
    Progress,
    Proposal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
    reject,
)
from ..stateful.laws import StatefulLaw
from . import laws
from .world import Wish

BOGUS = "nobody"
NO_WISH = Wish()
_FIELDS = ("request_id", "num_computed_tokens", "num_generated_tokens", "num_preemptions")
_MODES = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP, None)


class DeliberateFailure(Exception):  # noqa: N818 - it is thrown on purpose
    """What a failing policy raises."""


class ProbingPolicy(SchedulingPolicy):
    """Stands before a policy: passes on what it says, or proposes a wish; notes what it is told.

    Attributes:
        wish, fails: as in ``world.Step``.
        rejects: whether arrivals are refused.
        raised: whether it failed since ``begin``.
        proposal: the last one.
        preempted, progress, finished: what it was told since ``begin``.
        offered: victims that the scheduler took from its list, each with the mode.
        exhausted: whether the scheduler came to the end of such a list.
        waiting: ids of the waiting requests when it was asked for a proposal.
        complaints: laws that it saw broken, each with a message.
        judged: laws that it could judge.
        compares: whether what it sees before and after a look is compared.
    """

    def __init__(self, inner: SchedulingPolicy, manager: BlockManager, mode: str) -> None:
        super().__init__()
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.rejects = False
        self.view: SchedulerView | None = None
        self._manager = manager
        self._swaps = mode == "swap"
        self.complaints: list[tuple[type[StatefulLaw], str]] = []
        self.judged: set[type[StatefulLaw]] = set()
        self.compares = True
        self.begin(NO_WISH, "")

    def begin(self, wish: Wish, fails: str) -> None:
        """A step begins."""
        self.wish, self.fails = wish, fails
        self.raised = False
        self.waiting: list[str] = []
        self.exhausted = False
        self.proposal = Proposal()
        self.preempted: list[tuple[str, PreemptionMode]] = []
        self.progress: list[Progress] = []
        self.finished: list[str] = []
        self.offered: dict[str, PreemptionMode | None] = {}
        self._blocks: dict[str, int] = {}
        self._candidates: dict[str, int] = {}
        self._beneficiary = ""
        self._available = 0

    def on_arrival(self, view: SchedulerView, request: RequestView) -> Verdict:
        self._fail("on_arrival")
        self.view = view
        return reject("full house") if self.rejects else self.inner.on_arrival(view, request)

    def propose(self, view: SchedulerView) -> Proposal:
        self.view = view
        self._blocks = {
            one.request_id: view.num_blocks_of(one.request_id) for one in view.running()
        }
        self.waiting = [one.request_id for one in view.waiting()]
        self._probe(view)
        self._fail("propose")
        if self.fails == "admission_order":
            self.proposal = Proposal(admission_order=self._failing_order(view))
        elif self.wish == NO_WISH:
            self.proposal = self.inner.propose(view)
        else:
            self.proposal = self._wished(view, self.wish)
        return self.proposal

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode | None]]:
        self._fail("victims")
        self._blocks = {name: view.num_blocks_of(name) for name in candidates}
        self._beneficiary = beneficiary
        self._available = view.block_usage().available
        self._candidates = {
            name: self._manager.reclaimable(name) for name, held in self._blocks.items() if held
        }
        if beneficiary not in candidates or not all(self._blocks.values()):
            self._complain(
                laws.Victims,
                f"for {beneficiary!r} the candidates are {list(candidates)}, which hold "
                f"{list(self._blocks.values())} blocks; it must be among them, and all hold some",
            )
        if self.wish.victims is None:
            return self._recorded(self.inner.victims(view, beneficiary, candidates))
        wished = (
            (BOGUS if n == 6 else candidates[n % len(candidates)], _MODES[n % 3])
            for n in self.wish.victims
        )
        return self._recorded(wished)

    def on_preempt(self, view: SchedulerView, request_id: str, mode: PreemptionMode) -> None:
        self.preempted.append((request_id, mode))
        if view.num_blocks_of(request_id):
            self._complain(laws.Release, f"{request_id!r} is preempted and holds blocks")
        self._judge_mode(view, request_id, mode)
        if request_id not in self.proposal.preempt:
            self._judge_gain(view, request_id)
        self.inner.on_preempt(view, request_id, mode)
        self._fail("on_preempt")

    def on_progress(self, view: SchedulerView, progress: Sequence[Progress]) -> None:
        self.progress.extend(progress)
        self.inner.on_progress(view, progress)
        self._fail("on_progress")

    def on_finish(self, view: SchedulerView, request_id: str) -> None:
        self.finished.append(request_id)
        self.inner.on_finish(view, request_id)
        self._fail("on_finish")

    def _fail(self, method: str) -> None:
        if self.fails == method:
            self.raised = True
            raise DeliberateFailure(method)

    def _complain(self, law: type[StatefulLaw], message: str) -> None:
        self.complaints.append((law, message))

    def _failing_order(self, view: SchedulerView) -> Iterator[str]:
        for request in view.waiting():
            yield request.request_id
            break
        self._fail("admission_order")

    def _recorded(
        self, offers: Iterable[tuple[str, PreemptionMode | None]]
    ) -> Iterator[tuple[str, PreemptionMode | None]]:
        for name, mode in offers:
            self.offered[name] = mode
            yield name, mode
        self.exhausted = True

    def _judge_mode(self, view: SchedulerView, name: str, mode: PreemptionMode) -> None:
        if name in self.proposal.preempt:
            wished = self.proposal.preemption_modes.get(name)
        else:
            wished = self.offered.get(name)
        usage = view.block_usage()
        swaps = wished is PreemptionMode.SWAP or (wished is None and self._swaps)
        if mode is PreemptionMode.SWAP:
            self.judged.add(laws.SwapSpace)
            if wished is PreemptionMode.RECOMPUTE:
                self._complain(laws.SwapSpace, f"{name!r} is swapped, the policy wanted not")
            return
        room = usage.host_total - usage.host_used
        if usage.host_total:
            self.judged.add(laws.SwapSpace)
        if swaps and usage.host_total and room >= self._blocks.get(name, room + 1):
            self._complain(
                laws.SwapSpace,
                f"{name!r} is to be swapped, {self._blocks[name]} blocks fit into the {room} free "
                "ones of host memory, and it is recomputed",
            )

    def _judge_gain(self, view: SchedulerView, name: str) -> None:
        self.judged.add(laws.Gain)
        available = view.block_usage().available
        could = [one for one, gain in self._candidates.items() if gain and one != self._beneficiary]
        if available <= self._available and could and name != self._beneficiary:
            self._complain(
                laws.Gain,
                f"{name!r} is preempted for {self._beneficiary!r}, and {available} blocks are "
                f"available as before; {could} would have freed some",
            )
        self._available = available
        self._candidates.pop(name, None)

    def _probe(self, view: SchedulerView) -> None:
        before = (snapshot(view), self._manager.prefix_stats()) if self.compares else None
        for queue in (view.waiting, view.running, view.swapped):
            for number, request in enumerate(queue()):
                view.match_prefix(request.request_id)
                if number == 0:
                    self._tamper(request)
        if before is None:
            return
        self.judged.add(laws.Views)
        after = snapshot(view), self._manager.prefix_stats()
        if before != after:
            self._complain(laws.Views, f"looking changed what is seen: {before} became {after}")

    def _tamper(self, request: RequestView) -> None:
        old = request.num_computed_tokens
        try:
            request.num_computed_tokens = old + 1  # type: ignore[misc]
        except (AttributeError, TypeError):
            return
        if request.num_computed_tokens != old:
            request.num_computed_tokens = old  # type: ignore[misc]
            self._complain(laws.Views, "a policy can set num_computed_tokens through its view")

    def _wished(self, view: SchedulerView, wish: Wish) -> Proposal:
        waiting = [request.request_id for request in view.waiting()]
        running = [request.request_id for request in view.running()]
        swapped = [request.request_id for request in view.swapped()]

        def ids(numbers: Iterable[int], names: list[str]) -> list[str]:
            pools: dict[int, list[str]] = {5: [*waiting, *running], 6: []}
            chosen = [(number, pools.get(number, names)) for number in numbers]
            return [pool[number % len(pool)] if pool else BOGUS for number, pool in chosen]

        preempt = ids(wish.preempt, running)
        mode = PreemptionMode.SWAP if wish.swaps else PreemptionMode.RECOMPUTE
        return Proposal(
            admission_order=None if wish.admission is None else ids(wish.admission, waiting),
            max_skips=wish.skips,
            max_admissions=wish.admissions,
            running_order=ids(wish.order, running),
            grants={ids([n], [*running, *waiting])[0]: grant for n, grant in wish.grants},
            token_budget=wish.token_budget,
            prefill_budget=wish.prefill_budget,
            pause=ids(wish.pause, running),
            preempt=preempt,
            resume_order=None if wish.resume is None else ids(wish.resume, swapped),
            preemption_modes={} if wish.swaps is None else dict.fromkeys(preempt, mode),
        )


def snapshot(view: SchedulerView) -> tuple[object, ...]:
    """Everything that a policy can see."""
    rows = [
        [[getattr(one, name) for name in _FIELDS] for one in queue]
        for queue in (view.waiting(), view.running(), view.swapped())
    ]
    return rows, view.block_usage(), view.step
