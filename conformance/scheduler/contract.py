"""The suite inside a test suite: a contract class for pytest, and one function for everything else.

class TestMyScheduler(SchedulerContract):
    scheduler = MyScheduler
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from ...core.block_manager import BlockManager
from ...core.options import PartOptions
from ...core.scheduler import Scheduler
from ...core.scheduling_policy import SchedulingPolicy
from ..results import PropertyResult, Report, Status
from ..stateful.suite import SilentObserver, StatefulOptions, failure_text
from .laws import ALL_LAWS
from .suite import BLOCK_MANAGER, POLICY, SchedulerRun, run_suite, subject_of
from .world import Subject


def assert_conforms(
    scheduler: type[Scheduler],
    *,
    block_manager: str | type[BlockManager] = BLOCK_MANAGER,
    policy: str | type[SchedulingPolicy] = POLICY,
    options: PartOptions | None = None,
    profile: str = "quick",
    seed: int = 0,
    jobs: int = 1,
    reproducers: Path | None = None,
) -> Report:
    """Try every law on a scheduler.

    Args:
        scheduler: the class.
        block_manager, policy: the parts that it is given: their names or classes.
        options: passed to its constructor.
        profile, seed, jobs, reproducers: as in ``StatefulOptions``.

    Returns:
        The report.

    Raises:
        AssertionError: a law does not hold, or something was not exercised; the message holds the
            shortest story of each law.
        ConfigError: an argument is unknown, or a part cannot be built.
        PluginError: a part that is named cannot be found.
    """
    chosen = StatefulOptions(
        profile, seed, jobs, reproducers, f"assert_conforms({scheduler.__name__})"
    )
    report = run_suite(_subject(scheduler, block_manager, policy, options), chosen)
    if not report.ok:
        failures = [failure_text(one) for one in report.results if one.status is Status.FAILED]
        failures += [f"in no story: {one}" for one in report.uncovered]
        raise AssertionError(f"{scheduler.__name__} does not conform:\n\n" + "\n\n".join(failures))
    return report


def _subject(
    scheduler: type[Scheduler],
    block_manager: str | type[BlockManager],
    policy: str | type[SchedulingPolicy],
    options: PartOptions | None,
) -> Subject:
    return replace(subject_of(scheduler, block_manager, policy), options=options)


class SchedulerContract:
    """Every law of the suite as a test of its own; a subclass names the scheduler.

    All laws are checked in the same stories, which the first test tells for the others.

    Class attributes:
        scheduler: the class under test.
        block_manager, policy: the parts that it is given: their names or classes.
        options: passed to its constructor.
        profile, seed, jobs, reproducers: as in ``StatefulOptions``.
    """

    scheduler: ClassVar[type[Scheduler] | None] = None
    block_manager: ClassVar[str | type[BlockManager]] = BLOCK_MANAGER
    policy: ClassVar[str | type[SchedulingPolicy]] = POLICY
    options: ClassVar[PartOptions | None] = None
    profile: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    jobs: ClassVar[int] = 1
    reproducers: ClassVar[Path | None] = None
    _told: ClassVar[tuple[SchedulerRun, Report] | None] = None

    @classmethod
    def suite_report(cls) -> Report:
        """The report that the tests of this class share."""
        run = cls._run()
        # A subclass finds its parent's report here, which is its own only if all settings are.
        if cls._told is None or cls._told[0] != run:
            found = run.run(SilentObserver())
            cls._told = run, run.report(found, run.results(found))
        return cls._told[1]

    @classmethod
    def _run(cls) -> SchedulerRun:
        if cls.scheduler is None:
            raise TypeError(f"{cls.__name__} has to set `scheduler` to a scheduler class")
        options = StatefulOptions(cls.profile, cls.seed, cls.jobs, cls.reproducers)
        subject = _subject(cls.scheduler, cls.block_manager, cls.policy, cls.options)
        return SchedulerRun.prepare(subject, options)

    @pytest.mark.parametrize("law", [law.name for law in ALL_LAWS])
    def test_law(self, law: str) -> None:
        """One law."""
        (result,) = [one for one in type(self).suite_report().results if one.law == law]
        _judge(result)

    def test_everything_declared_is_exercised(self) -> None:
        """Nothing that the parts make possible is without an example."""
        uncovered = type(self).suite_report().uncovered
        assert not uncovered, f"in no story: {', '.join(uncovered)}"


def _judge(result: PropertyResult) -> None:
    if result.status is Status.NOT_CLAIMED:
        pytest.skip(result.reason)
    if result.status is Status.FAILED:
        pytest.fail(failure_text(result), pytrace=False)
