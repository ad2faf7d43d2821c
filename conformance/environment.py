"""What a report depends on: versions, the device, where a part comes from."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

#: Distributions whose versions a report states where they are installed.
_LIBRARIES = (
    "jackfield",
    "torch",
    "triton",
    "numpy",
    "hypothesis",
    "flash-attn",
    "flash-attn-4",
    "xformers",
    "flashinfer-python",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        version = version_of(name)
        if version is not None:
            found[name] = version
    found["torch"] = torch.__version__
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """The device with the name of its model, as far as it is known."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return str(device)


def origin_of(part: type) -> str:
    """The distribution that a class comes from, with its version, or ``""``."""
    package = part.__module__.partition(".")[0]
    for name in importlib.metadata.packages_distributions().get(package, ()):
        return f"{name} {importlib.metadata.version(name)}"
    return ""
