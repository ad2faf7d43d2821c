"""A simulated KV cache: each slot stands for a token, all tokens before it, and the salt."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.scheduler import KVMove, MoveKind

Key = tuple[str, tuple[int, ...]]
#: Pools that a kind of move reads and writes.
_POOLS = {
    MoveKind.COPY: ("device", "device"),
    MoveKind.SWAP_OUT: ("device", "host"),
    MoveKind.SWAP_IN: ("host", "device"),
}


class SimulatedCache:
    """Slots of device and host memory, by pool and block."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._slots: dict[tuple[str, int], list[Key | None]] = {}

    def _block(self, pool: str, block: int) -> list[Key | None]:
        return self._slots.setdefault((pool, block), [None] * self._size)

    def move(self, moves: Sequence[KVMove]) -> None:
        """Copy blocks, one after the other."""
        for kind, copies in moves:
            source, destination = _POOLS[kind]
            for copy in copies:
                content = list(self._block(source, copy.source))
                self._slots[destination, copy.destination] = content

    def write(self, table: Sequence[int], position: int, key: Key) -> None:
        """Write a request's token."""
        self._block("device", table[position // self._size])[position % self._size] = key

    def wrong(self, table: Sequence[int], tokens: Sequence[int], end: int, salt: str) -> list[int]:
        """Positions before ``end`` at which a table leads to a key that is not the request's."""
        found = []
        for at in range(end):
            index = at // self._size
            key = self._block("device", table[index])[at % self._size] if index < len(table) else ()
            if key != (salt, tuple(tokens[: at + 1])):
                found.append(at)
        return found
