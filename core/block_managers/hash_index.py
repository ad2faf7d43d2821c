"""A prefix index by chained hashes.

A full block is found by the hash of its parent's hash and its own tokens; the first block's parent
is the hash of the salt. The hash is BLAKE2b with 256 bits: no client can find two prefixes with the
same one, so tokens are not compared on a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

from .prefix_index import PinTree, PrefixBlock, PrefixIndex

DIGEST_SIZE = 32  # bytes


class _HashedBlock(PrefixBlock):
    """A block with the hash of all tokens up to its end."""

    __slots__ = ("digest",)

    def __init__(
        self, block_id: int, parent: PrefixBlock | None, pins: PinTree | None, digest: bytes
    ) -> None:
        super().__init__(block_id, parent, pins)
        self.digest = digest


class HashIndex(PrefixIndex):
    """One flat table from chained hash to block."""

    def __init__(self, block_size: int, pins: PinTree) -> None:
        super().__init__(block_size, pins)
        self._blocks: dict[bytes, _HashedBlock] = {}

    def find(self, token_ids: Sequence[int], limit: int, salt: str) -> list[PrefixBlock]:
        found: list[PrefixBlock] = []
        digest = root_digest(salt)
        for key in self.keys(token_ids, 0, limit):
            digest = chained_digest(digest, key)
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def extend(
        self, parent: PrefixBlock | None, salt: str, key: bytes, block_id: int
    ) -> PrefixBlock:
        before = root_digest(salt) if parent is None else cast(_HashedBlock, parent).digest
        digest = chained_digest(before, key)
        block = self._blocks.get(digest)
        if block is None:
            pins = self._pins_behind(parent, salt, key)
            block = self._blocks[digest] = _HashedBlock(block_id, parent, pins, digest)
        return block

    def remove(self, block: PrefixBlock) -> None:
        del self._blocks[cast(_HashedBlock, block).digest]

    def clear(self) -> None:
        self._blocks.clear()


def root_digest(salt: str) -> bytes:
    """What the first block of every prefix under this salt is chained to."""
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"salt").digest()


def chained_digest(parent: bytes, key: bytes) -> bytes:
    """The hash of a block, from its parent's hash and its own tokens."""
    return blake2b(parent + key, digest_size=DIGEST_SIZE, person=b"block").digest()
