"""From tokens to text while they come: incremental decoding and the search for stop strings.

**Text only grows.** Whatever was handed out stays; the deltas joined are the text; each character
is handed out once. The text is what ``tokenizer.decode`` makes of all tokens of the completion, cut
at the stop string. Two kinds of text wait until they are certain:

* a character whose bytes are not complete, at most until ``finish``, which gives U+FFFD for it;
* the longest end of the text that may be the beginning of a stop string, until the next characters
  decide.

**Which stop string wins** does not depend on how the text falls into tokens: reading the text
character by character, the first one to be completed wins; of several completed by the same
character, the longest. The text is cut before its first character, or behind its last one with
``include_stop_str_in_output``.

**Cost.** Each token decodes a window of the last few tokens, never all of them. A window starts at
a token only if decoding from there gives the end of the text that is already known, so tokenizers
that treat the first token or a leading space specially come out right.

A tokenizer whose ``decode`` takes back whole characters of earlier tokens cannot be streamed
faithfully. One case is common: with byte fallback, bytes that never become valid UTF-8 also spoil
the valid bytes before them. Text that was handed out stays, and only the new bytes give U+FFFD.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .errors import RequestError
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
#: A UTF-8 character has at most 4 bytes: after as many tokens, an incomplete one is broken.
_MAX_BYTES = 4
#: Shorten the window when it has so many tokens, to some number of tokens in this range.
_WINDOW_LIMIT = 16
_WINDOW_STARTS = range(_MAX_BYTES, 2 * _MAX_BYTES)


class Detokenizer(ABC):
    """Text of one completion, token by token; ``make_detokenizer`` gives the right kind."""

    @abstractmethod
    def append(self, token_id: int) -> str | None:
        """Take one more token.

        Returns:
            The stop string that this token completed, or None. After a stop string the text is
            final and no more tokens may follow.

        Raises:
            ValueError: the text is final already.
        """

    @abstractmethod
    def finish(self) -> str | None:
        """The completion has ended: release what was held back. A second call does nothing.

        Returns:
            A stop string that the released text completed, or None.
        """

    @abstractmethod
    def next_delta(self) -> str:
        """The visible text that earlier calls have not returned yet; may be empty."""

    @property
    @abstractmethod
    def visible_text(self) -> str:
        """The text that is certain: what may be shown now."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The visible text and what is held back because it may begin a stop string."""


class NullDetokenizer(Detokenizer):
    """For ``detokenize=False``: there is no text, hence nothing to find in it."""

    def append(self, token_id: int) -> str | None:
        """See ``Detokenizer``."""
        return None

    def finish(self) -> str | None:
        """See ``Detokenizer``."""
        return None

    def next_delta(self) -> str:
        """See ``Detokenizer``."""
        return ""

    @property
    def visible_text(self) -> str:
        """Empty."""
        return ""

    @property
    def text(self) -> str:
        """Empty."""
        return ""


