"""The attention suite for ``pytest --pyargs``; see ``pytest_plugin`` for the command."""

from __future__ import annotations

import pytest

from jackfield.conformance.attention.axes import parse_only
from jackfield.conformance.attention.contract import AttentionContract
from jackfield.conformance.resolve import part_class
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import PartKind


class TestAttentionBackend(AttentionContract):
    """Every law, on the backend that ``--attention-backend`` names."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        config = metafunc.config
        name = config.getoption("--attention-backend", default=None)
        if name is None:
            raise pytest.UsageError(
                "--attention-backend NAME is needed, with -p jackfield.conformance.pytest_plugin"
            )
        cls = type(self)
        cls.backend = part_class(discover(), PartKind.ATTENTION_BACKEND, name)
        cls.device = config.getoption("--conformance-device")
        cls.profile = config.getoption("--conformance-profile")
        cls.seed = config.getoption("--conformance-seed")
        cls.only = parse_only(config.getoption("--conformance-only"))
        super().pytest_generate_tests(metafunc)
