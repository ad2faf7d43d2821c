"""The rules: what happens to a scheduler, in any order; and the end of a story."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import initialize, rule

from ..stateful.laws import LawBroken
from ..stateful.search import LawMachine
from . import laws
from .replay import difference, quiet, stopped, told_again
from .script import story_script, story_text
from .tale import Tale
from .telling import OTHERWISE, TELLINGS
from .world import Abort, Arrive, Misfit, Operation, Step, Subject, Wish, World

_PICKS = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "admission": _PICKS,
    "skips": st.integers(-1, 2),
    "admissions": st.integers(-1, 3),
    "order": _PICKS,
    "grants": st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 5)), max_size=3).map(tuple),
    "token_budget": st.integers(-1, 9),
    "prefill_budget": st.integers(-1, 9),
    "pause": _PICKS,
    "preempt": st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple),
    "resume": _PICKS,
    "swaps": st.booleans(),
    "victims": _PICKS,
}
_FAILS = ("propose", "victims", "on_preempt", "on_progress", "on_finish", "admission_order")
_STEPS = st.integers(1, 4)
#: Whether the policy proposes odd things, by the opening of a story.
_STYLES = {
    "": ("plain", "wishful", "strict"),
    "calm": ("plain", "plain", "wishful"),
    "rush": ("plain", "wishful", "wishful", "wishful", "strict"),
}
#: What matters to requests that have just arrived.
_AT_FIRST = ("admission", "skips", "admissions", "grants", "token_budget", "prefill_budget")

#: What matters to requests that go on waiting.
_WAITING = ("admission", "skips", "admissions")
#: What matters to requests that run.
_RUNNING = ("order", "pause", "preempt")
#: What matters to requests in host memory.
_SWAPPING = ("preempt", "resume", "victims")


@st.composite
def _wishes(draw: st.DrawFn) -> Wish:
    names = draw(st.lists(st.sampled_from(sorted(_FIELDS)), min_size=1, max_size=3, unique=True))
    return Wish(**{name: draw(_FIELDS[name]) for name in names})


def random_wish(random: Random, names: Sequence[str]) -> Wish:
    """A wish about one or a few of these things, drawn evenly."""

    def some() -> tuple[int, ...]:
        numbers = (0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 6)
        return tuple(random.choice(numbers) for _ in range(random.randint(1, 3)))

    makers: dict[str, Callable[[], Any]] = {
        "admission": some,
        "skips": lambda: random.choice((0, 1, 1, 2)),
        "admissions": lambda: random.randint(0, 2),
        "order": lambda: tuple(random.sample(range(4), random.choice((1, 1, 2)))),
        "grants": lambda: tuple((random.randint(0, 4), random.randint(1, 3)) for _ in range(2)),
        "token_budget": lambda: random.randint(1, 4),
        "prefill_budget": lambda: random.randint(0, 4),
        "pause": lambda: (random.randint(0, 4),),
        "preempt": lambda: (random.randint(0, 4),),
        "resume": lambda: random.choice(((), some())),
        "swaps": lambda: random.random() < 0.7,
        "victims": some,
    }
    chosen = random.sample(sorted(names), random.choice((1, 1, 1, 2, 3)))
    chosen += ["swaps"] * ("preempt" in chosen and random.random() < 0.5)
    return Wish(**{name: makers[name]() for name in chosen})


class SchedulerMachine(LawMachine):
    """Arrivals, steps and ends in any order in a tiny world.

    Class attributes:
        subject: the scheduler class under test, with its parts.
    """

    subject: ClassVar[Subject]

    @initialize(seed=st.integers(0, 2**32), opening=st.sampled_from(["", "calm", "rush", "rush"]))
    def start(self, seed: int, opening: str) -> None:
        """The world: drawn from a seed, which spreads sizes more evenly than separate draws."""
        pick = Random(seed).choice
        num_blocks, block_size = pick((4, 5, 6, 7, 8, 10, 12)), pick((2, 2, 3, 4))
        watermark, caching = pick((0.0, 0.0, 0.0, 0.2, 0.5)), pick((True, False))
        budget, seats = pick((8, 6, 5, 4, 3, 2)), pick((5, 4, 4, 3, 2, 1))
        host, chunk = pick((8, 8, 5, 2, 0)), pick((None, None, 1, 2, 4, -1, -1))
        mode: Any = pick(("swap", "swap", "swap", "auto", "recompute"))
        style = pick(_STYLES[opening])
        longest, lookahead, groups = pick((16, 16, 24)), pick((0, 0, 0, 1, 2)), pick((True, False))
        powers = self.subject.manager.powers
        host = host if "swap" in powers else 0
        world = World(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=longest,
            watermark=watermark,
            num_host_blocks=host,
            caching=caching and "prefix_caching" in powers,
            lookahead=lookahead if "lookahead" in powers else 0,
            budget=budget,
            seats=seats,
            chunk=None if chunk == -1 else chunk,
            chunked=chunk != -1,
            mode=mode if host or mode != "swap" else "recompute",
            strict=style == "strict",
            groups=groups,
            wishful=style != "plain",
        )
        self.tale = self._built(world)
        self.covered("world", "prefix caching" if world.caching else "no prefix caching")
        self.covered("world", style)
        self.covered("world", "groups" if world.groups else "no groups")
        if opening:
            self._hurry(Random(seed), opening == "calm")

    def _built(self, world: World) -> Tale:
        self._world = world
        try:
            with quiet():
                return Tale(self.subject, world, self)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self.demand(laws.Errors, False, lambda: f"the constructor raised {said}")
            raise AssertionError("a scheduler that cannot be built has no story") from error

    def checked_failure(self) -> None:
        """A failure of the policy came through as it should."""
        self.checked.add(laws.Failures.name)

    # What a story is, for ``LawMachine``.

    def text(self) -> str:
        """The operations so far, in words."""
        if not hasattr(self, "tale"):
            return story_text(self._world, [], [])
        return story_text(self.tale.world, self.tale.operations, self.tale.lines)

    def script(self, broken: LawBroken) -> str:
        """The operations so far as a Python file."""
        if not hasattr(self, "tale"):
            return story_script(self.subject, self._world, [], broken)
        return story_script(self.subject, self.tale.world, self.tale.operations, broken)

    def size(self) -> tuple[int, ...]:
        """Operations, then how much is written in them."""
        return (len(self.tale.operations) if hasattr(self, "tale") else 0, len(self.text()))

    def _do(self, operation: Operation) -> None:
        self.num_calls += 1
        self.covered("operation", type(operation).__name__.lower())
        with quiet(), self._blamed():
            self.tale.perform(operation)

    def _whom(self, index: int) -> int:
        """Index of a live request: often a swapped one, if there is any."""
        swapped = self.tale.judge.standing.swapped & self.tale.live.keys()
        if not swapped or index % 2:
            return index
        return min(list(self.tale.live).index(name) for name in swapped)

    def _topics(self, number: int, random: Random) -> Sequence[str]:
        """What a wish in the step of this number may be about: often what matters just then."""
        if number == 0:
            return _AT_FIRST
        standing = self.tale.judge.standing
        topics: list[Sequence[str]] = [tuple(_FIELDS)]
        if len(self.tale.live) - len(standing.resident) - len(standing.swapped) > 2:
            topics.append(_WAITING)
        if standing.swapped:
            topics.append(_SWAPPING)
        if len(standing.resident) > 2:
            topics.append(_RUNNING)
        return random.choice(topics)

    def _somebody(self, index: int) -> None:
        """Else a story without arrivals would be about nothing."""
        if not self.tale.live:
            self._do(Arrive(index % 3, 3 + index % 4, 9))
            self._do(Arrive((index + 1) % 3, 5, 7 + index % 4, later=index % 2 == 1))

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """An error that no check expects is the scheduler's: it raised or returned the wrong thing.

        Raises:
            LawBroken: instead of that error.
        """
        try:
            yield
        except (LawBroken, HypothesisException):
            raise
        except Exception as error:
            seen = stopped(error)
            self.demand(laws.Errors, False, lambda: seen)

    # Rules.

    @rule(
        count=st.integers(1, 3),
        pattern=st.integers(0, 2),
        length=st.sampled_from([3, 5, 2, 7, 1, 9]),
        completion=st.sampled_from([9, 12, 7, 5, 3, 1]),
        n=st.sampled_from([1, 1, 2, 3]),
        salt=st.sampled_from(["", "", "", "x"]),
        stops=st.booleans(),
        later=st.booleans(),
    )
    def arrive(
        self,
        count: int,
        pattern: int,
        length: int,
        completion: int,
        n: int,
        salt: str,
        stops: bool,
        later: bool,
    ) -> None:
        """New requests, several in a row."""
        salt = salt if self.tale.world.caching else ""
        n = n if self.tale.world.groups else 1
        for number in range(count):
            more = Arrive(pattern, length + number, completion, n, salt, stops, later)
            self._do(more)

    @rule(seed=st.integers(0, 2**32), calm=st.booleans())
    def rush(self, seed: int, calm: bool) -> None:
        """Many requests at once, then steps: blocks run out."""
        self._hurry(Random(seed), calm)

    def _hurry(self, random: Random, calm: bool) -> None:
        """Arrivals and steps, undisturbed if it is ``calm``, else with ends and wishes between."""
        world = self.tale.world
        lengths = random.choice((range(1, 10), range(1, 10), range(6, 13)))
        salts = ("", "", "", "x") if world.caching else ("",)
        for _ in range(random.randint(2, 5)):
            self._do(
                Arrive(
                    pattern=random.randint(0, 2),
                    length=random.choice(lengths),
                    completion=random.randint(3, 12),
                    n=random.choice((1, 1, 2, 3)) if world.groups else 1,
                    salt=random.choice(salts),
                    stops=random.random() < 0.2,
                    later=random.random() < 0.5,
                )
            )
        wish = Wish()
        for number in range(random.randint(6, 16)):
            if not calm and random.random() < 0.15:
                self._do(Abort(self._whom(random.randint(0, 5))))
            if not calm and world.wishful and (number == 0 or random.random() < 0.5):
                wish = random_wish(random, self._topics(number, random))
            self._do(Step(wish))

    @rule(kind=st.sampled_from(["long", "twice", "rejected", "failing"]))
    def misfit(self, kind: str) -> None:
        """A request that has to be refused."""
        self._somebody(0)
        self._do(Misfit(kind))

    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        """The end of a request in any state."""
        self._somebody(index)
        self._do(Abort(self._whom(index)))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        """Steps under the policy alone."""
        self._somebody(count)
        for _ in range(count):
            self._do(Step())

    @rule(wish=_wishes(), count=_STEPS)
    def wished_steps(self, wish: Wish, count: int) -> None:
        """Steps in which the policy proposes odd things."""
        self._somebody(count)
        for _ in range(count):
            self._do(Step(wish if self.tale.world.wishful else Wish()))

    @rule(index=st.integers(0, 5), renew=st.booleans())
    def abort_in_flight(self, index: int, renew: bool) -> None:
        """A step in which a request ends, and perhaps one of the same id arrives."""
        self._somebody(index)
        self._do(Step(abort=index, renew=renew))

    @rule()
    def forget(self) -> None:
        """A step whose tokens come late."""
        self._somebody(1)
        self._do(Step(forgets=True))

    @rule(method=st.sampled_from(_FAILS), count=_STEPS)
    def failing_steps(self, method: str, count: int) -> None:
        """Steps in which the policy raises."""
        self._somebody(count)
        for _ in range(count):
            self._do(Step(fails=method if self.tale.world.wishful else ""))

    def finish(self) -> None:
        """All requests run to their ends; then the story is told again."""
        if not hasattr(self, "tale"):
            return
        tale = self.tale
        with quiet(), self._blamed():
            tale.end()
        self._tell_otherwise()
        self.session.keep((self.subject, tale.world, tuple(tale.operations), tuple(tale.log)))

    def _tell_otherwise(self) -> None:
        """Tell the story again in another way; if anything differs, find out what matters."""
        args = self.subject, self.tale.world, self.tale.operations
        differs = difference(self.tale.log, told_again(*args, OTHERWISE))
        self.checked |= {law.name for law in TELLINGS}
        if differs is None:
            return
        for law, telling in TELLINGS.items():
            seen = difference(self.tale.log, told_again(*args, telling))
            if not self.check(law, seen is None, lambda seen=seen: f"told again, {seen}"):  # type: ignore[misc]
                return
        self.check(laws.Determinism, False, lambda: f"told again in another way, {differs}")
