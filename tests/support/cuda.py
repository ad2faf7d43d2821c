"""What tests on a CUDA device share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Waiting for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
