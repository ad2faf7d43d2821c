"""The tokenizer that requests use: transformers' own, or one rebuilt from a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import ModelError, RequestError
from ..core.tokenizer import ChatMessage
from .gguf_file import GGUFFile
from .gguf_tokenizer import gguf_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class HFTokenizer:
    """``core.tokenizer.Tokenizer`` around a transformers tokenizer."""

    def __init__(self, inner: Any, *, add_bos: bool = False) -> None:
        """Wrap.

        Args:
            inner: a ``transformers.PreTrainedTokenizerBase``.
            add_bos: put the begin token before every text, for a tokenizer that does not itself.
        """
        # The limit only makes encode() warn; the engine has one of its own, which it enforces.
        inner.model_max_length = sys.maxsize
        self._inner = inner
        self._add_bos = add_bos and inner.bos_token_id is not None
        added = inner.added_tokens_decoder.items()
        special = {index for index, token in added if token.special}
        self._special = frozenset(special.union(inner.all_special_ids))
        self._vocab_size = len(inner)

    @property
    def vocab_size(self) -> int:
        """See the contract."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """See the contract."""
        return _optional_id(self._inner.bos_token_id)

    @property
    def eos_token_id(self) -> int | None:
        """See the contract."""
        return _optional_id(self._inner.eos_token_id)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """See the contract."""
        return self._special

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it has one."""
        template = self._inner.chat_template
        return template if isinstance(template, str) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See the contract.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no encoding has.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds {text[error.start]!r} at position {error.start}, which is no "
                "character: it must be valid Unicode"
            ) from None
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens)
        if self._add_bos and add_special_tokens:
            return [int(self._inner.bos_token_id), *ids]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See the contract."""
        text: str = self._inner.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        """See the contract. The template's own text has the begin token where it wants one."""
        if chat_template is None and self._inner.chat_template is None:
            raise RequestError(
                "this model's tokenizer has no chat template: give one with the request "
                "(chat_template), or send a plain prompt"
            )
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
            )
        # A template is a program of the model's author or the client: it may raise anything.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the chat template cannot render these messages: {reason}"
            ) from error
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(source: str | Path) -> HFTokenizer:
    """Load the tokenizer of a directory or Hugging Face id.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    here = Path(source)
    if here.is_dir() and not any((here / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{here} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}): name one with the setting "
            "'tokenizer'"
        )
    with _quiet():
        from transformers import AutoTokenizer

        try:
            inner = AutoTokenizer.from_pretrained(source)
        # The library raises whatever the files provoke: OSError, ValueError, KeyError, ...
        except Exception as error:
            if not here.is_dir():
                raise ModelError(
                    f"tokenizer={str(source)!r} is no directory here, and as a Hugging Face id it "
                    "cannot be had: the hub cannot be reached or does not know it"
                ) from error
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"cannot read the tokenizer in {here}: {reason}") from error
    return HFTokenizer(inner)


def load_gguf_tokenizer(file: GGUFFile) -> HFTokenizer:
    """Rebuild the tokenizer that a GGUF file carries.

    Raises:
        ModelError: the file carries none.
        UnsupportedError: it is of a kind that is not known here.
    """
    metadata = file.metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{file.path} carries no tokenizer: name one with the setting 'tokenizer'")
    tokens = metadata["tokenizer.ggml.tokens"]

    def named(role: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None or index >= len(tokens) else tokens[index]

    with _quiet():
        from transformers import PreTrainedTokenizerFast

        inner = PreTrainedTokenizerFast(
            tokenizer_object=gguf_tokenizer(file),
            bos_token=named("bos"),
            eos_token=named("eos"),
            unk_token=named("unknown"),
            pad_token=named("padding"),
            clean_up_tokenization_spaces=False,
        )
    inner.chat_template = metadata.get("tokenizer.chat_template")
    # These two begin every text with the token unless the file says otherwise.
    default = (
        metadata.get("tokenizer.ggml.model") == "llama"
        or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    return HFTokenizer(inner, add_bos=metadata.get("tokenizer.ggml.add_bos_token", default))


def _optional_id(value: object) -> int | None:
    return int(value) if isinstance(value, int) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what transformers logs while it loads; errors are raised, not logged."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
