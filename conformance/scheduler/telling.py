"""How a story is told: ids, tokens and times, none of which may matter to a scheduler."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

from ...core.request import Request, SchedulingHints
from ...core.sampling_params import SamplingParams
from ...core.scheduler import StepPlan
from ..block_manager.world import prompt
from ..stateful.laws import StatefulLaw
from . import laws
from .world import Arrive

#: The token that ends the requests that have a stop token, in an ordinary telling.
STOP_TOKEN = 3
#: What the model may say.
_TOKENS = (0, 1, 0, 1, STOP_TOKEN, 0, 2)
_LAST_ID = 999
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


@dataclass(frozen=True)
class Telling:
    """What one telling of a story differs in from others.

    Attributes:
        start: the time at which it begins; a power of two, so that sums stay exact.
        renamed: whether requests have other ids, which sort the other way round.
        offset: added to every token.
        leaps: whether the machine's clocks leap forward whenever they are read.
    """

    start: float = 0.0
    renamed: bool = False
    offset: int = 0
    leaps: bool = False

    def name(self, number: int) -> str:
        """The id of the request that was added as number ``number``."""
        return f"q{_LAST_ID - number:03d}" if self.renamed else f"r{number}"

    def back(self, value: Any) -> Any:
        """Part of a log, with the ids of an ordinary telling."""
        if not self.renamed:
            return value
        if isinstance(value, str):
            return re.sub(r"\bq(\d{3})\b", lambda found: f"r{_LAST_ID - int(found[1])}", value)
        if isinstance(value, StepPlan):
            parts = {one.name: self.back(getattr(value, one.name)) for one in fields(value)}
            return replace(value, **parts)
        if isinstance(value, tuple):
            items = [self.back(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return [self.back(item) for item in value] if isinstance(value, list) else value

    # The model.

    def prompt(self, arrive: Arrive, length: int) -> list[int]:
        """The prompt of an arrival, cut to a length."""
        return [token + self.offset for token in prompt(arrive.pattern, length, 0)]

    def next_token(self, tokens: Sequence[int], seed: int) -> int:
        """The next token after these; completions of a prompt differ by their seed."""
        mixed = len(tokens) * 5 + seed * 3
        for token in tokens[-4:]:
            mixed = (mixed * 7 + token - self.offset + 1) % 1009
        return _TOKENS[mixed % 7] + self.offset

    def alone(self, request: Request) -> list[int]:
        """The tokens that a request emits when nothing disturbs it."""
        tokens = list(request.prompt_token_ids)
        while len(tokens) < request.max_total_tokens:
            tokens.append(self.next_token(tokens, request.seed))
            if tokens[-1] in request.stop_token_ids:
                break
        return tokens[request.num_prompt_tokens :]

    def request(
        self, name: str, arrive: Arrive, length: int, total: int, number: int, now: float
    ) -> Request:
        """A new request: the ``number``-th of the story, of ``total`` tokens at most."""
        return Request(
            name,
            self.prompt(arrive, length),
            SamplingParams(n=arrive.n),
            now,
            number,
            total,
            stop_token_ids=frozenset({STOP_TOKEN + self.offset} if arrive.stops else ()),
            seed=number,
            hints=SchedulingHints(cache_salt=arrive.salt),
        )

    @contextmanager
    def clocks(self) -> Iterator[None]:
        """The clocks of this telling, instead of the machine's."""
        if not self.leaps:
            yield
            return
        names = [name + end for name in _CLOCKS for end in ("", "_ns")]
        before = {name: getattr(time, name) for name in names}
        readings = count(1)
        for name, clock in before.items():
            setattr(time, name, _leaping(clock, readings, 10**9 if name.endswith("_ns") else 1))
        try:
            yield
        finally:
            for name, clock in before.items():
                setattr(time, name, clock)


def _leaping(clock: Callable[[], Any], readings: Iterator[int], second: int) -> Callable[[], Any]:
    return lambda: clock() + 1000 * second * next(readings)


#: What each law says makes no difference.
TELLINGS: dict[type[StatefulLaw], Telling] = {
    laws.Determinism: Telling(),
    laws.Clock: Telling(leaps=True),
    laws.Shift: Telling(start=4096.0),
    laws.Names: Telling(renamed=True),
    laws.Tokens: Telling(offset=11),
}
#: All of it at once.
OTHERWISE = Telling(start=4096.0, renamed=True, offset=11, leaps=True)
