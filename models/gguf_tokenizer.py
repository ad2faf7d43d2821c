"""The tokenizer of a GGUF file, rebuilt from its metadata with the ``tokenizers`` library.

GGUF stores tokens, merges and the *name* of the rule that splits text into words; the rules
themselves are code in every reader. Those below are the regular expressions that the models'
original tokenizers use. A name that is not listed is refused: with another model's rule most text
would still come out right, and some of it silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
)
from tokenizers.models import BPE

from ..core.errors import ModelError, UnsupportedError
from .gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of token (``tokenizer.ggml.token_type``) that are matched in the text as a whole."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _word_pattern(digits: str) -> str:
    """The rule that Llama 3 and Qwen2 share, but for how many digits a word may have."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_SPLITS: Mapping[str, Sequence[str]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_word_pattern(r"\p{N}{1,3}"),),
    "qwen2": (_word_pattern(r"\p{N}"),),
}
"""For each ``tokenizer.ggml.pre``, the expressions that split a text, applied one after another."""


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Rebuild a tokenizer; begin and end tokens are not added by it.

    Raises:
        ModelError: a part of it is missing or damaged.
        UnsupportedError: a kind of tokenizer or a splitting rule that is not known here.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise UnsupportedError(
            f"tokenizer of {file.path}",
            [f"tokenizer.ggml.model={kind!r} is not supported (supported: gpt2, llama)"],
        )
    _add_special_tokens(tokenizer, metadata)
    return tokenizer


def _required(file: GGUFFile, key: str) -> Any:
    if key not in file.metadata:
        raise ModelError(f"{file.path} lacks the metadata key {key}, so it cannot split text")
    return file.metadata[key]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _byte_level(file: GGUFFile) -> Tokenizer:
    metadata = file.metadata
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in _SPLITS:
        raise UnsupportedError(
            f"tokenizer of {file.path}",
            [f"tokenizer.ggml.pre={rule!r} is not supported (supported: {', '.join(_SPLITS)})"],
        )
    stored = _required(file, "tokenizer.ggml.merges")
    merges = [tuple(merge.split(" ", 1)) for merge in stored]
    try:
        model = BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=rule == "llama-bpe")
    except Exception as error:  # the library raises this class itself
        raise ModelError(f"tokenizer of {file.path}: its merges do not fit: {error}") from error
    tokenizer = Tokenizer(model)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[rule]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """Byte-pair encoding as SentencePiece does it: the best scored piece is merged first.

    Merges are not stored; any two pieces that make a third are one, ranked by its score.
    """
    metadata = file.metadata
    vocabulary = _vocabulary(metadata)
    scores = _required(file, "tokenizer.ggml.scores")
    merges = [
        (-scores[index], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[:3])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=[merge[3:] for merge in merges],
            unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are one id wherever their text stands; control tokens are special besides."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
