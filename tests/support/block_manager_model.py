"""A plain model of a block manager that shares blocks: dicts and sets, no block ids.

It knows which prefixes can be found, which requests hold them and in which order they are evicted,
and so predicts every count and every hit. It looks at everything at every step; only worlds of a
few blocks suit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jackfield.core.block_manager import BlockManagerConfig

Key = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of a block


@dataclass
class Prefix:
    """History of a prefix that can be found."""

    created: int
    num_hits: int = 0
    last_used: int = 0


@dataclass
class Holder:
    """A live request."""

    tokens: list[int]
    salt: str
    num_computed: int
    num_registered: int
    num_blocks: int
    swapped: bool = False


class Model:
    """What a manager should know after the same calls.

    Args:
        config: the manager's.
        eviction: "lru", "lfu" or "fifo".
        pinned: tokens of pinned prefixes.
    """

    def __init__(
        self, config: BlockManagerConfig, eviction: str, pinned: Sequence[Sequence[int]]
    ) -> None:
        self.config = config
        self.eviction = eviction
        self.holders: dict[str, Holder] = {}
        self.prefixes: dict[Key, Prefix] = {}
        self.tick = 0
        size = config.block_size
        self.pinned = {
            tuple(prefix[:end])
            for prefix in pinned
            for end in range(size, len(prefix) - len(prefix) % size + 1, size)
        }

    def key(self, tokens: Sequence[int], salt: str, place: int) -> Key:
        return salt, tuple(tokens[: (place + 1) * self.config.block_size])

    def keys_of(self, holder: Holder) -> list[Key]:
        places = range(0 if holder.swapped else holder.num_registered)
        return [self.key(holder.tokens, holder.salt, place) for place in places]

    def held(self) -> set[Key]:
        return {key for holder in self.holders.values() for key in self.keys_of(holder)}

    def cached(self) -> set[Key]:
        return set(self.prefixes) - self.held()

    def find(self, tokens: Sequence[int], num_tokens: int, salt: str) -> tuple[list[Key], bool]:
        """Prefixes that an admission would hit, and whether the request is cached whole."""
        size = self.config.block_size
        found: list[Key] = []
        for place in range(num_tokens // size):
            key = self.key(tokens, salt, place)
            if key not in self.prefixes:
                break
            found.append(key)
        return found, bool(found) and len(found) * size == len(tokens)

    def num_cached_tokens(self, tokens: Sequence[int], num_tokens: int, salt: str) -> int:
        found, whole = self.find(tokens, num_tokens, salt)
        return len(tokens) - 1 if whole else len(found) * self.config.block_size

    def touch(self, keys: list[Key], *, found: bool) -> None:
        for key in keys:
            self.prefixes[key].last_used = self.tick
            self.prefixes[key].num_hits += found

    def evict(self, count: int) -> set[Key]:
        """Evict so many prefixes, leaves only, and return them."""
        gone: set[Key] = set()
        for _ in range(count):
            size = self.config.block_size
            parents = {(salt, tokens[:-size]) for salt, tokens in self.prefixes}
            victim = min(self.cached() - parents, key=self.rank)
            del self.prefixes[victim]
            gone.add(victim)
        return gone

    def rank(self, key: Key) -> tuple[int, ...]:
        salt, tokens = key
        prefix = self.prefixes[key]
        order = {
            "lru": (prefix.last_used,),
            "lfu": (prefix.num_hits, prefix.last_used),
            "fifo": (prefix.created,),
        }[self.eviction]
        return (int(not salt and tokens in self.pinned), *order, -len(tokens))

    def leave(self, name: str, *, swapped: bool = False) -> None:
        """A request gives up its device blocks, for good or for host blocks."""
        self.tick += 1
        holder = self.holders[name]
        keys = self.keys_of(holder)
        if swapped:
            holder.swapped, holder.num_registered = True, 0
        else:
            del self.holders[name]
        held = self.held()
        self.touch([key for key in keys if key not in held], found=False)

    def register(self, name: str, num_computed: int) -> None:
        """The first ``num_computed`` tokens of a request are computed."""
        holder = self.holders[name]
        holder.num_computed = num_computed
        num_full = num_computed // self.config.block_size
        if not self.config.enable_prefix_caching or num_full <= holder.num_registered:
            return
        self.tick += 1
        holder.num_registered = num_full
        for key in self.keys_of(holder):
            self.prefixes.setdefault(key, Prefix(created=self.tick))
