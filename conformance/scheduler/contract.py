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
from ..results import Report
from ..stateful.contract import StatefulContract, assert_passed
from ..stateful.suite import StatefulOptions
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
    assert_passed(report, scheduler)
    return report


def _subject(
    scheduler: type[Scheduler],
    block_manager: str | type[BlockManager],
    policy: str | type[SchedulingPolicy],
    options: PartOptions | None,
) -> Subject:
    return replace(subject_of(scheduler, block_manager, policy), options=options)


class SchedulerContract(StatefulContract):
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

    @classmethod
    def _run(cls) -> SchedulerRun:
        if cls.scheduler is None:
            raise TypeError(f"{cls.__name__} has to set `scheduler` to a scheduler class")
        subject = _subject(cls.scheduler, cls.block_manager, cls.policy, cls.options)
        return SchedulerRun.prepare(subject, cls._options())

    @pytest.mark.parametrize("law", [law.name for law in ALL_LAWS])
    def test_law(self, law: str) -> None:
        """One law."""
        self._judge(law)
