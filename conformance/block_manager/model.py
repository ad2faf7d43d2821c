"""What the suite knows by itself: requests, what is written where, which prefixes can be cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...core.block_manager import BlockCopy

#: What a draft of speculative decoding leaves in a slot.
DRAFT = -1
#: What was never written.
NOTHING = -2


class Prefixes:
    """Numbers the prefixes of all requests: the same number, the same tokens and salt."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | str, int], int] = {}

    def extend(self, numbers: list[int], tokens: Sequence[int], salt: str) -> None:
        """Bring ``numbers`` up to one number for each token: of the prefix that ends there."""
        for position in range(len(numbers), len(tokens)):
            parent: int | str = numbers[-1] if position else salt
            key = (parent, tokens[position])
            numbers.append(self._numbers.setdefault(key, len(self._numbers)))


@dataclass
class LiveRequest:
    """A request that holds blocks.

    Attributes:
        name: its id.
        salt: of its prefixes.
        tokens: all that it has.
        prefixes: number of the prefix that ends at each token.
        granted: tokens that it was promised slots for.
        writable: tokens up to which it may write; 0 after a fork, until it appends.
        written: leading tokens whose keys are in its blocks.
        committed: leading tokens that were committed, or cached at the admission.
        table: its device blocks; empty while it is swapped.
        host: its host blocks; empty unless it is swapped.
    """

    name: str
    salt: str
    tokens: list[int]
    prefixes: list[int]
    granted: int
    writable: int
    written: int
    committed: int
    table: tuple[int, ...] = ()
    host: tuple[int, ...] = ()

    @property
    def swapped(self) -> bool:
        """Whether it holds host blocks."""
        return bool(self.host)


class Memory:
    """The two caches: for every slot, the number of the prefix whose key it holds."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.host = [[NOTHING] * block_size for _ in range(num_host_blocks)]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copies on the device."""
        for one in copies:
            self.device[one.destination] = list(self.device[one.source])

    def copy_out(self, copies: Iterable[BlockCopy]) -> None:
        """Copies to the host."""
        for one in copies:
            self.host[one.destination] = list(self.device[one.source])

    def copy_in(self, copies: Iterable[BlockCopy]) -> None:
        """Copies from the host."""
        for one in copies:
            self.device[one.destination] = list(self.host[one.source])

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        """What a step does to the slot of a token."""
        self.device[table[position // self.block_size]][position % self.block_size] = value

    def read(self, table: Sequence[int], count: int) -> list[int]:
        """What the first ``count`` slots of a table hold."""
        size = self.block_size
        whole = [value for block in table[: -(-count // size)] for value in self.device[block]]
        return whole[:count]


@dataclass
class Cached:
    """Which device blocks stand for which prefixes, as far as it can be told from outside.

    Two requests may compute the same block at the same time; which of the two blocks a hit then
    gives is the manager's choice, and so is whether it still knows the other when the first is
    reused. So there are prefixes that a hit may find, and prefixes that it must find.

    Attributes:
        may: number of a prefix of full blocks, then the blocks that hold its last one.
        must: those of them that have to be found.
        parents: number of such a prefix to that of the prefix one block shorter; None: there is
            none.
    """

    may: dict[int, set[int]] = field(default_factory=dict)
    must: set[int] = field(default_factory=set)
    parents: dict[int, int | None] = field(default_factory=dict)

    def commit(self, chain: Sequence[int], table: Sequence[int], certain: bool = True) -> None:
        """The blocks of a table hold these prefixes from now on.

        Args:
            chain: numbers of the prefixes that end with the first, second ... block.
            table: the blocks.
            certain: False if the manager may choose not to find them.
        """
        parent = None
        for number, block in zip(chain, table, strict=False):
            self.parents[number] = parent
            holders = self.may.setdefault(number, set())
            if not holders and certain:
                self.must.add(number)
            holders.add(block)
            parent = number

    def reuse(self, blocks: Iterable[int]) -> None:
        """These blocks were handed to somebody else."""
        gone = set(blocks)
        for number, holders in list(self.may.items()):
            if holders & gone:
                holders -= gone
                self.must.discard(number)
                if not holders:
                    del self.may[number]

    def clear(self) -> None:
        """Everything was forgotten."""
        self.may.clear()
        self.must.clear()

    def longest(self, chain: Sequence[int]) -> tuple[int, int]:
        """Fewest and most leading blocks of a chain that a hit can give."""
        fewest = next((i for i, one in enumerate(chain) if one not in self.must), len(chain))
        most = next((i for i, one in enumerate(chain) if one not in self.may), len(chain))
        return fewest, most

    def certain(self) -> list[set[int]]:
        """For each prefix that must be found, the blocks one of which a hit gives."""
        return [self.may[one] for one in self._reached(self.must)]

    def possible(self) -> set[int]:
        """All blocks that a hit may give."""
        return {block for one in self._reached(self.may) for block in self.may[one]}

    def _reached(self, known: Iterable[int]) -> Iterator[int]:
        """Those prefixes all of whose shorter ones are known too."""
        names = set(known)
        for one in names:
            parent = self.parents[one]
            while parent is not None and parent in names:
                parent = self.parents[parent]
            if parent is None:
                yield one
