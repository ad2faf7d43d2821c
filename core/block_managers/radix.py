"""A block manager that finds prefixes in a radix tree of tokens."""

from __future__ import annotations

from typing import ClassVar

from .prefix_index import PinTree, PrefixIndex
from .radix_index import RadixIndex
from .sharing import SharingBlockManager


class RadixBlockManager(SharingBlockManager):
    """Finds cached prefixes by comparing tokens along a tree; otherwise like ``paged``."""

    name: ClassVar[str] = "radix"

    def _make_index(self, pins: PinTree) -> PrefixIndex:
        return RadixIndex(self.config.block_size, pins)
