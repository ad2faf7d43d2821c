"""What one request holds of a cache whose blocks are shared."""

from __future__ import annotations

from .block_table import GrowingTable
from .prefix_index import PrefixBlock


class Holding:
    """What a request holds.

    Attributes:
        table: its device blocks; None while it is swapped.
        host_blocks: its host blocks, in logical order; empty unless it is swapped.
        salt: under which its blocks are shared.
        num_computed: tokens known to be in the cache.
        num_registered: leading blocks that the prefix cache knows of.
        last_registered: the last of them.
        forked: whether other requests may hold blocks that it has yet to write to.
    """

    __slots__ = (
        "forked",
        "host_blocks",
        "last_registered",
        "num_computed",
        "num_registered",
        "salt",
        "table",
    )

    def __init__(self, table: GrowingTable, salt: str) -> None:
        self.table: GrowingTable | None = table
        self.host_blocks: list[int] = []
        self.salt = salt
        self.num_computed = 0
        self.num_registered = 0
        self.last_registered: PrefixBlock | None = None
        self.forked = False
