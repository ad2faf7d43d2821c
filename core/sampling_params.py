"""How one request is to be sampled and when it ends; names and defaults follow vLLM 0.7.3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .errors import RequestError

#: Temperatures below this mean greedy: dividing logits by them would overflow float32.
GREEDY_TEMPERATURE = 1e-5


class RequestOutputKind(Enum):
    """What each ``RequestOutput`` of a running request carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, checked when constructed.

    Attributes:
        n: completions per prompt, at least 1.
        temperature: 0 is greedy; so is anything below 1e-5.
        top_k: keep the k likeliest tokens; -1 (or 0) keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this probability, (0, 1].
        min_p: drop tokens less likely than this share of the likeliest one's probability, [0, 1].
        seed: makes the request reproducible, whatever it is batched with; None derives a seed from
            the engine's.
        stop: a string or several; the text is cut before the first one that appears.
        stop_token_ids: tokens that end the completion (besides the model's own end tokens).
        ignore_eos: do not end at the model's own end tokens.
        max_tokens: most tokens to generate, at least 1; None is up to the model length.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave tokens such as ``<|im_end|>`` out of the text.
        detokenize: produce text; without it only token ids, and ``stop`` is refused.
        output_kind: what the outputs of unfinished requests carry.

    Raises:
        RequestError: a value is out of range; the message names it and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_integers()
        self._check_numbers()
        if any(not isinstance(text, str) or not text for text in stop):
            raise RequestError(f"stop={list(stop)!r}: each stop string needs at least 1 character")
        if stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize=True or use stop_token_ids")

    def _check_integers(self) -> None:
        for name, least in (("n", 1), ("max_tokens", 1), ("top_k", -1)):
            value = getattr(self, name)
            if name == "max_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{name}={value!r} is not an integer")
            if value < least:
                raise RequestError(f"{name}={value} is below the minimum, {least}")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise RequestError(f"seed={self.seed!r} is not an integer")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(
                    f"stop_token_ids contains {token!r}: token ids are integers >= 0"
                )

    def _check_numbers(self) -> None:
        ranges = (
            ("temperature", 0.0, math.inf, "at least 0 and finite"),
            ("top_p", 0.0, 1.0, "above 0 and at most 1"),
            ("min_p", 0.0, 1.0, "between 0 and 1"),
        )
        for name, low, high, allowed in ranges:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"{name}={value!r} is not a number")
            if not math.isfinite(value) or not low <= value <= high:
                raise RequestError(f"{name}={value} must be {allowed}")
        if self.top_p == 0.0:
            raise RequestError(f"top_p={self.top_p} must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1
