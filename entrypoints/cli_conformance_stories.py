"""Shows how stories are told: as other suites on a terminal, else a line now and then."""

from __future__ import annotations

import time

from .cli_conformance_progress import SuiteProgress
from .console import error_console
from .interrupts import Interrupt

#: Without a terminal, so often is said how far the stories are.
QUIET_SECONDS = 30.0


class StoryProgress(SuiteProgress):
    """Follows a run whose laws are all checked in the same stories."""

    def __init__(self, interrupt: Interrupt) -> None:
        console = error_console()
        super().__init__(interrupt, console)
        self._plain = None if console.is_terminal else console
        self._begun = self._said = time.monotonic()

    def progressed(self, law: str, variant: str, examples: int) -> None:
        """Move the bar; without a terminal, say how far it is if nothing was said for a while."""
        super().progressed(law, variant, examples)
        now = time.monotonic()
        if self._plain is not None and now - self._said >= QUIET_SECONDS:
            self._said = now
            self._plain.print(f"{examples} {law} in {now - self._begun:.0f} s")
