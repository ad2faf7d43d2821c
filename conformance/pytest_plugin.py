"""Runs a conformance suite on any installed part from the pytest command line.

    pytest -p jackfield.conformance.pytest_plugin --pyargs jackfield.conformance.attention_suite \\
        --attention-backend NAME
    pytest -p jackfield.conformance.pytest_plugin \\
        --pyargs jackfield.conformance.block_manager_suite --block-manager NAME
    pytest -p jackfield.conformance.pytest_plugin \\
        --pyargs jackfield.conformance.scheduler_suite --scheduler NAME
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suites."""
    group = parser.getgroup("jackfield", "conformance of Jackfield's parts")
    group.addoption(
        "--attention-backend",
        metavar="NAME",
        help="attention backend to test: its registered name, or package.module:Class",
    )
    group.addoption(
        "--block-manager",
        metavar="NAME",
        help="block manager to test, or to test a scheduler with: its registered name, or "
        "package.module:Class",
    )
    group.addoption(
        "--scheduler",
        metavar="NAME",
        help="scheduler to test: its registered name, or package.module:Class",
    )
    group.addoption(
        "--scheduling-policy",
        metavar="NAME",
        help="policy to test a scheduler with (default: fcfs)",
    )
    group.addoption(
        "--conformance-profile",
        default="quick",
        metavar="PROFILE",
        help="size of the run: quick (default), full or soak",
    )
    group.addoption(
        "--conformance-device",
        default="cpu",
        metavar="DEVICE",
        help="where the part runs (default: cpu)",
    )
    group.addoption(
        "--conformance-seed", type=int, default=0, metavar="N", help="seed of the random cases"
    )
    group.addoption(
        "--conformance-only",
        action="append",
        default=[],
        metavar="AXIS=VALUES",
        help="narrow an axis, such as head_size=64,128; may be repeated",
    )
