"""A prefix index as a radix tree of tokens.

An edge of the tree holds the blocks of a run of tokens in which no cached prefix branches off; it
is split at the block boundary where one does. Tokens are compared: no hash stands for them.
Idea: https://arxiv.org/abs/2312.07104, section 3 (there down to the token, here to the block).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

from .prefix_index import PinTree, PrefixBlock, PrefixIndex

#: The edges that leave one point, by the key of their first block.
_Branches: TypeAlias = "dict[bytes, _Edge]"


class _Edge:
    """A run of blocks.

    Attributes:
        keys: tokens of each block, at least one.
        blocks: the blocks.
        siblings: the branches that this edge is one of.
        salt: of the tree it belongs to.
        children: the branches at its end.
    """

    __slots__ = ("blocks", "children", "keys", "salt", "siblings")

    def __init__(
        self, siblings: _Branches, salt: str, keys: list[bytes], blocks: list[_TreeBlock]
    ) -> None:
        self.siblings = siblings
        self.salt = salt
        self.keys = keys
        self.blocks = blocks
        self.children: _Branches = {}
        siblings[keys[0]] = self
        for block in blocks:
            block.edge = self

    def place_of(self, block: PrefixBlock) -> int:
        """Where on the edge a block of it stands."""
        return block.depth - self.blocks[0].depth

    def append(self, key: bytes, block: _TreeBlock) -> None:
        """Make a leaf one block longer."""
        self.keys.append(key)
        self.blocks.append(block)
        block.edge = self

    def split(self, place: int) -> None:
        """Move the first ``place`` blocks to a new edge, which this one becomes a child of.

        The blocks in front are those that the splitting request shares, so that it costs time in
        proportion to them.
        """
        front = _Edge(self.siblings, self.salt, self.keys[:place], self.blocks[:place])
        del self.keys[:place], self.blocks[:place]
        front.children[self.keys[0]] = self
        self.siblings = front.children


class _TreeBlock(PrefixBlock):
    """A block with the edge it is on."""

    __slots__ = ("edge",)
    edge: _Edge


class RadixIndex(PrefixIndex):
    """One tree for each salt."""

    def __init__(self, block_size: int, pins: PinTree) -> None:
        super().__init__(block_size, pins)
        self._roots: dict[str, _Branches] = {}

    def find(self, token_ids: Sequence[int], limit: int, salt: str) -> list[PrefixBlock]:
        found: list[PrefixBlock] = []
        branches: _Branches = self._roots.get(salt, {})
        edge: _Edge | None = None
        place = 0
        for key in self.keys(token_ids, 0, limit):
            if edge is None or place == len(edge.keys):
                edge = (branches if edge is None else edge.children).get(key)
                place = 0
                if edge is None:
                    break
            elif edge.keys[place] != key:
                break
            found.append(edge.blocks[place])
            place += 1
        return found

    def extend(
        self, parent: PrefixBlock | None, salt: str, key: bytes, block_id: int
    ) -> PrefixBlock:
        if parent is None:
            branches = self._roots.setdefault(salt, {})
        else:
            edge = cast(_TreeBlock, parent).edge
            place = edge.place_of(parent) + 1
            if place < len(edge.keys):
                if edge.keys[place] == key:
                    return edge.blocks[place]
                edge.split(place)
                edge = cast(_TreeBlock, parent).edge
            elif not edge.children:
                block = self._new_block(parent, salt, key, block_id)
                edge.append(key, block)
                return block
            branches = edge.children
        if key in branches:
            return branches[key].blocks[0]
        block = self._new_block(parent, salt, key, block_id)
        _Edge(branches, salt, [key], [block])
        return block

    def remove(self, block: PrefixBlock) -> None:
        edge = cast(_TreeBlock, block).edge
        edge.blocks.pop()
        key = edge.keys.pop()
        if edge.keys:
            return
        del edge.siblings[key]
        if not edge.siblings and block.parent is None:
            del self._roots[edge.salt]

    def clear(self) -> None:
        self._roots.clear()

    def _new_block(
        self, parent: PrefixBlock | None, salt: str, key: bytes, block_id: int
    ) -> _TreeBlock:
        return _TreeBlock(block_id, parent, self._pins_behind(parent, salt, key))
