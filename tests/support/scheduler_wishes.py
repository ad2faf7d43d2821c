"""A scheduling policy that proposes whatever it is told, possible or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from jackfield.core.request import Request, SchedulingHints
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling_policy import (
    PreemptionMode,
    Progress,
    Proposal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
)

BOGUS = "nobody"


def token_of(request_id: str, position: int) -> int:
    """The token that the simulated model gives a request at a position."""
    return 1_000_000 * int(request_id) + position


def prompt_of(text: int, length: int) -> list[int]:
    """The beginning of one of a few texts."""
    return [1000 * text + position for position in range(length)]


@dataclass(frozen=True)
class Arrival:
    """A request in numbers.

    Attributes:
        name: its id, a number.
        text: which text its prompt begins.
        prompt: tokens of the prompt.
        total: most tokens.
        parent: id of the first of its completions; "" if it is the only one.
        n: number of completions.
        salt: of its cached prefixes.
    """

    name: str
    text: int
    prompt: int
    total: int
    parent: str = ""
    n: int = 1
    salt: str = ""

    def request(self) -> Request:
        """A new request."""
        return Request(
            self.name,
            prompt_of(self.text, self.prompt),
            SamplingParams(n=self.n),
            0.0,
            int(self.name),
            self.total,
            parent_id=self.parent,
            hints=SchedulingHints(cache_salt=self.salt),
        )


@dataclass(frozen=True)
class Wish:
    """A proposal in numbers: which of the live requests, counted modulo their number."""

    admission: tuple[int, ...] | None = None
    skips: int = 0
    admissions: int | None = None
    order: tuple[int, ...] = ()
    grants: tuple[tuple[int, int], ...] = ()
    token_budget: int | None = None
    prefill_budget: int | None = None
    pause: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    resume: tuple[int, ...] | None = None
    swaps: bool | None = None
    victims: tuple[int, ...] | None = None


picks = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple)
fields: dict[str, st.SearchStrategy[Any]] = {
    "admission": picks,
    "skips": st.integers(-1, 2),
    "admissions": st.integers(-1, 3),
    "order": picks,
    "grants": st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 5)), max_size=3).map(tuple),
    "token_budget": st.integers(-1, 9),
    "prefill_budget": st.integers(-1, 9),
    "pause": picks,
    "preempt": st.lists(st.integers(0, 6), max_size=2).map(tuple),
    "resume": picks,
    "swaps": st.booleans(),
}
wishes = st.builds(
    lambda victims, chosen: Wish(victims=victims, **chosen),
    st.none() | picks,
    st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    ),
)
sizes = st.tuples(st.integers(1, 12), st.integers(1, 12))


class WishfulPolicy(SchedulingPolicy):
    """Proposes whatever it is told, possible or not, and checks what it sees."""

    name = "wishful"

    def __init__(self) -> None:
        super().__init__()
        self.wish = Wish()
        self.view: SchedulerView | None = None
        self.proposal = Proposal()
        self.preempted: list[tuple[str, PreemptionMode]] = []
        self.progress: list[Progress] = []
        self.finished: list[str] = []

    def on_arrival(self, view: SchedulerView, request: RequestView) -> Verdict:
        self.view = view
        return super().on_arrival(view, request)

    def propose(self, view: SchedulerView) -> Proposal:
        self.preempted.clear()
        wish = self.wish
        waiting = [request.request_id for request in view.waiting()]
        running = [request.request_id for request in view.running()]
        swapped = [request.request_id for request in view.swapped()]
        before = snapshot(view)
        for name in (*waiting, *running, *swapped):
            view.match_prefix(name)
        assert snapshot(view) == before  # S40

        def ids(numbers: Iterable[int], names: list[str]) -> list[str]:
            """Mostly those names, now and then one of the others or of nobody."""
            pools = {5: [*waiting, *running], 6: []}
            choices = [(number, pools.get(number, names)) for number in numbers]
            return [pool[number % len(pool)] if pool else BOGUS for number, pool in choices]

        preempt = ids(wish.preempt, running)
        mode = PreemptionMode.SWAP if wish.swaps else PreemptionMode.RECOMPUTE
        self.proposal = Proposal(
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
        return self.proposal

    def victims(
        self, view: SchedulerView, beneficiary: str, candidates: Sequence[str]
    ) -> Iterable[tuple[str, PreemptionMode | None]]:
        assert beneficiary in candidates
        assert list(candidates) == [r.request_id for r in view.running()]
        if self.wish.victims is None:
            return super().victims(view, beneficiary, candidates)
        modes = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP, None)
        return (
            (BOGUS if n == 6 else candidates[n % len(candidates)], modes[n % 3])
            for n in self.wish.victims
        )

    def on_preempt(self, view: SchedulerView, request_id: str, mode: PreemptionMode) -> None:
        assert view.num_blocks_of(request_id) == 0
        swapped = [request.request_id for request in view.swapped()]
        assert (request_id in swapped) == (mode is PreemptionMode.SWAP)
        self.preempted.append((request_id, mode))

    def on_progress(self, view: SchedulerView, progress: Sequence[Progress]) -> None:
        self.progress.extend(progress)

    def on_finish(self, view: SchedulerView, request_id: str) -> None:
        assert view.request(request_id).request_id == request_id
        assert view.num_blocks_of(request_id) == 0
        self.finished.append(request_id)


def snapshot(view: SchedulerView) -> tuple[object, ...]:
    """Everything that a policy can see."""
    fields = ("request_id", "num_computed_tokens", "num_generated_tokens", "num_preemptions")
    rows = [
        [[getattr(r, name) for name in fields] for r in queue]
        for queue in (view.waiting(), view.running(), view.swapped())
    ]
    return rows, view.block_usage(), view.step


def random_wish(draw: Random) -> Wish:
    """A wish about a few things, drawn evenly."""

    def some() -> tuple[int, ...]:
        return tuple(draw.randint(0, 6) for _ in range(draw.randint(1, 4)))

    makers: dict[str, Callable[[], Any]] = {
        "admission": some,
        "skips": lambda: draw.randint(-1, 2),
        "admissions": lambda: draw.randint(-1, 3),
        "order": some,
        "grants": lambda: ((draw.randint(0, 6), draw.randint(-1, 5)),),
        "token_budget": lambda: draw.randint(-1, 9),
        "prefill_budget": lambda: draw.randint(-1, 9),
        "pause": some,
        "preempt": some,
        "resume": some,
        "swaps": lambda: draw.random() < 0.7,
    }
    chosen = draw.sample(sorted(makers), draw.choice([0, 0, 1, 2, 3]))
    victims = draw.choice([None, (6,), some()])
    return Wish(victims=victims, **{name: makers[name]() for name in chosen})
