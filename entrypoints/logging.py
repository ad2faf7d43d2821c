"""Logging: one handler on the ``jackfield`` logger, its level from ``JACKFIELD_LOGGING_LEVEL``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rich.logging import RichHandler

from ..core.errors import ConfigError
from .console import error_console

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure_logging(environ: Mapping[str, str], *, application: bool = False) -> None:
    """Send Jackfield's log to standard error.

    Args:
        environ: where ``JACKFIELD_LOGGING_LEVEL`` is looked up; default WARNING.
        application: whether this process is Jackfield's own. In another's, handlers that it has
            set on the root logger are trusted to show the log.

    Raises:
        ConfigError: ``JACKFIELD_LOGGING_LEVEL`` is no level.
    """
    level = environ.get("JACKFIELD_LOGGING_LEVEL", "WARNING").upper()
    if level not in _LEVELS:
        raise ConfigError(
            f"JACKFIELD_LOGGING_LEVEL={level!r} is no level: use one of {', '.join(_LEVELS)}"
        )
    logger = logging.getLogger("jackfield")
    logger.setLevel(level)
    if logger.handlers or (logging.getLogger().handlers and not application):
        return
    console = error_console()
    handler = RichHandler(
        console=console, show_path=False, markup=False, highlighter=None, log_time_format="[%X]"
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
