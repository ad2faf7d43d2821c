"""Admissions: what ``can_allocate`` says, what ``allocate`` gives, and what a hit may be."""

from __future__ import annotations

from ...core.block_manager import Allocation, AllocationStatus, BlockCopy
from . import laws
from .calls import Outcome
from .ending import Ending
from .model import LiveRequest


class Admissions(Ending):
    """Makes admissions and judges them."""

    def admit_tokens(self, tokens: list[int], num_tokens: int, salt: str, count: int) -> None:
        """``can_allocate``, ``allocate``, and a step of ``count`` tokens."""
        salt = salt if self.caching else ""
        self.remember(tokens, salt)
        self.num_requests += 1
        name, keywords = f"r{self.num_requests}", self.salted(salt)
        before, owned = self.seen, self.owned()
        match = self.ask("match_prefix", tuple(tokens), **keywords)
        status = self.right_call("can_allocate", tuple(tokens), num_tokens, **keywords).value
        outcome = self.right_call("allocate", name, tuple(tokens), num_tokens, **keywords)
        self.judge_admission(status, outcome, num_tokens, before.usage.available)
        if outcome.value is None:
            self.unchanged(laws.AllOrNothing)
            return
        request = LiveRequest(name, salt, tokens, [], num_tokens, num_tokens, 0, 0)
        self.numbering.extend(request.prefixes, tokens, salt)
        request.table = outcome.table or ()
        self.judge_hit(request, outcome.value, match, owned, before.usage.free)
        self.live[name] = request
        self.changed()
        if self.live.keys() - {name} and owned:
            kept, left = self.config.watermark_blocks, self.seen.usage.available
            self.check(
                laws.Watermark,
                left >= kept,
                lambda: (
                    f"{name!r} was admitted beside others and leaves {left} blocks available, "
                    f"fewer than the {kept} of the watermark {self.config.watermark}"
                ),
                lambda: [f"assert manager.usage().available >= {kept}, manager.usage()"],
            )
        self.step(request, count)

    def judge_admission(
        self, status: object, outcome: Outcome, num_tokens: int, available: int
    ) -> None:
        """What ``can_allocate`` said, against what ``allocate`` did and what a new manager does."""
        need = self.need_alone(num_tokens)
        probe, code = self.story[-2].call.code(), self.story[-1].call.code()
        admitted = outcome.value is not None
        self.covered("can_allocate", getattr(status, "name", repr(status)))
        status_is = "AllocationStatus." + str(getattr(status, "name", status))
        wanted = [
            f"status = {probe}",
            f"assert (status is AllocationStatus.OK) == ({code} is not None), status",
        ]
        self.demand(
            laws.CanAllocate,
            (status is AllocationStatus.OK) == admitted,
            lambda: (
                f"{probe} said {status_is}, then {code} "
                + ("succeeded" if admitted else "was refused")
            ),
            lambda: ["# the last two calls contradict each other", *_import_status(wanted)],
        )
        self.check(
            laws.CanAllocate,
            (status is AllocationStatus.NEVER) == (need is None),
            lambda: (
                f"{probe} said {status_is}; on a new manager {num_tokens} tokens are "
                + ("refused, which is NEVER" if need is None else "admitted")
            ),
            lambda: [
                *_import_status([f"status = {probe}"]),
                f"alone = build().allocate('alone', [10] * {num_tokens}, {num_tokens})",
                "assert (status is AllocationStatus.NEVER) == (alone is None), (status, alone)",
            ],
        )
        if need is None:
            return
        others = self.owned()
        enough = need + (self.config.watermark_blocks if others else 0) <= available
        self.check(
            laws.CanAllocate,
            admitted or bool(others and not enough),
            lambda: (
                f"{code} was refused, although {num_tokens} tokens take {need} blocks, "
                f"{available} are available and {self.config.watermark_blocks} are kept for growth"
                + ("" if others else ", the last only beside other requests")
            ),
        )

    def judge_hit(
        self,
        request: LiveRequest,
        got: Allocation,
        match: int,
        owned: set[int],
        free_before: int,
    ) -> None:
        """The blocks of a new request: those that are shared, and those that are new."""
        size, hit, table = self.config.block_size, got.num_cached_tokens, request.table
        chain = self.chain(request, len(request.tokens))
        code = self.story[-1].call.code()
        if not self.caching:
            self.demand(
                laws.Refusals,
                hit == 0 and not got.copies,
                lambda: f"{code} found {hit} tokens in a prefix cache that is switched off",
            )
        else:
            reach = min(match, request.granted)
            exact = request.granted == len(request.tokens)
            least = reach if exact else reach // size * size
            self.demand(
                laws.LastToken,
                0 <= hit < len(request.tokens),
                lambda: (
                    f"{code} found {hit} of {len(request.tokens)} tokens in the cache: at "
                    "least the last one must be left to compute"
                ),
            )
            self.demand(
                laws.PrefixHits,
                least <= hit <= reach,
                lambda: (
                    f"{code} found {hit} tokens in the cache; match_prefix just promised {match}"
                ),
            )
            self.covered("prefix hit", "of some tokens" if hit else "of none")
        reused, targets = set(), {one.destination for one in got.copies}
        for index in range(-(-hit // size)):
            whole = (index + 1) * size <= hit
            holders = self.cached.may.get(chain[index], set()) if index < len(chain) else set()
            if table[index] in targets:
                continue
            if table[index] in holders:
                reused.add(table[index])
                if not whole:
                    # It was taken for the request alone, with its keys in it: no longer a hit.
                    self.cached.must.discard(chain[index])
            elif whole or not targets:
                others = [one for one in self.live.values() if table[index] in one.table]
                law = laws.PrivateTail if others else laws.Evicted
                self.demand(
                    laws.Salt if any(one.salt != request.salt for one in others) else law,
                    False,
                    lambda index=index: (
                        f"{code} found block {table[index]} as entry {index} in "  # type: ignore[misc]
                        "the cache, which was not committed with these tokens, or was reused since"
                    ),
                )
        if hit % size:
            self.covered("prefix hit", "of a whole prompt")
        fresh = [block for block in table if block not in reused]
        self.judge_copies(got.copies, set(fresh))
        self.hand_out(fresh, owned, free_before)
        self.memory.copy(got.copies)
        request.written = request.committed = hit
        self.queried += len(request.tokens)
        self.hit += hit
        if self.caching:
            self.cached.commit(chain[: hit // size], table)

    def judge_copies(self, copies: tuple[BlockCopy, ...], fresh: set[int]) -> None:
        """Copies on the device go from a block to one that was just handed out."""
        blocks = range(self.config.num_blocks)
        code = self.story[-1].call.code()
        self.demand(
            laws.Contents,
            all(one.source in blocks and one.destination in fresh for one in copies)
            and len({one.destination for one in copies}) == len(copies),
            lambda: f"{code} wants copies to blocks that it did not hand out: {copies}",
        )

    def step(self, request: LiveRequest, count: int) -> None:
        """Compute up to ``count`` tokens; a subclass does."""


def _import_status(lines: list[str]) -> list[str]:
    return ["from jackfield.core.block_manager import AllocationStatus", *lines]
