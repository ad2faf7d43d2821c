"""The waiting queue of the built-in scheduler."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from .entry import Entry


def _arrival(entry: Entry) -> int:
    return entry.sequence


class WaitingQueue:
    """Requests without blocks: the preempted ones first, each group in order of arrival.

    Adding and removing newcomers takes constant time wherever they stand. The preempted are few
    (they had seats once) and are kept in a sorted list.
    """

    def __init__(self) -> None:
        self._preempted: list[Entry] = []
        # An OrderedDict, for a dict's first key is slow to find after many removals in front.
        self._newcomers: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._newcomers)

    def __iter__(self) -> Iterator[Entry]:
        return chain(self._preempted, self._newcomers.values())

    def add(self, entry: Entry) -> None:
        """Put a newcomer at the end."""
        self._newcomers[entry.request_id] = entry

    def put_back(self, entry: Entry) -> None:
        """Put a preempted request in front, among its likes in order of arrival."""
        insort(self._preempted, entry, key=_arrival)

    def remove(self, entry: Entry) -> None:
        """Take a request out, which must be in."""
        if self._newcomers.pop(entry.request_id, None) is None:
            del self._preempted[bisect_left(self._preempted, entry.sequence, key=_arrival)]
