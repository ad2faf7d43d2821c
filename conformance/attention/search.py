"""Looks for a case in which a backend breaks a law, and makes it small."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.errors import HypothesisWarning

from .axes import SCALES, Axes
from .cases import AttentionCase
from .laws import Law, NotTried
from .strategies import cases
from .subject import Subject

#: Most times that a failing case is tried again, and seconds after which it is not any more.
_REPEATS = 10
_REPEAT_SECONDS = 1.0
#: Shrinking ends after this many seconds, with the smallest case found so far.
SHRINK_SECONDS = 20.0


def keep_out_of_the_working_directory() -> None:
    """Let Hypothesis keep what it learns of the code in a temporary folder.

    For processes of our own only: in a test suite its folder is the suite's business.
    """
    set_hypothesis_home_dir(str(Path(tempfile.gettempdir()) / "jackfield-hypothesis"))


@contextmanager
def _few_threads(axes: Axes) -> Iterator[None]:
    """One thread where tensors are so small that handing them to others takes longer."""
    threads = torch.get_num_threads()
    if axes.scale.max_heads < SCALES["large"].max_heads:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Search:
    """What was found so far.

    Attributes:
        examples: cases tried, not counting those of shrinking.
        max_error: largest error as a share of its bound.
        worst: the case that had it; None if no error was measured.
        case: the smallest failing case; None while all hold.
        violation: what it shows.
        flaky: whether a case failed once and then did not.
    """

    examples: int = 0
    max_error: float = 0.0
    worst: AttentionCase | None = None
    case: AttentionCase | None = None
    violation: Exception | SystemExit | None = None
    flaky: bool = False
    _failed_at: float = field(default=0.0, repr=False)

    @property
    def failed(self) -> bool:
        """Whether a case failed."""
        return self.violation is not None

    def attempt(self, law: Law, subject: Subject, case: AttentionCase) -> None:
        """Try one case and remember what came of it.

        Raises:
            Exception: whatever the law or the backend raised.
        """
        if not self.failed:
            self.examples += 1
        try:
            error = law.check(subject, case)
            if error > self.max_error:
                self.max_error, self.worst = error, case
        except NotTried:
            raise
        except (Exception, SystemExit) as violation:
            if not self.failed:
                self._failed_at = time.monotonic()
            self.case, self.violation = case, violation
            raise

    def repeats(self, law: Law, subject: Subject) -> bool:
        """Whether the case that failed fails whenever it is tried again.

        That is twice at least, and more often as long as it takes no time to speak of.
        """
        if self.case is None:
            return True
        started = time.monotonic()
        for number in range(_REPEATS):
            if number >= 2 and time.monotonic() - started > _REPEAT_SECONDS:
                break
            try:
                law.check(subject, self.case)
            except (Exception, SystemExit):
                continue
            return False
        return True

    @property
    def shrunk_enough(self) -> bool:
        """Whether the time for shrinking is over."""
        return self.failed and time.monotonic() - self._failed_at > SHRINK_SECONDS


def search(
    law: Law,
    subject: Subject,
    axes: Axes,
    *,
    examples: int,
    seconds: float,
    seed: int,
    first: Iterable[AttentionCase] = (),
    seen: Callable[[AttentionCase], None] = lambda case: None,
    shrink: bool = True,
) -> Search:
    """Try a law on many cases.

    Args:
        law: what should hold.
        subject: the backend.
        axes: what cases may vary in.
        examples: most random cases.
        seconds: no new random case is begun after that long.
        seed: of the random cases.
        first: cases that are tried before the random ones, all of them.
        seen: called with every case that is tried, until one fails.
        shrink: whether a failing case is made small.
    """
    found = Search()
    with _few_threads(axes):
        for case in _fitting(law, subject, first, axes):
            try:
                found.attempt(law, subject, case)
            except (Exception, SystemExit):
                if not found.failed:
                    raise
                if shrink:
                    found = _smaller(law, subject, axes, found, seed)
                break
            seen(case)
        if not found.failed:
            _random_cases(law, subject, axes, found, examples, seconds, seed, seen, shrink)
        if found.failed and shrink:
            found.flaky = not found.repeats(law, subject)
    return found


def _fitting(
    law: Law, subject: Subject, candidates: Iterable[AttentionCase], axes: Axes
) -> Iterator[AttentionCase]:
    """The cases that a law can be tried on, as it needs them, each once."""
    kind = law.kind_for("mixed" in axes.batch)
    tried = set()
    for case in candidates:
        fitted = law.fit(case)
        if kind == "one" and not fitted.sequences:
            continue
        if kind == "decode" and any(shape.query_len != 1 for shape in fitted.sequences):
            continue
        if fitted not in tried and not subject.refuses(fitted):
            tried.add(fitted)
            yield fitted


def _smaller(law: Law, subject: Subject, axes: Axes, found: Search, seed: int) -> Search:
    """A fixed case failed: look for a smaller random one that fails alike, for a short while."""
    smaller = Search(examples=found.examples)
    _random_cases(law, subject, axes, smaller, 200, 10.0, seed, lambda case: None)
    if type(smaller.violation) is not type(found.violation):
        return found
    smaller.examples = found.examples
    smaller.max_error = max(smaller.max_error, found.max_error)
    return smaller


def _random_cases(
    law: Law,
    subject: Subject,
    axes: Axes,
    found: Search,
    examples: int,
    seconds: float,
    seed: int,
    seen: Callable[[AttentionCase], None],
    shrink: bool = True,
) -> None:
    if examples < 1:
        return
    deadline = time.monotonic() + seconds

    def attempt(case: AttentionCase) -> None:
        case = law.fit(case)
        hypothesis.assume(not subject.refuses(case))
        if found.shrunk_enough:
            # Hypothesis tries the smallest case once more before it ends.
            if case == found.case and found.violation is not None:
                raise found.violation
            return
        if not found.failed and time.monotonic() > deadline:
            return
        found.attempt(law, subject, case)
        if not found.failed:
            seen(case)

    test = hypothesis.given(cases(axes, law.kind_for("mixed" in axes.batch)))(attempt)
    test = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(test)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)
            hypothesis.seed(seed)(test)()
    except (Exception, SystemExit):
        # What a case raised is in ``found``; that Hypothesis calls it flaky says nothing, since
        # shrinking may have been cut short.
        if not found.failed:
            raise
