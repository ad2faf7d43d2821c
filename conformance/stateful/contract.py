"""What the suites of stateful parts are inside a test suite."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..results import Report, Status
from .run import StatefulRun
from .suite import StatefulOptions, failure_text


def assert_passed(report: Report, part: type[Any]) -> None:
    """Whether a part conforms.

    Raises:
        AssertionError: a law does not hold, or something was not exercised; the message holds the
            shortest story of each law.
    """
    if report.ok:
        return
    failures = [failure_text(one) for one in report.results if one.status is Status.FAILED]
    failures += [f"in no story: {one}" for one in report.uncovered]
    raise AssertionError(f"{part.__name__} does not conform:\n\n" + "\n\n".join(failures))


class StatefulContract:
    """A suite in which every law is a test of its own.

    All laws are checked in the same stories, which the first test tells for the others.

    Class attributes:
        profile, seed, jobs, reproducers: as in ``StatefulOptions``.
    """

    profile: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    jobs: ClassVar[int] = 1
    reproducers: ClassVar[Path | None] = None
    _told: ClassVar[tuple[StatefulRun[Any], Report] | None] = None

    @classmethod
    @abstractmethod
    def _run(cls) -> StatefulRun[Any]:
        """What is to be run.

        Raises:
            TypeError: the subclass does not say on what.
            ConfigError: something asked for is unknown, or a part cannot be built.
        """

    @classmethod
    def suite_report(cls) -> Report:
        """The report that the tests of this class share."""
        run = cls._run()
        # A subclass finds its parent's report here, which is its own only if all settings are.
        if cls._told is None or cls._told[0] != run:
            cls._told = run, run.try_all()
        return cls._told[1]

    @classmethod
    def _options(cls) -> StatefulOptions:
        return StatefulOptions(cls.profile, cls.seed, cls.jobs, cls.reproducers)

    def test_everything_declared_is_exercised(self) -> None:
        """Nothing that the parts make possible is without an example."""
        uncovered = type(self).suite_report().uncovered
        assert not uncovered, f"in no story: {', '.join(uncovered)}"

    @classmethod
    def _judge(cls, law: str) -> None:
        """Fail or skip a test with what became of a law."""
        (result,) = [one for one in cls.suite_report().results if one.law == law]
        if result.status is Status.NOT_CLAIMED:
            pytest.skip(result.reason)
        if result.status is Status.FAILED:
            pytest.fail(failure_text(result), pytrace=False)
