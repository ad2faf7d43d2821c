"""The read-only view through which a scheduling policy sees the built-in scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.block_manager import BlockManager, BlockUsage
from ..core.scheduler import SchedulerConfig
from .entry import Entry, RequestProxy
from .queues import Queues


class QueueView:
    """The ``SchedulerView`` of the built-in scheduler: live, made once.

    ``running`` holds the paused requests too (a policy that paused them decides anew in every
    step). A request that is just arriving or has just ended is in neither queue, but ``request``
    finds it while the policy is told about it.

    Attributes:
        now: seconds on the engine's clock, as of the latest call of the scheduler.
        step: number of the step that is planned now or will be next.
    """

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, queues: Queues
    ) -> None:
        self.now = 0.0
        self.step = 0
        self._passing: dict[str, Entry] = {}
        self._config = config
        self._block_manager = block_manager
        self._queues = queues
        self._caches_prefixes = "prefix_caching" in block_manager.powers

    @contextmanager
    def showing(self, *entries: Entry) -> Iterator[None]:
        """Let ``request`` find requests that are arriving or have just ended."""
        self._passing = {entry.request_id: entry for entry in entries}
        try:
            yield
        finally:
            self._passing = {}

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of one step."""
        return self._config.max_num_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        """Most requests that hold blocks at a time."""
        return self._config.max_num_seqs

    @property
    def block_size(self) -> int:
        """Tokens that a block holds."""
        return self._block_manager.config.block_size

    @property
    def num_waiting(self) -> int:
        """Requests without blocks that could be admitted."""
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks, the paused ones included."""
        return len(self._queues.running)

    @property
    def num_swapped(self) -> int:
        """Requests with their blocks in host memory."""
        return len(self._queues.swapped)

    def waiting(self) -> Iterator[RequestProxy]:
        """Requests without blocks: preempted ones first, each group in order of arrival."""
        return (entry.view for entry in self._queues.waiting)

    def running(self) -> Iterator[RequestProxy]:
        """Requests with blocks, in order of admission."""
        return (entry.view for entry in self._queues.running.values())

    def swapped(self) -> Iterator[RequestProxy]:
        """Requests with their blocks in host memory, in order of arrival."""
        return (entry.view for entry in self._queues.swapped)

    def request(self, request_id: str) -> RequestProxy:
        """One request. Raises KeyError if it is not live."""
        entry = self._queues.live.get(request_id) or self._passing[request_id]
        return entry.view

    def block_usage(self) -> BlockUsage:
        """How the blocks stand."""
        return self._block_manager.usage()

    def num_blocks_of(self, request_id: str) -> int:
        """Device blocks that a request holds; 0 while it waits or is swapped."""
        try:
            return len(self._block_manager.block_table(request_id))
        except KeyError:
            return 0

    def match_prefix(self, request_id: str) -> int:
        """How many of a request's leading tokens are cached; a probe that changes nothing.
        Raises KeyError if it is not live."""
        entry = self._queues.live.get(request_id) or self._passing[request_id]
        if not self._caches_prefixes:
            return 0
        salt = entry.request.hints.cache_salt
        return self._block_manager.match_prefix(entry.tokens, salt=salt)
