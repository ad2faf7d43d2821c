"""Looks for a story of calls in which a part breaks a law, and makes it small."""

from __future__ import annotations

import sys
import time
import warnings
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import HypothesisWarning, Unsatisfiable
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from .laws import LawBroken, StatefulLaw

#: Shrinking a story ends after this many seconds, with the shortest one found so far.
SHRINK_SECONDS = 8.0
#: Stories that a search keeps.
MAX_SAMPLES = 60
Law = type[StatefulLaw]


@dataclass(frozen=True)
class Budget:
    """Size of a search.

    Attributes:
        stories: random stories.
        steps: rules of a story.
        seconds: no new story is begun after that long.
    """

    stories: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Failure:
    """A law that a part breaks.

    Attributes:
        law: name of the law.
        message: what was seen, and what should have been.
        story: the calls that lead there, in words.
        script: a Python file that shows it alone.
    """

    law: str
    message: str
    story: str
    script: str


@dataclass
class Found:
    """What a search found; several can be added up.

    Attributes:
        stories: stories that were told, not counting those of shrinking.
        calls: calls of the part in them.
        exercised: law, then the number of stories that checked it.
        coverage: axis, then value, then how often it occurred.
        failures: law, then its shortest story.
        samples: some of the stories, as the machine keeps them.
        seconds: time taken.
    """

    stories: int = 0
    calls: int = 0
    exercised: Counter[str] = field(default_factory=Counter)
    coverage: dict[str, Counter[str]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    samples: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Found) -> None:
        """Take in what another search found; the shorter story of a law counts."""
        self.stories += other.stories
        self.calls += other.calls
        self.exercised.update(other.exercised)
        for axis, counts in other.coverage.items():
            self.coverage.setdefault(axis, Counter()).update(counts)
        for law, failure in other.failures.items():
            known = self.failures.get(law)
            if known is None or len(failure.story) < len(known.story):
                self.failures[law] = failure
        self.samples = (self.samples + other.samples)[:MAX_SAMPLES]
        self.seconds = max(self.seconds, other.seconds)


class SearchOver(BaseException):
    """Ends a search from within a story; no error, and nothing that Hypothesis would shrink."""


class Session:
    """What the stories of one search share: its budget, what it counts, the failure it shrinks.

    Args:
        budget: size of the search.
        deadline: when it ends, by ``time.monotonic``.
        muted: laws that are known to be broken; the search is after the others.
        shrink: whether a failing story is made small.
        told: called after each story with the number of stories.

    Attributes:
        found: what was found so far.
        broken, broken_at: the law that was broken first, and when, by ``time.monotonic``.
        over: whether the search ended from within a story.
    """

    def __init__(
        self,
        budget: Budget,
        deadline: float,
        muted: frozenset[str] = frozenset(),
        shrink: bool = True,
        told: Callable[[int], None] = lambda stories: None,
    ) -> None:
        self.found = Found()
        self.muted = muted
        self.broken: LawBroken | None = None
        self.broken_at: float | None = None
        self.over = False
        self._size: tuple[int, ...] = ()
        self._failure: Failure | None = None
        self._budget = budget
        self._deadline = deadline
        self._shrink = shrink
        self._told = told

    def begin(self) -> None:
        """A story is about to be told.

        Raises:
            SearchOver: the budget is used up.
        """
        if time.monotonic() > self._deadline or self.found.stories >= self._budget.stories:
            self.over = True
            raise SearchOver

    def end(self, checked: Iterable[str], calls: int, coverage: Counter[tuple[str, str]]) -> None:
        """A story was told, to its end or not."""
        if self.broken is not None:
            return
        self.found.stories += 1
        self.found.calls += calls
        self.found.exercised.update(set(checked))
        for (axis, value), count in coverage.items():
            self.found.coverage.setdefault(axis, Counter())[value] += count
        self._told(self.found.stories)

    def keep(self, sample: Any) -> None:
        """Remember a story that was told to its end; not all of them are kept."""
        samples = self.found.samples
        if len(samples) < MAX_SAMPLES:
            samples.append(sample)
        elif self.broken is None:
            samples[self.found.stories % MAX_SAMPLES] = sample

    def fail(self, machine: LawMachine, broken: LawBroken) -> None:
        """A law is broken: remember the story if it is the shortest, and let Hypothesis know.

        Raises:
            LawBroken: always, but for a law that is not the one that is being shrunk.
            SearchOver: nothing is to be shrunk, or it took long enough.
        """
        if self.broken is None:
            self.broken, self.broken_at = broken, time.monotonic()
            self._deadline = self.broken_at + SHRINK_SECONDS
            self._budget = Budget(10**9, self._budget.steps, 0.0)
        if broken.law is not self.broken.law:
            hypothesis.reject()
        size = machine.size()
        if self._failure is None or size < self._size:
            self._size = size
            self._failure = Failure(
                broken.law.name, broken.message, machine.text(), machine.script(broken)
            )
            self.found.failures = {broken.law.name: self._failure}
        if not self._shrink:
            self.over = True
            raise SearchOver
        raise broken


