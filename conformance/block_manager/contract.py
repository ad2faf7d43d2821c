"""The suite inside a test suite: a contract class for pytest, and one function for everything else.

class TestMyManager(BlockManagerContract):
    manager = MyManager
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from ...core.block_manager import BlockManager
from ...core.options import PartOptions
from ..results import PropertyResult, Report, Status
from ..stateful.suite import SilentObserver, StatefulOptions, failure_text
from .calls import Subject
from .laws import ALL_LAWS
from .suite import BlockManagerRun, run_suite


def assert_conforms(
    manager: type[BlockManager],
    *,
    options: PartOptions | None = None,
    profile: str = "quick",
    seed: int = 0,
    jobs: int = 1,
    reproducers: Path | None = None,
) -> Report:
    """Try every law on a block manager.

    Args:
        manager: the class.
        options: passed to its constructor.
        profile, seed, jobs, reproducers: as in ``StatefulOptions``.

    Returns:
        The report.

    Raises:
        AssertionError: a law does not hold, or something was not exercised; the message holds the
            shortest story of each law.
        ConfigError: an argument is unknown.
    """
    chosen = StatefulOptions(
        profile, seed, jobs, reproducers, f"assert_conforms({manager.__name__})"
    )
    report = run_suite(Subject(manager, options), chosen)
    if not report.ok:
        failures = [failure_text(one) for one in report.results if one.status is Status.FAILED]
        failures += [f"in no story: {one}" for one in report.uncovered]
        raise AssertionError(f"{manager.__name__} does not conform:\n\n" + "\n\n".join(failures))
    return report


class BlockManagerContract:
    """Every law of the suite as a test of its own; a subclass names the manager.

    All laws are checked in the same stories, which the first test tells for the others.

    Class attributes:
        manager: the class under test.
        options: passed to its constructor.
        profile, seed, jobs, reproducers: as in ``StatefulOptions``.
    """

    manager: ClassVar[type[BlockManager] | None] = None
    options: ClassVar[PartOptions | None] = None
    profile: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    jobs: ClassVar[int] = 1
    reproducers: ClassVar[Path | None] = None
    _told: ClassVar[tuple[BlockManagerRun, Report] | None] = None

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
    def _run(cls) -> BlockManagerRun:
        if cls.manager is None:
            raise TypeError(f"{cls.__name__} has to set `manager` to a block manager class")
        options = StatefulOptions(cls.profile, cls.seed, cls.jobs, cls.reproducers)
        return BlockManagerRun.prepare(Subject(cls.manager, cls.options), options)

    @pytest.mark.parametrize("law", [law.name for law in ALL_LAWS])
    def test_law(self, law: str) -> None:
        """One law."""
        (result,) = [one for one in type(self).suite_report().results if one.law == law]
        _judge(result)

    def test_everything_declared_is_exercised(self) -> None:
        """No declared power is without an example."""
        uncovered = type(self).suite_report().uncovered
        assert not uncovered, f"in no story: {', '.join(uncovered)}"


def _judge(result: PropertyResult) -> None:
    if result.status is Status.NOT_CLAIMED:
        pytest.skip(result.reason)
    if result.status is Status.FAILED:
        pytest.fail(failure_text(result), pytrace=False)
