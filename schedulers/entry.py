"""A live request as the built-in scheduler keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import overload

from ..core.request import Request, SchedulingHints

NO_STEP = -1


class State(Enum):
    """Where a live request is.

    A follower is a completion of a prompt that another completion, its leader, computes: it has a
    seat while the leader has one, and no blocks until it is forked.
    """

    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    SWAPPED = "swapped"


class RequestProxy:
    """A live ``RequestView`` of a request, made once in its life."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        """Unique among live requests."""
        return self._request.request_id

    @property
    def arrival_time(self) -> float:
        """Seconds, on the engine's clock."""
        return self._request.arrival_time

    @property
    def arrival_index(self) -> int:
        """Number of requests that arrived before."""
        return self._request.arrival_index

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._request.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the completion so far."""
        return self._request.num_generated_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self._request.num_computed_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """Known tokens that are not computed yet; 1 in steady decoding."""
        return self._request.num_tokens_to_compute

    @property
    def max_total_tokens(self) -> int:
        """Bound on prompt and completion together."""
        return self._request.max_total_tokens

    @property
    def num_preemptions(self) -> int:
        """How often it lost its blocks."""
        return self._request.num_preemptions

    @property
    def hints(self) -> SchedulingHints:
        """What the client said about it."""
        return self._request.hints


class TokenSequence(Sequence[int]):
    """Prompt and completion of a request as one live sequence, without copying them."""

    __slots__ = ("_output", "_prompt")

    def __init__(self, request: Request) -> None:
        self._prompt = request.prompt_token_ids
        self._output = request.output_token_ids

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __iter__(self) -> Iterator[int]:
        return chain(self._prompt, self._output)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        split = len(self._prompt)
        if isinstance(index, int):
            position = index + len(self) if index < 0 else index
            if position < 0:
                raise IndexError(f"index {index} of {len(self)} tokens")
            return self._prompt[position] if position < split else self._output[position - split]
        start, stop, stride = index.indices(len(self))
        if stride != 1:
            return [self[position] for position in range(start, stop, stride)]
        from_prompt = self._prompt[start:stop] if start < split else ()
        from_output = self._output[max(start - split, 0) : max(stop - split, 0)]
        return [*from_prompt, *from_output]


class Entry:
    """A live request with its place in the scheduler.

    Attributes:
        request: the request itself.
        request_id: its id.
        sequence: number of requests added before; the order of arrival.
        tokens: its tokens as a sequence, for the block manager.
        view: what policies see of it.
        state: where it is.
        leader: who computes its prompt, while it follows.
        followers: who waits for it to have computed their prompt.
        num_tokens: as in the request, kept at hand because it is read in every step.
        capacity: tokens that it can write without asking for blocks; 0 without blocks.
        may_split: whether what it has to compute may be spread over several steps.
        rereads: whether its last prompt token is in the cache already, and is computed for its
            logits only.
        num_host_blocks: blocks that it holds in host memory.
        step: the step it is scheduled in and that has not been carried out yet, or ``NO_STEP``.
        num_new_tokens: its share of that step.
        preempted_in: the step that preempted it last, or ``NO_STEP``.
        high_water: most tokens that it had computed whenever it was preempted.
    """

    __slots__ = (
        "capacity",
        "followers",
        "high_water",
        "leader",
        "may_split",
        "num_host_blocks",
        "num_new_tokens",
        "num_tokens",
        "preempted_in",
        "request",
        "request_id",
        "rereads",
        "sequence",
        "state",
        "step",
        "tokens",
        "view",
    )

    def __init__(self, request: Request, sequence: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sequence = sequence
        self.tokens = TokenSequence(request)
        self.view = RequestProxy(request)
        self.state = State.WAITING
        self.leader: Entry | None = None
        self.followers: list[Entry] = []
        self.num_tokens = request.num_tokens
        self.capacity = 0
        self.may_split = True
        self.rereads = False
        self.num_host_blocks = 0
        self.step = NO_STEP
        self.num_new_tokens = 0
        self.preempted_in = NO_STEP
        self.high_water = 0

    @property
    def running(self) -> bool:
        """Whether it holds blocks of the device, and a seat."""
        return self.state is State.RUNNING

    @property
    def num_seats(self) -> int:
        """Seats that it takes when it runs, those of its followers included."""
        return 1 + len(self.followers)

    @property
    def num_tokens_to_compute(self) -> int:
        """Known tokens whose keys and values are not in the cache yet; at least 1."""
        return self.num_tokens - self.request.num_computed_tokens
