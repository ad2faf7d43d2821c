"""A run of a stateful suite, from its options to its report; a subclass says what is tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from ..results import PropertyResult, Report, Status
from .search import Budget, Found, LawMachine
from .suite import Law, SilentObserver, StatefulObserver, StatefulOptions, report_of, results_of
from .workers import shared_search

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True)
class StatefulRun(ABC, Generic[SubjectT]):
    """A run that is ready to go.

    Attributes:
        subject, options: what to run on what.
        budget: of the whole run.

    Class attributes:
        suite: its name.
        all_laws: in the order of the report.
        processes: the one about other processes.
    """

    subject: SubjectT
    options: StatefulOptions
    budget: Budget

    suite: ClassVar[str]
    all_laws: ClassVar[tuple[Law, ...]]
    processes: ClassVar[Law]

    @property
    @abstractmethod
    def part(self) -> type[Any]:
        """The class that is tried."""

    @property
    @abstractmethod
    def powers(self) -> frozenset[str]:
        """What laws may depend on."""

    @property
    @abstractmethod
    def importable(self) -> bool:
        """Whether another process can import all classes of the subject."""

    @abstractmethod
    def machine(self) -> Callable[[], type[LawMachine]]:
        """Makes the machine that tells stories; can be pickled."""

    @abstractmethod
    def try_processes(self, found: Found) -> None:
        """Tell kept stories again in other processes, and add what comes of it."""

    @abstractmethod
    def to_cover(self) -> Iterable[tuple[str, str, str]]:
        """What has to occur in stories: axis, value, and the power that makes it possible, if it
        needs one."""

    @abstractmethod
    def declared(self) -> Mapping[str, str]:
        """What the part says of itself, by name."""

    @abstractmethod
    def excuse(self, law: Law, found: Found) -> str:
        """Why a law that was not broken is not owed, in the words of the suite; "" if it is, or if
        there is no better word than that a power is not declared."""

    def run(self, observer: StatefulObserver) -> Found:
        """Tell the stories.

        Raises:
            JackfieldError: a process of the run died.
        """
        observer.started("stories", "", self.budget.stories)
        found = shared_search(
            self.machine(),
            self.budget,
            self.options.seed,
            self.options.processes if self.importable else 1,
            lambda stories: observer.progressed("stories", "", stories),
        )
        observer.started(self.processes.name, "", len(found.samples))
        self.try_processes(found)
        return found

    def results(self, found: Found) -> list[PropertyResult]:
        """What became of each law."""
        name = str(getattr(self.part, "name", self.part.__name__))
        results = results_of(self.all_laws, found, self.powers, name, self.options.reproducers)
        return [
            self._explained(law, result, found)
            for law, result in zip(self.all_laws, results, strict=True)
        ]

    def _explained(self, law: Law, result: PropertyResult, found: Found) -> PropertyResult:
        why = "" if law.name in found.failures else self.excuse(law, found)
        if not why:
            return result
        return replace(result, status=Status.NOT_CLAIMED, reason=why, seconds=0.0)

    def report(self, found: Found, results: list[PropertyResult]) -> Report:
        """All results, with what they depend on."""
        return report_of(
            self.suite,
            self.part,
            results,
            found.stories,
            self.budget,
            self.options,
            # After a failure the rest of the budget may not suffice for everything.
            {} if found.failures else self.coverage(found),
            self.declared(),
        )

    def coverage(self, found: Found) -> dict[str, dict[str, int]]:
        """How often each thing occurred that the powers make possible."""
        table: dict[str, dict[str, int]] = {}
        for axis, value, power in self.to_cover():
            if not power or power in self.powers:
                count = found.coverage.get(axis, Counter())[value]
                table.setdefault(axis, {})[value] = count
        return table

    def try_all(self, observer: StatefulObserver | None = None) -> Report:
        """Try every law.

        Raises:
            JackfieldError: a process of the run died.
        """
        observer = observer or SilentObserver()
        found = self.run(observer)
        results = self.results(found)
        for result in results:
            observer.finished(result)
        return self.report(found, results)
