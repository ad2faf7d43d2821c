"""The block manager suite for ``pytest --pyargs``; see ``pytest_plugin`` for the command."""

from __future__ import annotations

import pytest

from jackfield.conformance.block_manager.contract import BlockManagerContract
from jackfield.conformance.resolve import part_class
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind


class TestBlockManager(BlockManagerContract):
    """Every law, on the block manager that ``--block-manager`` names."""

    @pytest.fixture(autouse=True)
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        config = request.config
        name = config.getoption("--block-manager", default=None)
        if name is None:
            raise pytest.UsageError(
                "--block-manager NAME is needed, with -p jackfield.conformance.pytest_plugin"
            )
        cls = type(self)
        cls.manager = part_class(discover(), PartKind.BLOCK_MANAGER, name)
        cls.profile = config.getoption("--conformance-profile")
        cls.seed = config.getoption("--conformance-seed")
