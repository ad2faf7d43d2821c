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
from ..results import Report
from ..stateful.contract import StatefulContract, assert_passed
from ..stateful.suite import StatefulOptions
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
    assert_passed(report, manager)
    return report


class BlockManagerContract(StatefulContract):
    """Every law of the suite as a test of its own; a subclass names the manager.

    All laws are checked in the same stories, which the first test tells for the others.

    Class attributes:
        manager: the class under test.
        options: passed to its constructor.
        profile, seed, jobs, reproducers: as in ``StatefulOptions``.
    """

    manager: ClassVar[type[BlockManager] | None] = None
    options: ClassVar[PartOptions | None] = None

    @classmethod
    def _run(cls) -> BlockManagerRun:
        if cls.manager is None:
            raise TypeError(f"{cls.__name__} has to set `manager` to a block manager class")
        return BlockManagerRun.prepare(Subject(cls.manager, cls.options), cls._options())

    @pytest.mark.parametrize("law", [law.name for law in ALL_LAWS])
    def test_law(self, law: str) -> None:
        """One law."""
        self._judge(law)
