"""The conformance suite over the flashinfer backend on top of the double."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from support.flashinfer_cases import OnTheDouble, library

from jackfield.conformance.attention.contract import AttentionContract

__all__ = ["library"]


@pytest.mark.usefixtures("library")
class TestConformance(AttentionContract):
    backend = OnTheDouble
    scale = "tiny"
    only: ClassVar[Any] = {
        "head_size": ["64"],
        "dtype": ["bfloat16"],
    }
