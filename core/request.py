"""A request inside the engine, and what the engine hands back for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .errors import RequestError
from .sampling_params import SamplingParams


class FinishReason(Enum):
    """Why a completion ended; the values are the OpenAI API's, besides ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SchedulingHints:
    """What a request tells the scheduling policy and the prefix cache about itself.

    Attributes:
        client: who asks, for fair sharing; "" is anonymous.
        priority: smaller is more urgent.
        deadline: when the whole answer is wanted, in seconds on the engine's clock; None is never.
        tags: free text pairs.
        cache_salt: requests share cached prefixes only with requests of the same salt; "" is one
            too. A salt of its own keeps a client from finding out by timing what others asked.
    """

    client: str = ""
    priority: int = 0
    deadline: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    cache_salt: str = ""


@dataclass(eq=False)
class Request:
    """One sequence of tokens on its way through the engine: prompt, what was generated, progress.

    A prompt with ``n`` completions is ``n`` of these (``index`` 0 to n-1 of one ``parent_id``).
    There is no prefill or decode phase: ``num_computed_tokens`` chases ``num_tokens``, and a step
    computes some of the difference. Only the scheduler changes ``num_computed_tokens`` and
    appends tokens.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        params: sampling settings.
        arrival_time: seconds, on the engine's clock.
        arrival_index: number of requests that arrived before: the last tie-break of every order.
        max_total_tokens: prompt and completion together never exceed this.
        stop_token_ids: tokens that end the completion, the model's own end tokens included unless
            ``ignore_eos``.
        parent_id: the id that the caller knows; equal to ``request_id`` when ``n`` is 1.
        index: which of the ``n`` completions this is.
        seed: of this sequence's random stream.
        hints: for the scheduling policy and the prefix cache.
        num_cached_tokens: prompt tokens that were in the cache when it was first admitted.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival_time: float
    arrival_index: int
    max_total_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    parent_id: str = ""
    index: int = 0
    seed: int = 0
    hints: SchedulingHints = field(default_factory=SchedulingHints)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.parent_id = self.parent_id or self.request_id
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and completion."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the completion so far."""
        return len(self.output_token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        """Known tokens whose keys and values are not in the cache yet; 1 in steady decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion, as a new list."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def append_token(self, token_id: int) -> FinishReason | None:
        """Add a generated token and say whether it ends the completion."""
        self.output_token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: 0 to n-1.
        text: the text so far (with ``DELTA``, what is new); never ends inside a character or in
            the beginning of a stop string, until the completion is finished.
        token_ids: the tokens so far (with ``DELTA``, the new ones).
        finish_reason: ``stop``, ``length`` or ``abort``; None while unfinished.
        stop_reason: the stop string or token id that ended it; None for an end token of the model.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock.

    Attributes:
        arrival_time: when it was added.
        first_token_time: when its first token was there; None before.
        finished_time: when its last completion ended; None before.
        num_preemptions: how often its completions lost their blocks, to be computed anew or to be
            brought back from host memory.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """What the engine has for one prompt.

    Attributes:
        request_id: as given to ``add_request``.
        prompt: the prompt's text; None if it came as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: the completions; empty if the request was refused.
        finished: whether all completions have ended.
        error: why the request was refused; None otherwise.
        metrics: times and counts.
        num_cached_tokens: prompt tokens that prefix caching did not have to compute.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    error: RequestError | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
