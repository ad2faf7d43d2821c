"""What has to hold between any two calls, and what a call may change."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.scheduler import StepPlan
from ...core.scheduling_policy import PreemptionMode
from . import laws
from .sight import Before, Sight


class Inspection(Sight):
    """Looks at states and counts."""

    def inspect(self) -> None:
        """Check everything that can be seen without a plan."""
        seen = self.standing
        self._states(seen)
        for name in self.live:
            self._progress_of(name, seen)
        self._counts()
        for law, message in self.policy.complaints:
            self.checker.check(law, False, lambda message=message: message)  # type: ignore[misc]
        for law in sorted(self.policy.judged, key=lambda one: one.name):
            self.checker.check(law, True, str)
        self.policy.complaints.clear()
        self.policy.judged.clear()

    def _states(self, seen: Before) -> None:
        check, stats = self.checker.check, self.scheduler.stats()
        counted = stats.running + stats.waiting + stats.swapped + stats.paused
        check(
            laws.States,
            counted == len(self.live)
            and min(stats.running, stats.waiting, stats.swapped, stats.paused) >= 0
            and stats.swapped == len(seen.swapped)
            and stats.running + stats.paused >= len(seen.resident)
            and self.scheduler.has_unfinished() == bool(self.live),
            lambda: (
                f"stats() is {stats}; live are {list(self.live)}, of which {len(seen.resident)} "
                f"hold device blocks and {len(seen.swapped)} host blocks"
            ),
        )
        for name, request in self.live.items():
            check(
                laws.States,
                self.scheduler.get(name) is request,
                lambda name=name: f"get({name!r}) does not find the live request",  # type: ignore[misc]
            )
        seats = max(len(seen.resident), stats.running + stats.paused)
        check(
            laws.Seats,
            seats <= self.world.seats,
            lambda: f"{seats} requests hold a seat, max_num_seqs is {self.world.seats}",
        )

    def _progress_of(self, name: str, seen: Before) -> None:
        request = self.live[name]
        holds = name in seen.resident or name in seen.swapped
        self.checker.check(
            laws.Computed,
            0 <= request.num_computed_tokens < request.num_tokens
            and (holds or request.num_computed_tokens == 0),
            lambda: (
                f"{name!r} has computed {request.num_computed_tokens} of {request.num_tokens} "
                f"tokens, and holds blocks: {holds}"
            ),
        )
        self.same_tokens(name)

    def same_tokens(self, name: str) -> None:
        """A request has the tokens that were given to it and sampled for it."""
        known = self.known[name]
        self.checker.demand(
            laws.Resumption,
            self.live[name].token_ids == known,
            lambda: f"the tokens of {name!r} are {self.live[name].token_ids}; they were {known}",
        )

    def _counts(self) -> None:
        stats, times = self.scheduler.stats(), self.preempted_times
        told = self.preemptions_in_all, self.swaps_in_all
        self.checker.check(
            laws.Accounting,
            (stats.num_preemptions, stats.num_swaps) == told,
            lambda: (
                f"stats() counts {stats.num_preemptions} preemptions, {stats.num_swaps} of them "
                f"swaps; there were {told[0]}, {told[1]} of them swaps"
            ),
        )
        for name, request in self.live.items():
            found = self.cached.get(name, request.num_cached_tokens)
            self.checker.check(
                laws.Accounting,
                request.num_preemptions == times[name] and request.num_cached_tokens == found,
                lambda name=name, request=request, found=found: (  # type: ignore[misc]
                    f"{name!r} counts {request.num_preemptions} preemptions and "
                    f"{request.num_cached_tokens} cached tokens; it had {times[name]}, and found "
                    f"{found} when it was first admitted"
                ),
            )

    def count(self, preempted: Iterable[tuple[str, PreemptionMode]]) -> None:
        """Requests were preempted."""
        for name, mode in preempted:
            self.preempted_times[name] += 1
            self.preemptions_in_all += 1
            self.swaps_in_all += mode is PreemptionMode.SWAP

    def transitions(self, plan: StepPlan, before: Before, after: Before) -> None:
        """Blocks went only where the plan says."""
        for name in self.live:
            was, now = before.where(name), after.where(name)
            right = {was}
            if name in plan.preempted:
                right = {"the host" if name in plan.swapped_out else "neither memory"}
            elif name in plan.swapped_in:
                right = {"the device"}
            elif was == "neither memory":
                right.add("the device")
            self.checker.check(
                laws.Transitions,
                now in right,
                lambda name=name, was=was, now=now: (  # type: ignore[misc]
                    f"the blocks of {name!r} were in {was} and are in {now}; the plan preempts "
                    f"{plan.preempted}, swaps out {plan.swapped_out}, swaps in {plan.swapped_in}"
                ),
            )

    def unmoved(self, before: Before, what: str) -> set[str]:
        """A call without a plan moved no blocks; ids of those that got some, as by a fork."""
        after, got = self.look(), set[str]()
        self.standing = after
        for name in self.live:
            was, now = before.where(name), after.where(name)
            forked = what == "update" and (was, now) == ("neither memory", "the device")
            if forked:
                got.add(name)
            self.checker.check(
                laws.Transitions,
                forked or name not in before.computed or was == now,
                lambda name=name, was=was, now=now: (  # type: ignore[misc]
                    f"{what} moved the blocks of {name!r} from {was} to {now}"
                ),
            )
        return got

    def unblocked(self, names: Iterable[str]) -> None:
        """Requests that have ended hold nothing."""
        for name in names:
            self.checker.check(
                laws.NoLeak,
                not self.holds(name)
                and not self.manager.is_swapped(name)
                and self.scheduler.get(name) is None,
                lambda name=name: f"{name!r} has ended, and is live or holds blocks",  # type: ignore[misc]
            )
