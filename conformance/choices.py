"""Settings of the suites that are chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..core.errors import ConfigError
from ..plugins.validation import did_you_mean

T = TypeVar("T")


def named(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The value of a setting.

    Args:
        kind: the setting, without its dashes.
        name: what was asked for.
        known: what there is, by name.

    Raises:
        ConfigError: there is none of that name; the message lists those that there are.
    """
    if name not in known:
        raise ConfigError(
            f"--{kind} {name!r} is unknown{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    return known[name]
