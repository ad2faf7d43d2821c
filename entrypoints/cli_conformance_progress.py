"""Shows how a conformance run goes on: live on a terminal, else one line for each finished law."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..conformance.attention.suite import SuiteObserver
from ..conformance.report_text import percentage
from ..conformance.results import PropertyResult, Status
from .console import error_console
from .interrupts import Interrupt


class SuiteProgress(SuiteObserver):
    """Follows a run on standard error, and ends it between two examples after Ctrl-C.

    Attributes:
        results: of the laws that are finished, in that order.
    """

    def __init__(self, interrupt: Interrupt, console: Console | None = None) -> None:
        self.results: list[PropertyResult] = []
        self._interrupt = interrupt
        self._console = console or error_console()
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed} examples"),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=5,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._summary = self._live.add_task("no law finished", total=None, visible=False)
        self._running: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> SuiteProgress:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the live lines away."""
        self._live.stop()

    def started(self, law: str, variant: str, planned: int) -> None:
        """Show a line for the law."""
        self._interrupt.check()
        self._running[law, variant] = self._live.add_task(
            escape(_name(law, variant)), total=planned or None
        )

    def progressed(self, law: str, variant: str, examples: int) -> None:
        """Move the law's bar."""
        self._interrupt.check()
        self._live.update(self._running[law, variant], completed=examples)

    def finished(self, result: PropertyResult) -> None:
        """Take the law's line away; without a terminal, print what became of it."""
        self.results.append(result)
        task = self._running.pop((result.law, result.variant), None)
        if task is not None:
            self._live.remove_task(task)
        if self._console.is_terminal:
            failed = sum(one.status is Status.FAILED for one in self.results)
            self._live.update(
                self._summary,
                description=f"{len(self.results)} finished, {failed} failed",
                completed=sum(one.examples for one in self.results),
                visible=True,
            )
        else:
            self._console.print(escape(_line(result)))
        self._interrupt.check()


def _name(law: str, variant: str) -> str:
    return f"{law}, {variant}" if variant else law


def _line(result: PropertyResult) -> str:
    name = _name(result.law, result.variant)
    if result.status is Status.NOT_CLAIMED:
        return f"{name}: not claimed: {result.reason}"
    word = "FAIL" if result.status is Status.FAILED else "pass"
    error = ""
    if result.max_error is not None:
        error = f", errors up to {percentage(result.max_error)} of the bound"
    return f"{name}: {word}, {result.examples} examples in {result.seconds:.1f} s{error}"
