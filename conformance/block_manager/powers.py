"""The powers that a block manager may declare."""

from __future__ import annotations

from ...core.block_manager import BlockManager
from ...core.errors import ConfigError
from ...plugins.validation import did_you_mean

POWERS = ("fork", "lookahead", "prefix_caching", "swap")


def check_powers(manager: type[BlockManager]) -> None:
    """Refuse a manager with a power that does not exist.

    Raises:
        ConfigError: with the power, and those that there are.
    """
    for power in sorted(set(manager.powers) - set(POWERS)):
        raise ConfigError(
            f"block manager {manager.name!r} declares the power {power!r}, which does not exist"
            f"{did_you_mean(power, POWERS)} (powers: {', '.join(POWERS)})"
        )
