"""The plain scheduler's preemption: who gives way, and what becomes of the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...core.errors import CapacityError
from ...core.scheduler import MoveKind
from ...core.scheduling_policy import PreemptionMode
from .plain_shares import PlainShares


class PlainPreemption(PlainShares):
    """Takes blocks from running requests."""

    def make_room(self, name: str, needed: int) -> bool:
        """Get slots for so many tokens; False if the request itself had to give way."""
        copies = self.block_manager.append(name, needed)
        if copies is None:
            self.out_of_blocks = True
            for victim, mode in self.victims(name):
                self.preempt(victim, mode)
                if victim == name:
                    return False
                copies = self.block_manager.append(name, needed)
                if copies is not None:
                    break
            else:
                raise CapacityError(f"{name!r} is alone and finds no room for {needed} tokens")
        self.move(name, MoveKind.COPY, copies)
        return True

    def victims(self, name: str) -> Iterator[tuple[str, PreemptionMode | None]]:
        """Who gives way: the policy's choice, then the most recently admitted."""
        offered = self.policy_victims(name)
        for victim, mode in offered:
            if victim in self.running and (victim == name or self.gain(victim)):
                yield victim, mode
            elif victim not in self.running:
                self.guard.report(f"victims names {victim!r}, which is not running")
        for victim in self.running[::-1]:
            if victim == name or self.gain(victim) or len(self.running) == 1:
                yield victim, None

    def policy_victims(self, name: str) -> Iterable[tuple[str, PreemptionMode | None]]:
        """The policy's list, pulled lazily."""
        if len(self.running) == 1:
            return ()
        offered = self.guard.call(
            "victims", self.policy.victims, self.view, name, tuple(self.running)
        )
        return self.guard.pull("victims", offered)

    def gain(self, name: str) -> int:
        """Blocks that a victim would give."""
        return self.block_manager.reclaimable(name)

    def preempt(self, name: str, wished: PreemptionMode | None) -> None:
        """Take the blocks of a running request."""
        request = self.live[name]
        if name in self.shares:
            self.take_back(name)
        self.peak[name] = max(self.peak.get(name, 0), request.num_computed_tokens)
        copies = self.block_manager.swap_out(name) if self.swaps(name, wished) else None
        mode = PreemptionMode.RECOMPUTE if copies is None else PreemptionMode.SWAP
        self.running.remove(name)
        self.paused.discard(name)
        self.whole.discard(name)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(name)
        if copies is None:
            self.recompute(name)
        else:
            self.num_swaps += 1
            self.swapped_out.append(name)
            self.move(name, MoveKind.SWAP_OUT, copies)
            self.swapped = sorted([*self.swapped, name], key=list(self.live).index)
        self.guard.call("on_preempt", self.policy.on_preempt, self.view, name, mode)

    def recompute(self, name: str) -> None:
        """A victim gives all up."""
        self.release(name)
        self.moves = [one for one in self.moves if one[0] != name]
        self.live[name].num_computed_tokens = 0
        self.rereads.discard(name)
        self.put_back(name)

    def swaps(self, name: str, wished: PreemptionMode | None) -> bool:
        """Whether a victim goes to host memory, if there is room."""
        if "swap" not in self.block_manager.powers or not self.block_manager.config.num_host_blocks:
            if wished is PreemptionMode.SWAP:
                self.guard.report(f"{name!r} is to be swapped, and there is no swap space")
            return False
        if wished is None:
            return self.config.preemption_mode == "swap"
        return wished is PreemptionMode.SWAP
