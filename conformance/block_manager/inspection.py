"""What has to hold after every call, whatever it was."""

from __future__ import annotations

from collections import Counter

from ...core.block_manager import BlockUsage, PrefixStats
from ..stateful.laws import StatefulLaw
from . import laws
from .calls import Call
from .model import LiveRequest
from .teller import StoryTeller


class Inspector(StoryTeller):
    """Checks the laws that need no more than a look at the manager."""

    def inspect(self) -> None:
        """Everything, after a call that changed something."""
        self._usage(self.seen.usage)
        self._tables()
        self._sharing()
        self._contents()
        self._hosts()
        self._statistics()
        self._reclaimable()
        if self.caching:
            self._cache()

    def _usage(self, usage: BlockUsage) -> None:
        config = self.config
        numbers = (usage.total, usage.used, usage.cached, usage.free)
        self.check(
            laws.Partition,
            usage.used + usage.cached + usage.free == usage.total == config.num_blocks
            and min(numbers) >= 0
            and usage.host_total == config.num_host_blocks
            and 0 <= usage.host_used <= usage.host_total
            and (self.caching or usage.cached == 0),
            lambda: f"of {config.num_blocks} blocks, usage() says {usage}",
            lambda: [
                "usage = manager.usage()",
                "assert usage.used + usage.cached + usage.free == usage.total, usage",
                f"assert usage.total == {config.num_blocks}, usage",
                f"assert usage.host_total == {config.num_host_blocks}, usage",
                "assert min(usage.used, usage.cached, usage.free, usage.host_used) >= 0, usage",
                *([] if self.caching else ["assert usage.cached == 0, usage"]),
            ],
        )

    def _tables(self) -> None:
        tables, blocks = self.seen.tables, self.config.num_blocks
        for name, table in tables.items():
            self.check(
                laws.Holders,
                len(set(table)) == len(table) and all(0 <= one < blocks for one in table),
                lambda name=name, table=table: (  # type: ignore[misc]
                    f"the table of {name!r} names a block twice or one that does not exist: "
                    f"{list(table)} of {blocks} blocks"
                ),
                lambda name=name: [  # type: ignore[misc]
                    f"table = manager.block_table({name!r}).tolist()",
                    "assert len(set(table)) == len(table), table",
                    f"assert all(0 <= block < {blocks} for block in table), table",
                ],
            )
            request = self.live[name]
            needed = self.config.blocks_for(max(request.granted, 1))
            self.check(
                laws.Slots,
                len(table) >= needed,
                lambda name=name, table=table, needed=needed, request=request: (  # type: ignore[misc]
                    f"{name!r} was promised slots for {request.granted} tokens, which take "
                    f"{needed} blocks with the lookahead, and has {list(table)}"
                ),
                lambda name=name, needed=needed: [  # type: ignore[misc]
                    f"assert len(manager.block_table({name!r})) >= {needed}"
                ],
            )
        held = {block for table in tables.values() for block in table}
        used = self.seen.usage.used
        self.check(
            laws.Holders,
            used == len(held),
            lambda: (
                f"usage() says that {used} blocks are used; the tables hold {len(held)}: {tables}"
            ),
            lambda: [
                f"tables = [manager.block_table(name).tolist() for name in {list(tables)}]",
                "held = {block for table in tables for block in table}",
                "assert manager.usage().used == len(held), (manager.usage(), tables)",
            ],
        )

    def _sharing(self) -> None:
        """Blocks that stand in several tables."""
        places: dict[int, list[tuple[str, int]]] = {}
        for name, table in self.seen.tables.items():
            for index, block in enumerate(table):
                places.setdefault(block, []).append((name, index))
        size = self.config.block_size
        for block, holders in places.items():
            if len(holders) < 2:
                continue
            first, index = holders[0]
            for name, other in holders[1:]:
                one, two = self.live[first], self.live[name]
                end = (index + 1) * size
                forked = one.writable <= index * size or two.writable <= index * size
                common = min(end, len(one.tokens), len(two.tokens))
                same = one.prefixes[:common] == two.prefixes[:common]
                law = laws.Sharing if one.salt == two.salt else laws.Salt
                self.check(
                    law,
                    index == other
                    and one.salt == two.salt
                    and (same or forked)
                    and (forked or min(one.committed, two.committed) >= end),
                    lambda block=block, one=one, two=two, index=index: (  # type: ignore[misc]
                        f"block {block} is shared by {one.name!r} and {two.name!r} as entry "
                        f"{index} of their tables, but {_why(one, two)}"
                    ),
                    lambda block=block, one=one, two=two: [  # type: ignore[misc]
                        f"first = set(manager.block_table({one.name!r}).tolist())",
                        f"second = set(manager.block_table({two.name!r}).tolist())",
                        f"assert {block} not in first & second, (first, second)",
                    ],
                )

    def _contents(self) -> None:
        for request in self.live.values():
            if request.swapped or not request.written:
                continue
            expected = request.prefixes[: request.written]
            read = self.memory.read(request.table, request.written)
            wrong = [
                i for i, pair in enumerate(zip(read, expected, strict=False)) if len(set(pair)) > 1
            ]
            self.check(
                laws.Contents,
                read == expected,
                lambda request=request, wrong=wrong: (  # type: ignore[misc]
                    f"{request.name!r} reads keys that are not its own at positions {wrong} of "
                    f"its {request.written} computed tokens, through the table "
                    f"{list(request.table)}"
                ),
                lambda request=request: [  # type: ignore[misc]
                    f"assert not wrong({request.name!r}), wrong({request.name!r})"
                ],
            )

    def _hosts(self) -> None:
        config, seen = self.config, self.seen
        swapped = tuple(name for name, one in self.live.items() if one.swapped)
        if not config.num_host_blocks:
            return
        held = [block for one in self.live.values() for block in one.host]
        self.check(
            laws.Swap,
            seen.swapped == swapped and seen.usage.host_used == len(held),
            lambda: (
                f"{list(swapped)} are swapped and hold {len(held)} host blocks; is_swapped says "
                f"{list(seen.swapped)}, usage() says {seen.usage.host_used}"
            ),
            lambda: [
                f"swapped = [one for one in {list(self.live)} if manager.is_swapped(one)]",
                f"assert swapped == {list(swapped)}, swapped",
                f"assert manager.usage().host_used == {len(held)}, manager.usage()",
            ],
        )

    def _statistics(self) -> None:
        stats: PrefixStats = self.seen.stats
        expected = (self.queried, self.hit) if self.caching else (0, 0)
        self.check(
            laws.Accounting,
            (stats.num_queried_tokens, stats.num_hit_tokens) == expected,
            lambda: (
                f"admissions so far had {expected[0]} tokens, of which {expected[1]} were found "
                f"in the cache; prefix_stats() says {stats}"
            ),
            lambda: [
                "state(manager)  # questions count nothing",
                "stats = manager.prefix_stats()",
                f"assert (stats.num_queried_tokens, stats.num_hit_tokens) == {expected}, stats",
            ],
        )

    def _reclaimable(self) -> None:
        counts = Counter(block for table in self.seen.tables.values() for block in table)
        for name, request in self.live.items():
            expected = sum(counts[block] == 1 for block in request.table)
            said = self.ask("reclaimable", name)
            self.check(
                laws.Reclaimable,
                said == expected,
                lambda name=name, said=said, expected=expected: (  # type: ignore[misc]
                    f"{name!r} alone holds {expected} device blocks; reclaimable says {said}"
                ),
                lambda name=name, expected=expected: [  # type: ignore[misc]
                    f"assert manager.reclaimable({name!r}) == {expected}, "
                    f"manager.reclaimable({name!r})"
                ],
            )

    def _cache(self) -> None:
        for (tokens, salt), hit in zip(self.prompts, self.seen.hits, strict=True):
            self.probe_is_right(tokens, salt, hit)
        for request in self.live.values():
            own = tuple(request.tokens)
            hit = self.ask("match_prefix", own, **self.salted(request.salt))
            self.probe_is_right(own, request.salt, hit)
        owned = self.owned()
        fewest = sum(not holders & owned for holders in self.cached.certain())
        most = len(self.cached.possible() - owned)
        cached = self.seen.usage.cached
        self.check(
            laws.Eviction,
            fewest <= cached <= most,
            lambda: (
                f"a hit could revive {fewest if fewest == most else f'{fewest} to {most}'} blocks "
                f"that nobody holds; usage() says that {cached} are cached"
            ),
            lambda: [
                f"assert {fewest} <= manager.usage().cached <= {most}, manager.usage()",
            ],
        )

    def probe_is_right(self, tokens: tuple[int, ...], salt: str, hit: int) -> None:
        """What ``match_prefix`` said of these tokens."""
        size, last = self.config.block_size, len(tokens) - 1
        chain = self.chain_of(tokens, salt)
        fewest, most = (min(count * size, last) for count in self.cached.longest(chain))
        code = Call("match_prefix", (tokens,), self.salted(salt)).code()
        self.check(
            laws.LastToken,
            hit <= last,
            lambda: f"{code} is {hit}: nothing of the {len(tokens)} tokens is left to compute",
            lambda: [f"assert {code} <= {last}, {code}"],
        )
        law: type[StatefulLaw] = laws.Evicted
        why = "the other blocks were never committed, or were reused since"
        if salt and self._under_other_salt(tokens, salt, hit):
            law, why = laws.Salt, "under this salt no more was committed"
        self.check(
            law,
            min(hit, last) <= most,
            lambda: f"{code} is {hit}, but only {most} tokens can be in the cache: {why}",
            lambda: [f"assert {code} <= {most}, {code}"],
        )
        self.check(
            laws.PrefixHits,
            hit >= fewest and (hit % size == 0 or hit >= last),
            lambda: (
                f"{code} is {hit}; {fewest} tokens are in the cache, and a hit is a multiple of "
                f"the block size {size} or all but the last token"
            ),
            lambda: [f"assert {code} >= {fewest}, {code}"],
        )
        self.checked.add(laws.Salt.name)

    def _under_other_salt(self, tokens: tuple[int, ...], salt: str, hit: int) -> bool:
        size = self.config.block_size
        others = {one for _, one in self.prompts if one != salt} | {""}
        return any(
            self.cached.longest(self.chain_of(tokens, other))[1] * size >= hit // size * size
            for other in others
        )


def _why(one: LiveRequest, two: LiveRequest) -> str:
    if one.salt != two.salt:
        return f"their salts are {one.salt!r} and {two.salt!r}"
    return (
        f"their tokens are {one.tokens} and {two.tokens}, of which {one.committed} and "
        f"{two.committed} are computed"
    )
