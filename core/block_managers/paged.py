"""The default block manager: blocks handed out one by one, prefixes found by chained hashes."""

from __future__ import annotations

from typing import ClassVar

from .hash_index import HashIndex
from .prefix_index import PinTree, PrefixIndex
from .sharing import SharingBlockManager


class PagedBlockManager(SharingBlockManager):
    """Finds cached prefixes by a cryptographic hash of all tokens up to a block's end."""

    name: ClassVar[str] = "paged"

    def _make_index(self, pins: PinTree) -> PrefixIndex:
        return HashIndex(self.config.block_size, pins)