class IncrementalDetokenizer(Detokenizer):
    """For ``detokenize=True``: see the head of this module for what it promises.

    Args:
        tokenizer: its ``decode`` gives the text.
        params: ``stop``, ``include_stop_str_in_output`` and ``skip_special_tokens`` are read.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = _WindowDecoder(tokenizer, params.skip_special_tokens)
        self._stops = [_StopString(stop) for stop in params.stop]
        self._include_stop = params.include_stop_str_in_output
        self._visible: list[str] = []
        self._num_returned = 0  # pieces of _visible that next_delta has returned
        self._held = ""  # the longest end of the text that begins a stop string
        self._final = False

    def append(self, token_id: int) -> str | None:
        """See ``Detokenizer``."""
        if self._final:
            raise ValueError(f"token {token_id} came after the end of its completion")
        return self._take(self._decoder.append(token_id))

    def finish(self) -> str | None:
        """See ``Detokenizer``."""
        if self._final:
            return None
        stop = self._take(self._decoder.finish())
        self._show(self._held)
        self._held = ""
        self._final = True
        return stop

    def next_delta(self) -> str:
        """See ``Detokenizer``."""
        delta = "".join(self._visible[self._num_returned :])
        self._num_returned = len(self._visible)
        return delta

    @property
    def visible_text(self) -> str:
        """See ``Detokenizer``."""
        return "".join(self._visible)

    @property
    def text(self) -> str:
        """See ``Detokenizer``."""
        return self.visible_text + self._held

    def _take(self, new_text: str) -> str | None:
        if not self._stops:
            self._show(new_text)
            return None
        known = self._held + new_text
        for index, character in enumerate(new_text):
            completed = [stop for stop in self._stops if stop.advance(character)]
            if completed:
                stop = max(completed, key=len).text
                end = len(self._held) + index + 1
                self._show(known[: end if self._include_stop else end - len(stop)])
                self._held = ""
                self._final = True
                return stop
        num_held = max(stop.num_matched for stop in self._stops)
        self._show(known[: len(known) - num_held])
        self._held = known[len(known) - num_held :]
        return None

    def _show(self, text: str) -> None:
        if text:
            self._visible.append(text)


def make_detokenizer(tokenizer: Tokenizer | None, params: SamplingParams) -> Detokenizer:
    """The detokenizer that a request's settings ask for.

    Raises:
        RequestError: text is asked for and there is no tokenizer.
    """
    if not params.detokenize:
        return NullDetokenizer()
    if tokenizer is None:
        raise RequestError("detokenize=True needs a tokenizer: the model has none; set it to False")
    return IncrementalDetokenizer(tokenizer, params)


class _StopString:
    """How much of a stop string the end of the text is, character by character.

    Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977): the cost
    of a text is linear in its length, whatever the stop string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # length of the longest beginning of `text` that ends the text so far
        self._shorter = _failure_table(text)

    def __len__(self) -> int:
        return len(self.text)

    def advance(self, character: str) -> bool:
        """Read one more character; True if it completes the stop string."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._shorter[self.num_matched]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.text)


def _failure_table(text: str) -> Sequence[int]:
    """For each length n, the longest proper beginning of ``text[:n]`` that also ends it."""
    table = [0, 0]
    for length in range(1, len(text)):
        candidate = table[length]
        while candidate and text[candidate] != text[length]:
            candidate = table[candidate]
        table.append(candidate + 1 if text[candidate] == text[length] else 0)
    return table


class _WindowDecoder:
    """Decodes a growing list of tokens piece by piece; keeps the last few tokens only."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._text = ""  # of the whole window
        self._given = ""  # what of it was returned already
        self._num_complete = 0  # tokens of the window up to the last complete character
        self._num_pending = 0  # tokens since then that changed the text

    def append(self, token_id: int) -> str:
        """The text that is new and complete with this token."""
        if token_id in self._skipped:
            return ""
        text_before = self._text
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if not self._text.endswith(_REPLACEMENT):
            return self._give_complete()
        if self._text != text_before:
            self._num_pending += 1
        if self._num_pending < _MAX_BYTES:
            return self._give(self._text.rstrip(_REPLACEMENT))
        return self._give_broken()

    def finish(self) -> str:
        """The text of an incomplete character at the end, if there is one."""
        self._agree()
        return self._give(self._text)

    def _give_complete(self) -> str:
        self._agree()
        new = self._give(self._text)
        self._num_complete = len(self._window)
        self._num_pending = 0
        self._shorten()
        return new

    def _give_broken(self) -> str:
        """Only the last U+FFFD can still become a character: give the others."""
        self._agree()
        new = self._give(self._text[:-1])
        self._shorten()
        return new

    def _give(self, text: str) -> str:
        """Return what ``text`` has more than was given; nothing while it is shorter or differs."""
        if not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        self._given = text
        return new

    def _agree(self) -> None:
        """If the window's text takes back what was given, let it go on from there instead."""
        if self._text.startswith(self._given):
            return
        if self._num_complete:
            self._window = self._window[self._num_complete :]
            self._num_complete = 0
            self._given = ""
            self._text = self._decode(self._window)
        else:
            self._text = self._given + self._text[len(self._given) :]

    def _shorten(self) -> None:
        """Let the window start later where that leaves the end of its text the same."""
        if len(self._window) < _WINDOW_LIMIT:
            return
        num_held = len(self._text) - len(self._given)
        for num_tokens in _WINDOW_STARTS:
            window = self._window[-num_tokens:]
            text = self._decode(window)
            if len(text) > num_held and self._text.endswith(text):
                self._window = window
                self._text = text
                self._given = text[: len(text) - num_held]
                self._num_complete = 0 if self._num_pending else num_tokens
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
