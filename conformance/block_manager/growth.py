"""Growth and computing: slots for more tokens, keys in them, and whose blocks they lie in."""

from __future__ import annotations

from typing import Any

from ...core.block_manager import BlockCopy
from . import laws
from .admission import Admissions
from .calls import Call, Made, Outcome
from .model import DRAFT, LiveRequest


class Growth(Admissions):
    """Lets requests grow and computes their tokens, as the engine does."""

    def grow(self, request: LiveRequest, num_tokens: int, choice: int) -> bool:
        """``append``; whether there was room."""
        size, before, table = self.config.block_size, self.seen.usage, request.table
        owned, needed = self.owned(), self.config.blocks_for(num_tokens)
        first = request.committed // size
        shared = [
            index
            for index in range(first, min(len(table), needed))
            if len(self.owners(table[index])) > 1
        ]
        outcome = self.right_call("append", request.name, num_tokens)
        code, missing = self.story[-1].call.code(), max(0, needed - len(table)) + len(shared)
        self.check(
            laws.Watermark,
            outcome.value is not None or missing > before.available,
            lambda: (
                f"{code} was refused, although it takes {missing} blocks at most and "
                f"{before.available} are available"
            ),
        )
        if outcome.value is None:
            self.covered("append", "no room")
            self.unchanged(laws.AllOrNothing)
            return False
        self.covered("append", "copies" if outcome.value else "no copies")
        new = outcome.table or ()
        self.judge_growth(request, outcome.value, new, shared, num_tokens)
        fresh = [block for at, block in enumerate(new) if at >= len(table) or block != table[at]]
        self.hand_out(fresh, owned, before.free)
        self.memory.copy(outcome.value)
        while len(request.tokens) < num_tokens:
            request.tokens.append(choice)
        self.numbering.extend(request.prefixes, request.tokens, request.salt)
        request.granted = max(request.granted, num_tokens)
        request.writable = max(request.writable, num_tokens)
        self.changed()
        self.judge_privacy(request)
        return True

    def judge_growth(
        self,
        request: LiveRequest,
        copies: tuple[BlockCopy, ...],
        new: tuple[int, ...],
        shared: list[int],
        num_tokens: int,
    ) -> None:
        """Which entries of a table ``append`` replaced, and what it says about it."""
        old, code = request.table, self.story[-1].call.code()
        replaced = [at for at, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1]
        name = request.name
        self.demand(
            laws.TableView,
            len(new) >= len(old) and set(replaced) <= set(shared),
            lambda: (
                f"{code} changed the table of {name!r} from {list(old)} to {list(new)}, though "
                f"only the entries {shared} are shared and about to be written"
            ),
        )
        if shared or copies:
            told = sorted((one.source, one.destination) for one in copies)
            done = sorted((old[at], new[at]) for at in replaced)
            self.demand(
                laws.Fork,
                told == done,
                lambda: (
                    f"{code} replaced the blocks {done} in the table and wants the copies "
                    f"{told}: each replaced block is copied from the old to the new one, no other"
                ),
            )
            self.judge_copies(copies, set(new) - set(old))
        if self.config.blocks_for(num_tokens) <= len(old) and not shared:
            self.check(
                laws.Slots,
                new == old and copies == (),
                lambda: f"{code} had nothing to do and changed {list(old)} to {list(new)}",
            )

    def judge_privacy(self, request: LiveRequest) -> None:
        """All slots that a request may write lie in blocks of its own."""
        size = self.config.block_size
        ahead = request.writable + self.config.num_lookahead_tokens
        end = -(-max(request.writable, min(ahead, self.config.max_model_len)) // size)
        for index in range(request.written // size, min(end, len(request.table))):
            others = [one for one in self.owners(request.table[index]) if one != request.name]
            self.check(
                laws.PrivateTail,
                not others,
                lambda index=index, others=others: (  # type: ignore[misc]
                    f"{request.name!r} may write up to token {request.writable} now, but entry "
                    f"{index} of its table, block {request.table[index]}, is held by {others} too"
                ),
                lambda others=others: [  # type: ignore[misc]
                    f"mine = manager.block_table({request.name!r}).tolist()",
                    f"theirs = manager.block_table({others[0]!r}).tolist()",
                    f"shared = set(mine[{request.written // size} :]) & set(theirs)",
                    "assert not shared, (mine, theirs)",
                ],
            )

    def step(self, request: LiveRequest, count: int) -> None:
        """Write up to ``count`` tokens, as far as they have slots, and commit them."""
        end = min(request.written + count, request.writable, len(request.tokens))
        if end <= request.written:
            return
        self.judge_privacy(request)
        for position in range(request.written, end):
            self.memory.write(request.table, position, request.prefixes[position])
        self.note("write", request.name, list(request.tokens), end)
        request.written = end
        ahead = min(request.writable + self.config.num_lookahead_tokens, self.config.max_model_len)
        ahead = min(ahead, len(request.table) * self.config.block_size)
        if ahead > end and self.config.num_lookahead_tokens:
            for position in range(end, ahead):
                self.memory.write(request.table, position, DRAFT)
            self.note("draft", request.name, end, ahead)
        outcome = self.right_call("commit", request.name, tuple(request.tokens), end)
        self.check(
            laws.TableView,
            outcome.table == request.table,
            lambda: (
                f"commit changed the table of {request.name!r} from {list(request.table)} to "
                f"{list(outcome.table or ())}"
            ),
        )
        request.committed = end
        if self.caching:
            self.cached.commit(self.chain(request, end), request.table)
        self.changed()

    def note(self, what: str, *arguments: Any) -> None:
        """Something in the story that is no call of the manager."""
        self.story.append(Made(Call("note", (what, *arguments)), Outcome()))
