"""A simulated KV cache: a token in every slot that has been written."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.core.scheduler import KVMove, MoveKind

#: Pools that a kind of move reads and writes.
_POOLS = {
    MoveKind.COPY: ("device", "device"),
    MoveKind.SWAP_OUT: ("device", "host"),
    MoveKind.SWAP_IN: ("host", "device"),
}


class SimulatedCache:
    """Slots of device and host memory, by pool, block and place in the block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[str, int, int], int] = {}

    def move(self, moves: Sequence[KVMove]) -> None:
        """Copy blocks one after the other."""
        for kind, copies in moves:
            source_pool, destination_pool = _POOLS[kind]
            for copy in copies:
                for place in range(self._block_size):
                    token = self._slots.get((source_pool, copy.source, place))
                    destination = destination_pool, copy.destination, place
                    if token is None:
                        self._slots.pop(destination, None)
                    else:
                        self._slots[destination] = token

    def write(self, table: Sequence[int], position: int, token: int) -> int:
        """Write a request's token; returns the block."""
        block = int(table[position // self._block_size])
        self._slots["device", block, position % self._block_size] = token
        return block

    def read(self, table: Sequence[int], count: int) -> list[int | None]:
        """A request's first tokens."""
        return [
            self._slots.get(
                ("device", int(table[position // self._block_size]), position % self._block_size)
            )
            for position in range(count)
        ]
