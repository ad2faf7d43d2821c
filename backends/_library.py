"""Optional packages that attention backends stand on: whether they are here, and why not."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType

import torch
from packaging.version import InvalidVersion, Version

from ..core.errors import UnsupportedError


@dataclass(frozen=True)
class Library:
    """A package that is imported only when a backend that needs it is chosen or asked about.

    Attributes:
        distribution: its name for pip, such as ``flash-attn``.
        module: the module that the backend calls. It is what is looked for: another distribution
            may own the same top-level name.
        extra: the extra of Jackfield that installs it; None if there is none.
        at_least: the first supported version.
        below: the first version that is not supported any more.
    """

    distribution: str
    module: str
    extra: str | None
    at_least: str
    below: str

    def missing(self, device: torch.device) -> str | None:
        """Why the library cannot be used, in a sentence; None if it can.

        The module itself is imported on CUDA devices only: elsewhere the library has no use.
        """
        found = self.version()
        if found is None:
            return f"{self.distribution} is not installed; install it with: {self._install}"
        if not self._supports(found):
            return (
                f"{self.distribution} {found} is installed, and versions from {self.at_least} to "
                f"below {self.below} are supported; install one with: {self._install}"
            )
        if device.type != "cuda":
            return None
        failure = _import_failure(self.module)
        if failure is None:
            return None
        return f"{self.distribution} {found} cannot be imported: {failure}"

    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def load(self) -> ModuleType:
        """The module.

        Raises:
            ImportError: see ``missing``.
        """
        return importlib.import_module(self.module)

    def require(self, backend: str, device: torch.device) -> ModuleType:
        """The module, for a backend that is being constructed.

        Raises:
            UnsupportedError: with what ``missing`` says.
        """
        reason = self.missing(device)
        if reason is not None:
            raise UnsupportedError(f"attention backend {backend!r}", [reason])
        return self.load()

    def _supports(self, version: str) -> bool:
        try:
            return Version(self.at_least) <= Version(version) < Version(self.below)
        except InvalidVersion:
            return False

    @property
    def _install(self) -> str:
        if self.extra is not None:
            return f"pip install 'jackfield[{self.extra}]'"
        return f"pip install '{self.distribution}>={self.at_least},<{self.below}'"


@cache
def _import_failure(module: str) -> str | None:
    """What importing a module raised, in a line. Compiled libraries raise all kinds of errors.

    What a library warns of while it is imported is nobody's business here, and a program that turns
    warnings into errors must not lose the library by it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    return None
