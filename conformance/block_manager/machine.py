"""The rules: what an engine does to a block manager, in any order, and what it must not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ...core.block_manager import BlockManagerConfig
from .laws import FreeAgain
from .mistakes import NUM_MISTAKES, Mistakes
from .model import LiveRequest
from .world import SALTS, prompt

_INDEX = st.integers(0, 5)
_FEW = st.integers(0, 3)
Rule = TypeVar("Rule", bound=Callable[..., Any])


def _has(power: str) -> Callable[[Rule], Rule]:
    has: Callable[[Rule], Rule] = precondition(lambda self: power in self.subject.manager.powers)
    return has


class BlockManagerMachine(Mistakes):
    """Operations in any order in a tiny world."""

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(2, 4),
        length=_FEW,
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.4]),
        host=st.sampled_from([0, 4, 8, 12]),
        without_cache=st.integers(0, 5),
        lookahead=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        length: int,
        watermark: float,
        host: int,
        without_cache: int,
        lookahead: int,
    ) -> None:
        """The world."""
        powers, slots = self.subject.manager.powers, num_blocks * block_size
        config = BlockManagerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=(slots, slots // 2, slots - 1, slots + 3)[length],
            watermark=watermark,
            num_host_blocks=host if "swap" in powers else 0,
            enable_prefix_caching="prefix_caching" in powers and without_cache < 5,
            num_lookahead_tokens=lookahead if "lookahead" in powers else 0,
        )
        self.begin(config)

    def pick(self, index: int, *, swapped: bool = False) -> LiveRequest | None:
        """One of the live requests of a pool."""
        some = [one for one in self.live.values() if one.swapped is swapped]
        if some:
            return some[index % len(some)]
        if not self.live:
            # Else a story without the rule `admit` would be about nothing.
            tokens = prompt(0, min(2 + index, self.config.max_model_len), 0)
            self.admit_tokens(tokens, len(tokens), "", 20)
        return None

    # Admissions.

    @rule(
        pattern=st.integers(0, 2),
        length=st.integers(1, 20),
        twist=st.sampled_from([0, 0, 0, 1, 2, 3, 5, 8]),
        part=st.sampled_from([0, 0, 0, 1, 2, 4]),
        salt=st.sampled_from([0, 0, 1]),
        count=st.sampled_from([0, 20, 20, 2]),
    )
    def admit(
        self, pattern: int, length: int, twist: int, part: int, salt: int, count: int
    ) -> None:
        """A request with a new prompt, of which ``count`` tokens are computed at once."""
        tokens = prompt(pattern, min(length, self.config.max_model_len), twist)
        self.admit_tokens(tokens, max(1, len(tokens) - part), SALTS[salt], count)

    @precondition(lambda self: self.prompts)
    @rule(
        index=_INDEX,
        more=st.sampled_from([0, 0, 1, 2, 5]),
        salt=st.sampled_from([0, 0, 0, 1]),
        count=st.sampled_from([0, 20]),
    )
    def admit_again(self, index: int, more: int, salt: int, count: int) -> None:
        """A request that begins like one before."""
        known, known_salt = self.prompts[index % len(self.prompts)]
        tokens = [*known, *[0] * more][: self.config.max_model_len]
        self.admit_tokens(tokens, len(tokens), SALTS[1] if salt else known_salt, count)

    # Growth and computing.

    @rule(index=_INDEX, more=st.sampled_from([1, 1, 0, 2, 4, 9]), choice=st.integers(0, 1))
    def append(self, index: int, more: int, choice: int) -> None:
        """Slots for more tokens of a request."""
        request = self.pick(index)
        if request is not None:
            self.grow(request, min(request.granted + more, self.config.max_model_len), choice)

    @rule(index=_INDEX, count=st.sampled_from([20, 20, 1, 2, 3]))
    def compute(self, index: int, count: int) -> None:
        """A step of a request: its keys are written, then committed."""
        request = self.pick(index)
        if request is not None:
            self.step(request, count)

    @rule(choice=st.integers(0, 1))
    def decode_all(self, choice: int) -> None:
        """A step of all requests, each with one token more."""
        self.pick(choice)
        for request in list(self.live.values()):
            if not request.swapped:
                self.step(request, 20)
                if request.granted < self.config.max_model_len:
                    self.grow(request, request.granted + 1, choice)

    # The end of requests.

    @rule(index=_INDEX, again=st.booleans())
    def free(self, index: int, again: bool) -> None:
        """The end of a request, of either pool; freeing it again does nothing."""
        if self.pick(index) is not None or self.live:
            request = list(self.live.values())[index % len(self.live)]
            self.release(request.name)
            if again:
                self.right_call("free", request.name)
                self.unchanged(FreeAgain)

    # Optional powers.

    @_has("fork")
    @rule(index=_INDEX, more=st.sampled_from([0, 1, 2, 4]), choice=st.integers(0, 1))
    def fork(self, index: int, more: int, choice: int) -> None:
        """A request that shares all blocks of another, and may diverge at once."""
        parent = self.pick(index)
        if parent is None:
            return
        child = self.split(parent)
        wanted = min(child.granted + more, self.config.max_model_len)
        if more and self.grow(child, wanted, choice):
            self.step(child, 20)

    @_has("swap")
    @rule(index=_INDEX)
    def swap_out(self, index: int) -> None:
        """A request moves to the host."""
        request = self.pick(index)
        if request is not None:
            self.move_out(request)

    @_has("swap")
    @rule(index=_INDEX)
    def swap_in(self, index: int) -> None:
        """A request comes back from the host; if none is there, one goes."""
        request = self.pick(index, swapped=True)
        if request is not None:
            self.move_in(request)
        else:
            self.swap_out(index)

    @rule(kind=st.integers(0, NUM_MISTAKES + 2), index=_INDEX)
    def rarely(self, kind: int, index: int) -> None:
        """A call that has to be refused, or the end of the prefix cache."""
        if kind < NUM_MISTAKES:
            self.err(kind, index)
        elif "prefix_caching" in self.subject.manager.powers:
            self.reset()
