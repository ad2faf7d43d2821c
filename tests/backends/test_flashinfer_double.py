"""The double of flashinfer is called as the library is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import ModuleType
from typing import Any

import pytest
from support import flashinfer_double as double


def parameters(function: Any) -> str:
    """Names and defaults, in one line, without ``self`` and annotations."""
    words = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        default = parameter.default
        words.append(
            parameter.name if default is parameter.empty else f"{parameter.name}={default!r}"
        )
    return " ".join(words)


def method_of(module: Any, name: str) -> Any:
    kind, method = name.split(".")
    return getattr(getattr(module, kind), method)


@pytest.mark.parametrize("name", list(double.PARAMETERS))
def test_signatures_are_those_that_were_recorded(name: str) -> None:
    assert parameters(method_of(double, name)) == double.PARAMETERS[name]


@pytest.mark.parametrize("name", list(double.PARAMETERS))
def test_recorded_signatures_are_those_of_the_library(name: str) -> None:
    library = real_library()
    assert parameters(method_of(library, name)) == double.PARAMETERS[name]


def real_library() -> ModuleType:
    """The library, where it is installed."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    flashinfer = importlib.import_module("flashinfer")
    if flashinfer.__version__ != double.VERSION:
        pytest.skip(f"the double is of flashinfer {double.VERSION}, not {flashinfer.__version__}")
    return flashinfer
