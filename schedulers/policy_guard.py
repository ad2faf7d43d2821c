"""Calls into a scheduling policy: what it raises is attributed to it, what it asks for and cannot
have is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

from ..core.errors import PluginError
from ..core.scheduling_policy import (
    PreemptionMode,
    Progress,
    Proposal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
)
from .entry import Entry

T = TypeVar("T")

MAX_USELESS_NAMES = 100  # what an iterable may yield in vain, so that an endless one ends


class PolicyGuard:
    """Stands between the scheduler and its policy.

    Attributes:
        clipped: what was reported since the step began, one sentence each.
        wants_progress: whether the policy overrides ``on_progress``.
    """

    def __init__(self, policy: SchedulingPolicy, view: SchedulerView, strict: bool) -> None:
        self._policy = policy
        self._view = view
        self._strict = strict
        self.clipped: list[str] = []
        own = getattr(policy.on_progress, "__func__", None)
        self.wants_progress = own is not SchedulingPolicy.on_progress

    def report(self, sentence: str) -> None:
        """Take note of something impossible in a proposal. Raises PluginError in strict mode."""
        if self._strict:
            raise PluginError(
                f"scheduling policy {self._policy.name!r}: {sentence} "
                "(an error because strict_policy is on)"
            )
        self.clipped.append(sentence)

    def on_arrival(self, request: RequestView) -> Verdict:
        """Ask whether to take a request."""
        verdict = self._call("on_arrival", self._policy.on_arrival, self._view, request)
        if not isinstance(verdict, Verdict):
            self._wrong("on_arrival", "a Verdict", verdict)
        return verdict

    def propose(self) -> Proposal:
        """Ask what the next step should do."""
        proposal = self._call("propose", self._policy.propose, self._view)
        if not isinstance(proposal, Proposal):
            self._wrong("propose", "a Proposal", proposal)
        for field in ("grants", "preemption_modes"):
            if not isinstance(getattr(proposal, field), Mapping):
                what = f"a Proposal whose {field} are a mapping"
                self._wrong("propose", what, getattr(proposal, field))
        return proposal

    def victims(
        self, beneficiary: str, running: Mapping[str, Entry]
    ) -> Iterator[tuple[Entry, PreemptionMode | None]]:
        """Ask who gives way and how, best victim first, pulled lazily.

        Args:
            beneficiary: id of the request that has no room.
            running: who may be preempted, in order of admission; shrinks as victims are taken.
        """
        num_useless = 0
        offered = self._call(
            "victims", self._policy.victims, self._view, beneficiary, tuple(running)
        )
        for item in self.pull("victims", offered):
            if not (isinstance(item, tuple) and len(item) == 2):
                self._wrong("victims", "pairs (request id, PreemptionMode)", item)
            name, mode = item
            victim = running.get(name) if isinstance(name, str) else None
            if mode is not None and not isinstance(mode, PreemptionMode):
                self._wrong("victims", "a PreemptionMode or None for each victim", mode)
            if victim is not None:
                yield victim, mode
                continue
            self.report(f"victims names {name!r}, which is not running")
            num_useless += 1
            if num_useless == MAX_USELESS_NAMES:
                return

    def on_progress(self, progress: Sequence[Progress]) -> None:
        """Tell what a step did."""
        self._call("on_progress", self._policy.on_progress, self._view, progress)

    def on_preempt(self, request_id: str, mode: PreemptionMode) -> None:
        """Tell that a request lost its blocks."""
        self._call("on_preempt", self._policy.on_preempt, self._view, request_id, mode)

    def on_finish(self, request_id: str) -> None:
        """Tell that a request ended."""
        self._call("on_finish", self._policy.on_finish, self._view, request_id)

    def pull(self, method: str, items: Iterable[T]) -> Iterator[T]:
        """Iterate over what a method of the policy returned: lazy items are policy code too."""
        iterator = self._call(method, iter, items)
        end = object()
        while True:
            item = self._call(method, next, iterator, end)
            if item is end:
                return
            yield item

    def entries(
        self, what: str, names: Iterable[str], find: Callable[[str], Entry | str]
    ) -> Iterator[Entry]:
        """The requests that a field of a proposal names, pulled lazily, each at most once.

        Args:
            what: the field.
            names: its value.
            find: gives the entry of an id, or says why it cannot be one.
        """
        seen: set[str] = set()
        num_useless = 0
        for name in self.pull("propose", names):
            found = find(name) if isinstance(name, str) else "which is not a request id"
            if isinstance(found, Entry) and name in seen:
                found = "which it has named before"
            if isinstance(found, Entry):
                seen.add(name)
                yield found
                continue
            self.report(f"{what} names {name!r}, {found}")
            num_useless += 1
            if num_useless == MAX_USELESS_NAMES:
                self.report(f"{what} is cut off after {num_useless} useless names")
                return

    def _call(self, method: str, function: Callable[..., T], *arguments: object) -> T:
        try:
            return function(*arguments)
        except Exception as error:
            raise PluginError(
                f"scheduling policy {self._policy.name!r} failed in {method}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _wrong(self, method: str, wanted: str, got: object) -> NoReturn:
        raise PluginError(
            f"scheduling policy {self._policy.name!r}: {method} must return {wanted}, got {got!r}"
        )
