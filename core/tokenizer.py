"""The tokenizer contract: what the engine needs of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

ChatMessage = Mapping[str, object]


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no valid UTF-8 come out as U+FFFD."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        """Tokens of a conversation, with the model's own template or the given one.

        Raises:
            RequestError: there is no template, or it cannot render these messages.
        """
        ...
