"""From what a caller asks for to requests that a scheduler can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .errors import RequestError
from .random_stream import child_seed, derive_seed
from .request import Request, SchedulingHints
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineLimits:
    """What a request is checked against.

    Attributes:
        max_model_len: most tokens of prompt and completion together.
        vocab_size: token ids are below this.
        eos_token_ids: the model's own end tokens.
        seed: of requests that bring none.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    seed: int = 0


class RequestIntake:
    """Tokenises prompts, checks them, and makes a request for each completion.

    Args:
        tokenizer: for text prompts; None serves token ids only.
        limits: what prompts are checked against.
        clock: seconds, monotonic.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, limits: EngineLimits, clock: Callable[[], float]
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._clock = clock

    @property
    def tokenizer(self) -> Tokenizer | None:
        """For text prompts; None serves token ids only."""
        return self._tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What prompts are checked against."""
        return self._limits

    def requests_of(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        hints: SchedulingHints,
        num_arrivals: int,
    ) -> list[Request]:
        """One request for each of ``params.n`` completions.

        Args:
            request_id: of all of them together.
            prompt: text, or token ids.
            params: sampling settings.
            hints: for the scheduling policy and the prefix cache.
            num_arrivals: requests that have arrived before.

        Raises:
            RequestError: they cannot be served.
        """
        token_ids = self._tokenize(prompt, params)
        longest, num_prompt = self._limits.max_model_len, len(token_ids)
        if num_prompt >= longest:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, and max_model_len={longest} holds prompt "
                f"and completion: the prompt may have {longest - 1} at most"
            )
        if params.max_tokens is not None and num_prompt + params.max_tokens > longest:
            raise RequestError(
                f"the prompt's {num_prompt} tokens and max_tokens={params.max_tokens} exceed "
                f"max_model_len={longest}: max_tokens may be {longest - num_prompt} at most"
            )
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._limits.eos_token_ids
        total = longest if params.max_tokens is None else num_prompt + params.max_tokens
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                params=params,
                arrival_time=self._clock(),
                arrival_index=num_arrivals + index,
                max_total_tokens=total,
                stop_token_ids=stop_ids,
                parent_id=request_id,
                index=index,
                seed=self._seed_of(params, num_arrivals, index),
                hints=hints,
            )
            for index in range(params.n)
        ]

    def _tokenize(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        if self._tokenizer is None and params.detokenize:
            raise RequestError(
                "this engine has no tokenizer (skip_tokenizer_init=True): set detokenize=False in "
                "the request"
            )
        token_ids: list[Any]  # checked below: callers are not always typed
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    "this engine has no tokenizer (skip_tokenizer_init=True): give the prompt as "
                    "token ids"
                )
            token_ids = self._tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            token_ids = list(prompt)
        else:
            raise RequestError(f"prompt={prompt!r} is neither text nor a list of token ids")
        if not token_ids:
            raise RequestError(
                f"prompt={prompt!r} is empty: at least 1 token is needed, and this model's "
                "tokenizer adds no begin token"
            )
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise RequestError(f"prompt contains {token!r}, which is no token id")
            if not 0 <= int(token) < self._limits.vocab_size:
                raise RequestError(
                    f"prompt contains token id {token}; this model's ids are 0 to "
                    f"{self._limits.vocab_size - 1}"
                )
        return [int(token) for token in token_ids]

    def _seed_of(self, params: SamplingParams, num_arrivals: int, index: int) -> int:
        if params.seed is None:
            return derive_seed(self._limits.seed, num_arrivals, index)
        return child_seed(params.seed, index)
