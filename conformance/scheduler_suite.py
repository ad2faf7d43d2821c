"""The scheduler suite for ``pytest --pyargs``; see ``pytest_plugin`` for the command."""

from __future__ import annotations

import pytest

from jackfield.conformance.resolve import part_class
from jackfield.conformance.scheduler.contract import SchedulerContract
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind


class TestScheduler(SchedulerContract):
    """Every law, on the scheduler that ``--scheduler`` names."""

    @pytest.fixture(autouse=True)
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        config = request.config
        name = config.getoption("--scheduler", default=None)
        if name is None:
            raise pytest.UsageError(
                "--scheduler NAME is needed, with -p jackfield.conformance.pytest_plugin"
            )
        cls = type(self)
        cls.scheduler = part_class(discover(), PartKind.SCHEDULER, name)
        cls.block_manager = config.getoption("--block-manager") or cls.block_manager
        cls.policy = config.getoption("--scheduling-policy") or cls.policy
        cls.profile = config.getoption("--conformance-profile")
        cls.seed = config.getoption("--conformance-seed")
