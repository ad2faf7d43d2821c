"""Mutants of preemption, swapping and resumption."""

from __future__ import annotations

from collections.abc import Iterator

from ....core.scheduler import MoveKind, StepPlan
from ....core.scheduling_policy import PreemptionMode
from ..plain_limits import Limits
from ..plain_scheduler import PlainScheduler
from .registry import mutant

Offers = Iterator[tuple[str, PreemptionMode | None]]


@mutant("computed_not_reset", "A victim that is recomputed keeps its count of computed tokens.")
class _NotReset(PlainScheduler):
    def recompute(self, name: str) -> None:
        computed = self.live[name].num_computed_tokens
        super().recompute(name)
        self.live[name].num_computed_tokens = computed


@mutant(
    "resumed_with_prompt_only", "A victim loses the tokens that it has generated.", ("vllm#18055",)
)
class _PromptOnly(PlainScheduler):
    def recompute(self, name: str) -> None:
        super().recompute(name)
        self.live[name].output_token_ids.clear()


@mutant("victim_keeps_blocks", "A victim that is recomputed keeps its blocks.")
class _KeepsBlocks(PlainScheduler):
    def recompute(self, name: str) -> None:
        self.release = lambda name: None  # type: ignore[method-assign]
        super().recompute(name)
        del self.release


@mutant("preempted_and_scheduled", "A victim that had its share already stays in the step.")
class _PreemptedAndScheduled(PlainScheduler):
    def take_back(self, name: str) -> None:
        pass


@mutant("readmitted_in_the_same_step", "A step that preempted admits whoever fits then.")
class _Readmitted(PlainScheduler):
    def may_admit(self) -> bool:
        return True


@mutant("victim_is_the_beneficiary", "Who needs a block always gives way itself.")
class _VictimIsBeneficiary(PlainScheduler):
    def victims(self, name: str) -> Offers:
        yield name, None


@mutant("oldest_gives_way", "The first admitted request gives way, whatever the policy says.")
class _OldestGivesWay(PlainScheduler):
    def victims(self, name: str) -> Offers:
        yield from [(victim, None) for victim in self.running]


@mutant("everybody_gives_way", "All others are preempted when one needs a block.")
class _Everybody(PlainScheduler):
    def make_room(self, name: str, needed: int) -> bool:
        roomy = super().make_room(name, needed)
        if roomy and self.out_of_blocks:
            for other in [one for one in self.running if one != name]:
                self.preempt(other, None)
        return roomy


@mutant("victims_wait_at_the_end", "A victim waits behind the newcomers.")
class _AtTheEnd(PlainScheduler):
    def put_back(self, name: str) -> None:
        self.returned.add(name)
        self.waiting.append(name)


@mutant("swap_falls_through", "A victim for which host memory has no room is lost from all queues.")
class _FallsThrough(PlainScheduler):
    def recompute(self, name: str) -> None:
        super().recompute(name)
        if self.config.preemption_mode == "swap":
            self.waiting.remove(name)


@mutant("full_swap_space_is_an_error", "A full swap space raises an error.")
class _FullIsError(PlainScheduler):
    def recompute(self, name: str) -> None:
        if self.config.preemption_mode == "swap":
            raise RuntimeError("the swap space is full")
        super().recompute(name)


@mutant("never_swaps", "Mode swap recomputes, although host memory has room.")
class _NeverSwaps(PlainScheduler):
    def swaps(self, name: str, wished: PreemptionMode | None) -> bool:
        return False


@mutant("swap_out_not_copied", "The blocks of a swapped request are not copied to the host.")
class _NotCopied(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        self.moves = [one for one in self.moves if one[1].kind is not MoveKind.SWAP_OUT]
        return super().build(number)


@mutant("moves_in_reverse", "The moves of a step are told in reverse order.")
class _MovesInReverse(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        self.moves.reverse()
        return super().build(number)


@mutant("swapped_computed_reset", "A swapped request forgets what it has computed.")
class _SwappedReset(PlainScheduler):
    def preempt(self, name: str, wished: PreemptionMode | None) -> None:
        super().preempt(name, wished)
        self.live[name].num_computed_tokens = 0


@mutant("swapped_never_return", "Swapped requests come back only when nobody else is live.")
class _NeverReturn(PlainScheduler):
    def resume(self, limits: Limits) -> bool:
        return super().resume(limits) if not self.waiting else True


@mutant("preempted_not_told", "The plan does not tell who was preempted.")
class _NotTold(PlainScheduler):
    def build(self, number: int) -> StepPlan:
        self.preempted = []
        return super().build(number)


@mutant("victims_free_nothing", "Victims are taken whose blocks are all shared with others.")
class _FreeNothing(PlainScheduler):
    def gain(self, name: str) -> int:
        return 1


@mutant(
    "blocks_given_back_late",
    "A victim's blocks are given back when the step is planned.",
    ("vllm-ascend#16315",),
)
class _GivenBackLate(PlainScheduler):
    def recompute(self, name: str) -> None:
        late: list[str] = getattr(self, "late", [])
        self.release = lambda name: late.append(name)  # type: ignore[method-assign]
        super().recompute(name)
        del self.release
        self.late = late

    def build(self, number: int) -> StepPlan:
        for name in getattr(self, "late", ()):
            self.release(name)
        self.late = list[str]()
        return super().build(number)


@mutant(
    "victims_generate_their_last_token_again", "A victim loses the last token that it generated."
)
class _LastTokenAgain(PlainScheduler):
    def recompute(self, name: str) -> None:
        super().recompute(name)
        del self.live[name].output_token_ids[-1:]


@mutant("paused_is_swapped", "A request that the policy pauses is swapped out, and nobody is told.")
class _PausedIsSwapped(PlainScheduler):
    def fill(self, limits: Limits) -> None:
        super().fill(limits)
        for name in sorted(self.paused):
            copies = self.block_manager.swap_out(name) if name in self.running else None
            if copies is not None:
                self.move(name, MoveKind.SWAP_OUT, copies)
                self.running.remove(name)
                self.paused.remove(name)
                self.swapped.append(name)


@mutant("preempted_again_and_again", "A policy may preempt a request before it has advanced.")
class _AgainAndAgain(PlainScheduler):
    def has_advanced(self, name: str) -> bool:
        return True


@mutant("proposed_mode_ignored", "The policy's choice between swap and recomputation is ignored.")
class _ModeIgnored(PlainScheduler):
    def swaps(self, name: str, wished: PreemptionMode | None) -> bool:
        return super().swaps(name, None)


@mutant("preempted_goes_on_at_once", "A victim is admitted again in the step that preempted it.")
class _AtOnce(PlainScheduler):
    def may_admit(self) -> bool:
        return True

    def admit(self, limits: Limits) -> None:
        kept, self.preempted = self.preempted, []
        super().admit(limits)
        self.preempted = kept
