"""How one request is to be sampled and when it ends; names and defaults follow vLLM 0.7.3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from .errors import RequestError

#: Temperatures below this mean greedy: dividing logits by them would overflow float32.
GREEDY_TEMPERATURE = 1e-5

#: Higher temperatures are infinite in float32.
MAX_TEMPERATURE = 3.4e38

_MIN_INT64, _MAX_INT64, _MAX_UINT64 = -(2**63), 2**63 - 1, 2**64 - 1


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
        temperature: 0 is greedy; so is anything below 1e-5; at most 3.4e38.
        top_k: keep the k likeliest tokens; -1 (or 0) keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this probability, (0, 1].
        min_p: drop tokens less likely than this share of the likeliest one's probability, [0, 1].
        seed: makes the request reproducible, whatever it is batched with; any 64-bit integer,
            signed or not. None derives a seed from the engine's.
        stop: a string or several; the text is cut before the first one to be completed. Read back,
            it is a tuple, and so is ``stop_token_ids``. None is taken for none.
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
        token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        checked: dict[str, object] = {
            "n": _integer("n", self.n, 1),
            "temperature": _number("temperature", self.temperature, MAX_TEMPERATURE),
            "top_k": _integer("top_k", self.top_k, -1, _MAX_INT64),
            "top_p": _number("top_p", self.top_p, 1.0, zero_included=False),
            "min_p": _number("min_p", self.min_p, 1.0),
            "stop": _as_tuple("stop", self.stop),
            "stop_token_ids": tuple(_integer("stop_token_ids: token id", t, 0) for t in token_ids),
        }
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, _MIN_INT64, _MAX_UINT64)
        if self.max_tokens is not None:
            checked["max_tokens"] = _integer("max_tokens", self.max_tokens, 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_stops()
        self._check_switches()

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str):
                raise RequestError(f"stop contains {text!r}, which is not a string")
            if not text:
                raise RequestError("stop contains '': a stop string needs at least 1 character")
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={list(self.stop)!r} needs text: set detokenize=True or use stop_token_ids"
            )

    def _check_switches(self) -> None:
        names = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name}={value!r} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            kinds = ", ".join(str(kind) for kind in RequestOutputKind)
            raise RequestError(f"output_kind={self.output_kind!r} must be one of {kinds}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if name == "stop" and isinstance(value, str):
        return (value,)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RequestError(f"{name}={value!r} must be a list; leave it out for none")
    return tuple(value)


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    if not _is_a(Integral, value):
        raise RequestError(f"{name}={value!r} must be an integer")
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise RequestError(f"{name}={value} must be at least {least}{upper}")
    return int(value)


def _number(name: str, value: Any, most: float, zero_included: bool = True) -> float:
    if not _is_a(Real, value):
        raise RequestError(f"{name}={value!r} must be a number")
    if not 0 <= value <= most or (value == 0 and not zero_included):  # NaN fails the first test
        least = "at least" if zero_included else "above"
        raise RequestError(f"{name}={value} must be {least} 0 and at most {most:g}")
    return float(value)
