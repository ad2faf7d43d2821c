"""Where the live requests are: waiting, running, swapped, or following one that runs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from .entry import Entry, State


def _arrival(entry: Entry) -> int:
    return entry.sequence


class ArrivalQueue:
    """A few requests in order of arrival."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entry: Entry) -> None:
        """Put a request in its place."""
        insort(self._entries, entry, key=_arrival)

    def remove(self, entry: Entry) -> None:
        """Take a request out, which must be in."""
        del self._entries[bisect_left(self._entries, entry.sequence, key=_arrival)]


class WaitingQueue:
    """Requests without blocks: those that have had a seat first, each group in order of arrival.

    Adding and removing newcomers takes constant time wherever they stand. The others are few.
    """

    def __init__(self) -> None:
        self._returned = ArrivalQueue()
        # An OrderedDict, for a dict's first key is slow to find after many removals in front.
        self._newcomers: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._returned) + len(self._newcomers)

    def __iter__(self) -> Iterator[Entry]:
        return chain(self._returned, self._newcomers.values())

    def add(self, entry: Entry) -> None:
        """Put a newcomer at the end."""
        self._newcomers[entry.request_id] = entry

    def put_back(self, entry: Entry) -> None:
        """Put one that has had a seat in front, among its likes in order of arrival."""
        self._returned.add(entry)

    def remove(self, entry: Entry) -> None:
        """Take a request out, which must be in."""
        if self._newcomers.pop(entry.request_id, None) is None:
            self._returned.remove(entry)


class Queues:
    """All live requests, each in one state, and the ways from one state to another.

    Attributes:
        live: all requests, by id.
        running: those with device blocks and a seat, in order of admission.
        paused: ids of running requests that were held back in the last step.
        waiting: those without blocks, but for followers.
        swapped: those with their blocks in host memory.
        leaders: running requests with followers, by id.
        num_following: followers.
    """

    def __init__(self, num_seats: int) -> None:
        self.live: dict[str, Entry] = {}
        self.running: dict[str, Entry] = {}
        self.paused: set[str] = set()
        self.waiting = WaitingQueue()
        self.swapped = ArrivalQueue()
        self.leaders: dict[str, Entry] = {}
        self.num_following = 0
        self._num_seats = num_seats
        self._num_kept = 0  # seats of followers whose leaders run

    @property
    def num_free_seats(self) -> int:
        """Seats that nobody has."""
        return self._num_seats - len(self.running) - self._num_kept

    def add(self, entry: Entry) -> None:
        """Take a newcomer."""
        self.live[entry.request_id] = entry
        self.waiting.add(entry)

    def seat(self, entry: Entry) -> None:
        """A waiting or swapped request gets its seats."""
        (self.swapped if entry.state is State.SWAPPED else self.waiting).remove(entry)
        entry.state = State.RUNNING
        self.running[entry.request_id] = entry
        if entry.followers:
            self.leaders[entry.request_id] = entry
            self._num_kept += len(entry.followers)

    def follow(self, leader: Entry, followers: Sequence[Entry]) -> None:
        """Waiting requests wait for their leader from now on, which has no seat yet."""
        for follower in followers:
            self.waiting.remove(follower)
            follower.state, follower.leader = State.FOLLOWING, leader
        leader.followers = list(followers)
        self.num_following += len(followers)

    def unseat(self, entry: Entry, state: State) -> None:
        """A running request gives its seats up, and waits or is swapped."""
        self._leave_seat(entry)
        entry.state = state
        if state is State.SWAPPED:
            self.swapped.add(entry)
        else:
            self.waiting.put_back(entry)
            self.dismiss(entry)

    def dismiss(self, leader: Entry) -> None:
        """Followers of a leader without a seat wait on their own."""
        for follower in leader.followers:
            follower.state, follower.leader = State.WAITING, None
            self.waiting.put_back(follower)
        self.num_following -= len(leader.followers)
        leader.followers = []

    def promote(self, leader: Entry) -> list[Entry]:
        """The followers of a running leader run from now on; returns them."""
        followers, leader.followers = leader.followers, []
        del self.leaders[leader.request_id]
        self._num_kept -= len(followers)
        self.num_following -= len(followers)
        for follower in followers:
            follower.state, follower.leader = State.RUNNING, None
            self.running[follower.request_id] = follower
        return followers

    def remove(self, entry: Entry) -> None:
        """Let go of a request."""
        del self.live[entry.request_id]
        if entry.leader is not None:
            self._stop_following(entry, entry.leader)
        elif entry.state is State.RUNNING:
            self._leave_seat(entry)
        else:
            (self.swapped if entry.state is State.SWAPPED else self.waiting).remove(entry)
        self.dismiss(entry)
        entry.state = State.WAITING

    def _leave_seat(self, entry: Entry) -> None:
        del self.running[entry.request_id]
        self.paused.discard(entry.request_id)
        self._num_kept -= len(entry.followers)
        self.leaders.pop(entry.request_id, None)

    def _stop_following(self, entry: Entry, leader: Entry) -> None:
        leader.followers.remove(entry)
        entry.leader = None
        self.num_following -= 1
        if leader.state is State.RUNNING:
            self._num_kept -= 1
            if not leader.followers:
                del self.leaders[leader.request_id]
