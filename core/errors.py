"""The error tree: every failure that a user can cause or meet is one of these.

A message states what was asked, what is possible, and the setting that changes it, so that it can
be printed alone, without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class JackfieldError(Exception):
    """Root of the tree: catch it to catch everything that Jackfield raises on purpose."""


class ConfigError(JackfieldError, ValueError):
    """A setting is unknown, malformed, or contradicts another one; raised before anything loads."""


class PluginError(JackfieldError):
    """A plugin is missing, broken, written for another API, or claims a name that is taken."""


class UnsupportedError(JackfieldError):
    """A part was asked for something that it does not declare.

    Attributes:
        reasons: one sentence per obstacle, each naming the offending value and what is possible.
    """

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        self.reasons: tuple[str, ...] = tuple(reasons)
        super().__init__(f"{subject}: {'; '.join(self.reasons)}")


class ModelError(JackfieldError):
    """A model cannot be found or read: missing or damaged file, unsupported architecture."""


class RequestError(JackfieldError, ValueError):
    """One request is wrong (HTTP 4xx); every other request is unaffected."""


class CapacityError(JackfieldError):
    """Memory does not suffice: the message holds both numbers and the setting that changes them."""


class EngineDeadError(JackfieldError):
    """The engine failed in the middle of a step and can answer nothing any more."""
