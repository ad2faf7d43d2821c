"""Forks, swap space, and the end of the prefix cache."""

from __future__ import annotations

from dataclasses import replace

from ...core.block_manager import BlockCopy
from . import laws
from .calls import Call
from .growth import Growth
from .model import LiveRequest


class Moves(Growth):
    """Uses the optional powers and judges what comes of it."""

    def split(self, parent: LiveRequest) -> LiveRequest:
        """``fork``: a request that shares all blocks of another."""
        self.num_requests += 1
        name, used = f"r{self.num_requests}", self.seen.usage.used
        outcome = self.right_call("fork", parent.name, name)
        table = outcome.table or ()
        self.demand(
            laws.Fork,
            table == parent.table,
            lambda: (
                f"{name!r} was forked from {parent.name!r} with the table "
                f"{list(parent.table)}, and has {list(table)}"
            ),
        )
        parent.writable = 0
        self.live[name] = replace(
            parent, name=name, tokens=list(parent.tokens), prefixes=list(parent.prefixes)
        )
        self.changed()
        now = self.seen.usage.used
        self.check(
            laws.Fork, now == used, lambda: f"a fork made {used} used blocks {now}: it needs none"
        )
        return self.live[name]

    def move_out(self, request: LiveRequest) -> None:
        """``swap_out``: a request moves to the host."""
        before, table = self.seen.usage, request.table
        room = self.config.num_host_blocks - sum(len(one.host) for one in self.live.values())
        held = {block for one in self.live.values() for block in one.host}
        outcome = self.right_call("swap_out", request.name)
        code = self.story[-1].call.code()
        self.covered("swap_out", "no room" if outcome.value is None else "done")
        self.demand(
            laws.Swap,
            (outcome.value is not None) == (len(table) <= room),
            lambda: (
                f"{code} "
                + ("was refused" if outcome.value is None else "succeeded")
                + f" with {room} host blocks free for {len(table)} blocks"
            ),
        )
        if outcome.value is None:
            self.unchanged(laws.AllOrNothing)
            return
        copies = outcome.value
        targets = [one.destination for one in copies]
        self.demand(
            laws.Swap,
            [one.source for one in copies] == list(table)
            and len(set(targets)) == len(targets)
            and not set(targets) & held
            and all(0 <= one < self.config.num_host_blocks for one in targets),
            lambda: (
                f"{code} wants the copies {_arrows(copies)}; the table was {list(table)}, and "
                f"the host blocks {sorted(held)} belong to others"
            ),
        )
        self.memory.copy_out(copies)
        request.table, request.host = (), tuple(targets)
        self.missing("block_table", request.name)
        self.changed()
        self.judge_gain(request.name, code, self.exclusive(table), before.available)

    def move_in(self, request: LiveRequest) -> None:
        """``swap_in``: a request comes back from the host."""
        before, owned, host = self.seen.usage, self.owned(), request.host
        outcome = self.right_call("swap_in", request.name)
        code = self.story[-1].call.code()
        self.covered("swap_in", "no room" if outcome.value is None else "done")
        self.demand(
            laws.Swap,
            (outcome.value is not None) == (len(host) <= before.available),
            lambda: (
                f"{code} "
                + ("was refused" if outcome.value is None else "succeeded")
                + f" with {before.available} blocks available for {len(host)} host blocks"
            ),
        )
        if outcome.value is None:
            self.unchanged(laws.AllOrNothing)
            return
        copies, table = outcome.value, outcome.table or ()
        self.demand(
            laws.Swap,
            [one.source for one in copies] == list(host)
            and [one.destination for one in copies] == list(table)
            and not set(table) & owned,
            lambda: (
                f"{code} wants the copies {_arrows(copies)}; it held the host blocks "
                f"{list(host)}, its table is {list(table)} now, and others hold {sorted(owned)}"
            ),
        )
        self.hand_out(table, owned, before.free)
        self.memory.copy_in(copies)
        request.table, request.host = table, ()
        if self.caching:
            self.cached.commit(self.chain(request, request.committed), table, certain=False)
        self.changed()

    def reset(self) -> None:
        """The prefix cache is forgotten."""
        outcome = self.right_call("reset_prefix_cache")
        holders = list(self.live)
        self.covered("reset_prefix_cache", repr(outcome.value))
        self.demand(
            laws.Reset,
            outcome.value is (not holders),
            lambda: (
                f"reset_prefix_cache() said {outcome.value} while "
                + (f"{holders} hold blocks" if holders else "nobody holds a block")
            ),
        )
        if holders:
            self.unchanged(laws.Reset)
            return
        self.cached.clear()
        self.seen = self.look()
        left = [*self.seen.hits, self.seen.usage.cached]
        self.check(
            laws.Reset,
            not any(left),
            lambda: (
                f"after reset_prefix_cache() {self.seen.usage.cached} blocks are cached, and "
                f"prompts find {list(self.seen.hits)} tokens"
            ),
            lambda: [
                "assert manager.usage().cached == 0, manager.usage()",
                *(
                    f"assert {code} == 0, {code}"
                    for code in (
                        Call("match_prefix", (tokens,), self.salted(salt)).code()
                        for tokens, salt in self.prompts
                    )
                ),
            ],
        )
        self.inspect()


def _arrows(copies: tuple[BlockCopy, ...]) -> str:
    return ", ".join(f"{one.source} to {one.destination}" for one in copies) or "none"
