"""Mutants of completions that share a prompt."""

from __future__ import annotations

from ....core.request import Request
from ....core.scheduler import ScheduledRequest, StepPlan
from ..plain_limits import Limits
from ..plain_scheduler import PlainScheduler
from .registry import mutant


@mutant("tail_written_while_shared", "A forked request writes into the last block that it shares.")
class _TailShared(PlainScheduler):
    def make_room(self, name: str, needed: int) -> bool:
        held = len(self.block_manager.block_table(name))
        enough = held >= self.block_manager.config.blocks_for(needed)
        return enough or super().make_room(name, needed)


@mutant("prompt_token_written_twice", "A forked request writes its last prompt token once more.")
class _WrittenTwice(PlainScheduler):
    def item(self, name: str, share: int) -> ScheduledRequest:
        return super().item(name, share)._replace(writes=True)


@mutant("recomputed_fork_writes_nothing", "A forked request that is recomputed writes nothing.")
class _WritesNothing(PlainScheduler):
    def fork_one(self, leader: Request, child: Request) -> None:
        super().fork_one(leader, child)
        self.children = {*getattr(self, "children", ()), child.request_id}

    def recompute(self, name: str) -> None:
        super().recompute(name)
        if name in getattr(self, "children", ()):
            self.rereads.add(name)


@mutant("fork_not_told", "The plan does not tell of forks.")
class _ForkNotTold(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        self.forked = []
        return super().build(number)


@mutant("fork_told_again", "Each plan tells of the forks of the one before once more.")
class _ForkToldAgain(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        plan = super().build(number)
        self.forked = list(plan.forked)
        return plan


@mutant("fork_of_another_prompt", "Whoever waits with a prompt of equal length is forked.")
class _AnotherPrompt(PlainScheduler):
    def same_prompt(self, leader: Request, other: Request) -> bool:
        return leader.params.n > 1 and other.num_prompt_tokens == leader.num_prompt_tokens


@mutant("fork_has_nothing_to_compute", "A forked request counts its whole prompt as computed.")
class _NothingToCompute(PlainScheduler):
    def fork_one(self, leader: Request, child: Request) -> None:
        super().fork_one(leader, child)
        child.num_computed_tokens += 1


@mutant("fork_in_mid_prompt", "Requests are forked when the first chunk of the prompt is computed.")
class _MidPrompt(PlainScheduler):
    def has_prompt(self, leader: Request) -> bool:
        return True


@mutant("forks_beyond_the_seats", "Forked requests need no seat.")
class _BeyondTheSeats(PlainScheduler):
    def fork(self, leader: Request) -> None:
        for name in self.followers(leader):
            self.fork_one(leader, self.live[name])


@mutant("followers_forgotten", "Whoever waited for a request that ended early is never admitted.")
class _FollowersForgotten(PlainScheduler):
    def remove(self, name: str) -> None:
        if name in self.running and self.leads(name) and name not in self.planned:
            self.lost = {*self.followers(self.live[name]), *getattr(self, "lost", ())}
        super().remove(name)

    def try_admit(self, name: str, limits: Limits) -> bool:
        return name not in getattr(self, "lost", ()) and super().try_admit(name, limits)


@mutant("group_ends_with_one", "The end of one completion ends all that share its prompt.")
class _GroupEnds(PlainScheduler):
    def finish(self, request_id: str) -> bool:
        request = self.live.get(request_id)
        ended = super().finish(request_id)
        if request is not None and request.params.n > 1:
            for name in [one for one in self.waiting if self.same_prompt(request, self.live[one])]:
                self.remove(name)
        return ended
