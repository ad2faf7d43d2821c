"""What a prefix index is: it finds full blocks by the tokens up to their end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..errors import ConfigError

#: Pinned prefixes as a tree: from the key of a block to the blocks that may follow it.
PinTree: TypeAlias = "dict[bytes, PinTree]"


class PrefixBlock:
    """A block that prefixes can be found by: full, all its tokens computed.

    Attributes:
        block_id: the physical block; another one with the same contents may take its place.
        parent: the block before it in the prefix; None for a first block.
        depth: blocks before it.
        pins: how pinned prefixes go on behind this block; None if it belongs to none.
        num_children: blocks that have it as parent.
        in_use: whether a request holds it.
        duplicates: further blocks with the same contents that requests hold.
        num_hits: admissions that found it.
        last_used: when a request last found it or gave it up, in ticks of the cache.
        created: when it was computed, in ticks of the cache.
    """

    __slots__ = (
        "block_id",
        "created",
        "depth",
        "duplicates",
        "in_use",
        "last_used",
        "num_children",
        "num_hits",
        "parent",
        "pins",
    )

    def __init__(self, block_id: int, parent: PrefixBlock | None, pins: PinTree | None) -> None:
        self.block_id = block_id
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.pins = pins
        self.num_children = 0
        self.in_use = True
        self.duplicates: dict[int, None] = {}
        self.num_hits = 0
        self.last_used = 0
        self.created = 0
        if parent is not None:
            parent.num_children += 1


class PrefixIndex(ABC):
    """Keeps ``PrefixBlock`` objects by their tokens, one for each prefix and salt.

    Args:
        block_size: tokens per block.
        pins: prefixes whose blocks are marked as pinned; only those without salt.
    """

    def __init__(self, block_size: int, pins: PinTree) -> None:
        self.block_size = block_size
        self._pins = pins

    @abstractmethod
    def find(self, token_ids: Sequence[int], limit: int, salt: str) -> list[PrefixBlock]:
        """The longest chain of blocks that begins ``token_ids``, at most ``limit`` blocks.

        A probe; it costs time in proportion to the blocks that it finds.
        """

    @abstractmethod
    def extend(
        self, parent: PrefixBlock | None, salt: str, key: bytes, block_id: int
    ) -> PrefixBlock:
        """The block behind ``parent`` with the tokens of ``key``; a new one, which is
        ``block_id``, if there is none yet."""

    @abstractmethod
    def remove(self, block: PrefixBlock) -> None:
        """Forget a block that has no children."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks."""

    def keys(self, token_ids: Sequence[int], start: int, stop: int) -> Iterator[bytes]:
        """Keys of the blocks from ``start`` to ``stop``: their tokens as bytes."""
        return block_keys(token_ids, start, stop, self.block_size)

    def _pins_behind(self, parent: PrefixBlock | None, salt: str, key: bytes) -> PinTree | None:
        """Where pinned prefixes go on behind a new block; None if it belongs to none."""
        if parent is None:
            return None if salt else self._pins.get(key)
        return None if parent.pins is None else parent.pins.get(key)


def block_keys(token_ids: Sequence[int], start: int, stop: int, block_size: int) -> Iterator[bytes]:
    """Tokens of the blocks from ``start`` to ``stop`` as bytes, 8 for each token."""
    for first in range(start * block_size, stop * block_size, block_size):
        yield array("q", token_ids[first : first + block_size]).tobytes()


def pin_tree(prefixes: Sequence[Sequence[int]], block_size: int) -> PinTree:
    """The full blocks of some prefixes, as a tree.

    Raises:
        ConfigError: a prefix fills no block.
    """
    tree: PinTree = {}
    for number, prefix in enumerate(prefixes):
        if len(prefix) < block_size:
            raise ConfigError(
                f"pinned_prefixes[{number}] has {len(prefix)} tokens, but only full blocks of "
                f"block_size={block_size} tokens are cached; pin a longer prefix or lower "
                "block_size"
            )
        level = tree
        for key in block_keys(prefix, 0, len(prefix) // block_size, block_size):
            level = level.setdefault(key, {})
    return tree
