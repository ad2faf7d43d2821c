"""What a policy proposes for a step, clipped to what is possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..core.scheduler import SchedulerConfig
from ..core.scheduling_policy import PreemptionMode, Proposal
from .entry import Entry
from .policy_guard import PolicyGuard


@dataclass(frozen=True)
class StepLimits:
    """A proposal that can be carried out; the defaults are first come, first served.

    Attributes:
        token_budget: most tokens of the step.
        prefill_budget: most tokens of the step for requests with more than one to compute.
        chunk_size: most tokens of one request in the step.
        max_admissions: most requests to admit.
        max_skips: how many that do not fit may be passed over before admission ends.
        preempt: running requests that give up their blocks first.
        pause: ids of running requests that compute nothing.
        running_order: running requests that get their tokens first.
        grants: chunk sizes of single requests.
        admission_order: ids in the policy's order, not checked yet; None is order of arrival.
        resume_order: likewise for swapped requests.
        preemption_modes: modes of those in ``preempt`` that the policy wants a certain one for.
    """

    token_budget: int
    prefill_budget: int
    chunk_size: int
    max_admissions: int
    max_skips: int = 0
    preempt: tuple[Entry, ...] = ()
    pause: frozenset[str] = frozenset()
    running_order: tuple[Entry, ...] = ()
    grants: Mapping[str, int] = field(default_factory=dict)
    admission_order: Iterable[str] | None = None
    resume_order: Iterable[str] | None = None
    preemption_modes: Mapping[str, PreemptionMode] = field(default_factory=dict)


def default_limits(config: SchedulerConfig) -> StepLimits:
    """The limits of a step about which nothing is proposed."""
    most = config.max_num_batched_tokens
    chunk_size = config.long_prefill_token_threshold
    return StepLimits(
        token_budget=most,
        prefill_budget=most,
        chunk_size=most if chunk_size is None else min(chunk_size, most),
        max_admissions=config.max_num_seqs,
    )


def is_empty(proposal: Proposal) -> bool:
    """Whether a proposal leaves everything to the defaults."""
    return (
        proposal.admission_order is None
        and proposal.resume_order is None
        and proposal.token_budget is None
        and proposal.prefill_budget is None
        and proposal.max_admissions is None
        and not proposal.max_skips
        and not proposal.running_order
        and not proposal.grants
        and not proposal.pause
        and not proposal.preempt
        and not proposal.preemption_modes
    )


class Clipper:
    """Turns proposals into limits and reports what it had to change.

    The order is fixed: token_budget, prefill_budget, max_admissions, max_skips, preempt,
    preemption_modes, pause, running_order, grants. The orders of resumption and admission are
    checked when they are pulled.

    Attributes:
        default: the limits of a step about which nothing is proposed.
    """

    def __init__(
        self, config: SchedulerConfig, guard: PolicyGuard, live: Mapping[str, Entry]
    ) -> None:
        self._config = config
        self._guard = guard
        self._live = live
        self.default = default_limits(config)
        threshold = config.long_prefill_token_threshold
        most = config.max_num_batched_tokens
        self._limit = (
            f"max_num_batched_tokens={most}"
            if threshold is None or threshold > most
            else f"long_prefill_token_threshold={threshold}"
        )

    def clip(self, proposal: Proposal) -> StepLimits:
        """The limits that a proposal comes to. Raises PluginError in strict mode."""
        if is_empty(proposal):
            return self.default
        most = self._config.max_num_batched_tokens
        seats = self._config.max_num_seqs
        token_budget = self._number("token_budget", proposal.token_budget, 1, most, most)
        prefill_budget = self._number("prefill_budget", proposal.prefill_budget, 0, most, most)
        max_admissions = self._number("max_admissions", proposal.max_admissions, 0, None, seats)
        max_skips = self._number("max_skips", proposal.max_skips, 0, None, 0)
        preempt = self._running("preempt", proposal.preempt, ())
        preempt = tuple(entry for entry in preempt if self._may_be_preempted(entry))
        modes = self._modes(proposal.preemption_modes, preempt) if proposal.preemption_modes else {}
        return StepLimits(
            token_budget=token_budget,
            prefill_budget=prefill_budget,
            chunk_size=self.default.chunk_size,
            max_admissions=max_admissions,
            max_skips=max_skips,
            preempt=preempt,
            pause=frozenset(
                entry.request_id for entry in self._running("pause", proposal.pause, preempt)
            ),
            running_order=self._running("running_order", proposal.running_order, preempt),
            grants=self._grants(proposal.grants) if proposal.grants else {},
            admission_order=proposal.admission_order,
            resume_order=proposal.resume_order,
            preemption_modes=modes,
        )

    def _running(
        self, what: str, names: Iterable[str], preempted: tuple[Entry, ...]
    ) -> tuple[Entry, ...]:
        def find(name: str) -> Entry | str:
            entry = self._live.get(name)
            if entry is None or not entry.running:
                return "which is not running"
            return "which it preempts" if entry in preempted else entry

        return tuple(self._guard.entries(what, names, find))

    def _may_be_preempted(self, entry: Entry) -> bool:
        computed = entry.request.num_computed_tokens
        if computed > entry.high_water:
            return True
        self._guard.report(
            f"preempt names {entry.request_id!r}, which has computed {computed} tokens and has "
            f"not passed the {entry.high_water} that it lost the last time"
        )
        return False

    def _modes(
        self, proposed: Mapping[str, PreemptionMode], preempt: tuple[Entry, ...]
    ) -> dict[str, PreemptionMode]:
        modes: dict[str, PreemptionMode] = {}
        names = {entry.request_id for entry in preempt}
        for name, mode in self._guard.pull("propose", proposed.items()):
            if name not in names:
                self._guard.report(f"preemption_modes names {name!r}, which is not preempted")
            elif not isinstance(mode, PreemptionMode):
                self._guard.report(f"preemption_modes[{name!r}]={mode!r} is no PreemptionMode")
            else:
                modes[name] = mode
        return modes

    def _grants(self, proposed: Mapping[str, int]) -> dict[str, int]:
        grants: dict[str, int] = {}
        chunk_size = self.default.chunk_size
        for name, grant in self._guard.pull("propose", proposed.items()):
            entry = self._live.get(name) if isinstance(name, str) else None
            if entry is None:
                self._guard.report(f"grants names {name!r}, which is not live")
                continue
            grant = self._number(f"grants[{name!r}]", grant, 1, None, chunk_size)
            if grant > chunk_size:
                self._guard.report(f"grants[{name!r}]={grant} is above the limit, {self._limit}")
                grant = chunk_size
            if self._must_be_whole(entry) and grant < entry.num_tokens_to_compute:
                self._guard.report(
                    f"grants[{name!r}]={grant} would split a prompt of {entry.num_tokens} tokens, "
                    "and enable_chunked_prefill is off"
                )
                continue
            grants[name] = grant
        return grants

    def _must_be_whole(self, entry: Entry) -> bool:
        if entry.running:
            return not entry.may_split
        too_long = entry.num_tokens > self._config.max_num_batched_tokens
        return not (self._config.enable_chunked_prefill or too_long)

    def _number(
        self, what: str, value: int | None, least: int, most: int | None, default: int
    ) -> int:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self._guard.report(f"{what}={value!r} is not an integer: {default} holds")
            return default
        if value < least:
            self._guard.report(f"{what}={value} is below the minimum, {least}")
            return least
        if most is not None and value > most:
            self._guard.report(f"{what}={value} is above max_num_batched_tokens={most}")
            return most
        return value