class LawMachine(RuleBasedStateMachine):
    """A rule-based state machine whose checks are named laws; a subclass says what a story is.

    Class attributes:
        session: set by ``search`` in a subclass of its own.
    """

    session: ClassVar[Session]

    def __init__(self) -> None:
        self.session.begin()
        super().__init__()
        self.over = False
        self._handled = sys.exc_info()[1]
        self.checked: set[str] = set()
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.num_calls = 0

    @abstractmethod
    def text(self) -> str:
        """The calls so far, in words."""

    @abstractmethod
    def script(self, broken: LawBroken) -> str:
        """The calls so far as a Python file whose exit status is 1 as long as the law is broken."""

    @abstractmethod
    def size(self) -> tuple[int, ...]:
        """How long the story is; the smallest is shown."""

    def finish(self) -> None:
        """The last checks of a story."""

    def covered(self, axis: str, value: str) -> None:
        """Count that something occurred."""
        self.coverage[axis, value] += 1

    def check(
        self,
        law: Law,
        holds: bool,
        message: Callable[[], str],
        proof: Callable[[], Iterable[str]] = tuple,
    ) -> bool:
        """Check a law.

        Args:
            law: which one.
            holds: whether it is kept.
            message: what was seen, and what should have been.
            proof: as in ``LawBroken``.

        Returns:
            ``holds``; False only for a law that is known to be broken.
        """
        self.checked.add(law.name)
        if not holds:
            self._fail(LawBroken(law, message(), proof()))
        return holds

    def demand(
        self,
        law: Law,
        holds: bool,
        message: Callable[[], str],
        proof: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Check a law without which the story cannot go on; as ``check`` otherwise."""
        if not self.check(law, holds, message, proof):
            self.give_up()

    def give_up(self) -> None:
        """End the story, because a law that is known to be broken was broken again."""
        self.over = True
        hypothesis.reject()

    def _fail(self, broken: LawBroken) -> None:
        if broken.law.name in self.session.muted:
            return
        self.over = True
        self.session.fail(self, broken)

    def teardown(self) -> None:
        """Called by Hypothesis at the end of a story."""
        try:
            # What Hypothesis cut short has no end that could be looked at.
            cut_short = sys.exc_info()[1] is not self._handled
            if not (self.over or cut_short):
                self.finish()
        finally:
            self.session.end(self.checked, self.num_calls, self.coverage)


def search(
    machine: type[LawMachine],
    budget: Budget,
    seed: int,
    *,
    shrink: bool = True,
    first_only: bool = False,
    told: Callable[[int], None] = lambda stories: None,
) -> Found:
    """Tell stories until the budget is used up, and collect every law that they break.

    A law that is broken is put aside and the search goes on for the others; what they show may be
    a consequence of the first.

    Args:
        machine: tells the stories.
        budget: how many.
        seed: of the stories; the same seed, the same stories, as long as time suffices.
        shrink: whether failing stories are made small.
        first_only: whether the search ends with the first broken law.
        told: called with the number of stories so far.
    """
    found = Found()
    started = time.monotonic()
    searched = 0.0
    while found.stories < budget.stories and searched < budget.seconds:
        rest = Budget(budget.stories - found.stories, budget.steps, budget.seconds - searched)
        before = time.monotonic()
        session = Session(
            rest,
            before + rest.seconds,
            frozenset(found.failures),
            shrink,
            lambda stories, base=found.stories: told(base + stories),  # type: ignore[misc]
        )
        _tell(machine, session, rest, zlib.crc32(f"{seed} {len(found.failures)}".encode()))
        # Time for shrinking does not count.
        searched += (session.broken_at or time.monotonic()) - before
        found.add(session.found)
        if session.broken is None:
            break
        found.stories += 1
        if first_only:
            break
    found.seconds = time.monotonic() - started
    return found


def _tell(machine: type[LawMachine], session: Session, budget: Budget, seed: int) -> None:
    bound = type(machine.__name__, (machine,), {"session": session})
    settings = hypothesis.settings(
        max_examples=budget.stories,
        stateful_step_count=budget.steps,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)
            run_state_machine_as_test(hypothesis.seed(seed)(bound), settings=settings)
    except SearchOver:
        pass
    except Unsatisfiable:
        # Every story runs into a law that is known to be broken: there is nothing more to find.
        if not session.muted:
            raise
    except Exception:
        # What broke is in the session. That Hypothesis calls it flaky says nothing: the part may
        # be, and a search that is over stops in the middle of what Hypothesis expects.
        if session.broken is None and not session.over:
            raise
