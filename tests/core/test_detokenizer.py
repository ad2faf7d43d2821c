"""Incremental decoding and stop strings: deltas, full decode and token borders agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jackfield.core.detokenizer import (
    Detokenizer,
    IncrementalDetokenizer,
    NullDetokenizer,
    make_detokenizer,
)
from jackfield.core.errors import RequestError
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.tokenizer import ChatMessage

REPLACEMENT = "\ufffd"


class CountingTokenizer:
    """The part of the tokenizer contract that decoding needs; counts what is decoded."""

    def __init__(self, vocab_size: int, special_token_ids: Iterable[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.special_token_ids = frozenset(special_token_ids)
        self.bos_token_id: int | None = None
        self.eos_token_id: int | None = None
        self.num_decoded = 0
        self.longest = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        return self.to_text(token_ids, skip_special_tokens)

    def to_text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        raise NotImplementedError


class ByteTokenizer(CountingTokenizer):
    """Tokens are byte strings; ids 0 to 255 are single bytes, then special tokens, then others."""

    def __init__(self, more: Sequence[bytes] = ()) -> None:
        specials = [b"<s>", b"</s>"]
        self.table = [bytes([byte]) for byte in range(256)] + specials + list(more)
        super().__init__(len(self.table), special_token_ids=(256, 257))

    def to_text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.table[token] for token in token_ids if token not in skipped)
        return data.decode("utf-8", errors="replace")


class LibraryTokenizer(CountingTokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        specials = [token for token, content in added.items() if content.special]
        super().__init__(tokenizer.get_vocab_size(), specials)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def to_text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def byte_level() -> LibraryTokenizer:
    """GPT-2 style: bytes under printable names, a few merged tokens, some cut a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("a", "b"), ("Ġ", "â"), ("Ġâ", "Ģ"), ("æ", "¼"), ("Ġ", "Ġ")]
    names = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return LibraryTokenizer(tokenizer)


PIECES = ["▁", "▁hello", "▁world", "lo", "he", ",", ".", "▁a", "b", "c", "▁▁", "\n", "é"]


def metaspace() -> LibraryTokenizer:
    """Sentencepiece style: ▁ for a space, the one in front of the text is not part of it."""
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(PIECES)}, unk_token="▁")
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return LibraryTokenizer(tokenizer)


def byte_fallback() -> LibraryTokenizer:
    """Llama 2 style: as above, and bytes as <0xNN> for what has no piece of its own."""
    names = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab: list[tuple[str, float]] = [(name, -float(i)) for i, name in enumerate(names)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return LibraryTokenizer(tokenizer)


def word_piece() -> LibraryTokenizer:
    """BERT style: ## continues a word, and there is no space before punctuation."""
    names = ["[UNK]", "look", "##ing", "##s", "is", "it", ",", ".", "!", "do", "n't", "'", "##'s"]
    tokenizer = Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[SEP]"])
    return LibraryTokenizer(tokenizer)


def run(detokenizer: Detokenizer, tokens: Iterable[int]) -> tuple[list[str], str | None]:
    """Feed tokens until a stop string; give the deltas and the stop string."""
    deltas: list[str] = []
    stop = None
    for token in tokens:
        stop = detokenizer.append(token)
        assert detokenizer.text.startswith(detokenizer.visible_text)
        deltas.append(detokenizer.next_delta())
        assert "".join(deltas) == detokenizer.visible_text
        if stop is not None:
            break
    stop = detokenizer.finish() or stop
    deltas.append(detokenizer.next_delta())
    assert "".join(deltas) == detokenizer.text == detokenizer.visible_text
    return deltas, stop


def run_texts(texts: Sequence[str], **settings: object) -> tuple[list[str], str | None]:
    """As `run`, with one token for each of these texts."""
    tokenizer = ByteTokenizer([text.encode() for text in texts])
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    return run(detokenizer, range(258, 258 + len(texts)))


def is_subsequence(part: str, whole: str) -> bool:
    """Whether `part` is left over when some characters of `whole` are taken out."""
    rest = iter(whole)
    return all(character in rest for character in part)


class TestStopStrings:
    @pytest.mark.parametrize(
        ("stop", "include", "text", "reason"),
        [
            ("bc", False, "a", "bc"),
            ("bcde", False, "a", "bcde"),
            (["ef", "cd"], False, "ab", "cd"),
            ("bc", True, "abc", "bc"),
            ("bcde", True, "abcde", "bcde"),
            ("gh", False, "abcdef", "gh"),
            ("hi", False, "abcdefgh", None),
            ("abcdefgh", False, "", "abcdefgh"),
        ],
    )
    def test_cut_wherever_tokens_lie(
        self, stop: str | list[str], include: bool, text: str, reason: str | None
    ) -> None:
        deltas, found = run_texts(
            ["ab", "cd", "ef", "gh"], stop=stop, include_stop_str_in_output=include
        )
        assert "".join(deltas) == text
        assert found == reason

    def test_beginning_of_a_stop_string_is_held_back(self) -> None:
        deltas, found = run_texts("pqrstuvw", stop="rstuv")
        assert "".join(deltas) == "pq"
        assert not any("r" in delta for delta in deltas)
        assert found == "rstuv"

    def test_false_alarm_is_released_once(self) -> None:
        deltas, found = run_texts("pqrstz", stop="rstuv")
        assert deltas == ["p", "q", "", "", "", "rstz", ""]
        assert found is None

    def test_what_is_held_at_the_end_is_released(self) -> None:
        deltas, found = run_texts("pqrst", stop="rstuv")
        assert deltas == ["p", "q", "", "", "", "rst"]
        assert found is None

    def test_text_holds_more_than_is_visible(self) -> None:
        tokenizer = ByteTokenizer()
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="xyz"))
        for byte in b"axy":
            detokenizer.append(byte)
        assert detokenizer.visible_text == "a"
        assert detokenizer.text == "axy"

    @pytest.mark.parametrize(
        ("tokens", "stop", "text", "reason"),
        [
            ([" Nora", "?", " yes"], ["Nora:"], " Nora? yes", None),
            ("aaabc", ["aab"], "a", "aab"),
            ("xyz", ["xyz", "yz"], "", "xyz"),
            ("xyz", ["yz", "xyz"], "", "xyz"),
            (["xyz"], ["yz", "xyz"], "", "xyz"),
            ("ababac", ["abac"], "ab", "abac"),
            ("a\n\nb", ["\n\n", "\n"], "a", "\n"),
        ],
    )
    def test_each_character_is_sent_once(
        self, tokens: Sequence[str], stop: list[str], text: str, reason: str | None
    ) -> None:
        deltas, found = run_texts(tokens, stop=stop)
        assert "".join(deltas) == text
        assert found == reason

    def test_first_to_be_completed_wins_wherever_tokens_lie(self) -> None:
        for tokens in (["abcde"], "abcde", ["ab", "cde"]):
            deltas, found = run_texts(tokens, stop=["bcd", "c"])
            assert ("".join(deltas), found) == ("ab", "c")

    @given(
        text=st.text("abc", max_size=30),
        stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
        include=st.booleans(),
        data=st.data(),
    )
    @settings(deadline=None, max_examples=300)
    def test_agrees_with_a_search_in_the_whole_text(
        self, text: str, stops: list[str], include: bool, data: st.DataObject
    ) -> None:
        matches = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text
        ]
        end, _, expected_stop = min(matches, default=(len(text), 0, None))
        start = end - len(expected_stop or "")
        expected = text[: end if include else start]

        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1))), label="cuts"))
        tokens = [text[a:b] for a, b in pairwise([0, *cuts, len(text)]) if a < b]
        tokenizer = ByteTokenizer([token.encode() for token in tokens])
        detokenizer = IncrementalDetokenizer(
            tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=include)
        )
        fed, found = "", None
        for index, token in enumerate(tokens):
            found = detokenizer.append(258 + index)
            fed += token
            if found is not None:
                break
            held = max(n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n]))
            assert detokenizer.visible_text == fed[: len(fed) - held]
            assert detokenizer.text == fed
        detokenizer.finish()
        assert detokenizer.text == expected
        assert found == expected_stop

    def test_stop_string_with_a_split_character(self) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(stop="漢é"))
        deltas, found = run(detokenizer, "ab漢漢écd".encode())
        assert "".join(deltas) == "ab漢"
        assert found == "漢é"

    def test_stop_string_completed_by_the_flush(self) -> None:
        detokenizer = IncrementalDetokenizer(
            ByteTokenizer(), SamplingParams(stop="b" + REPLACEMENT)
        )
        deltas, found = run(detokenizer, b"ab\xe6")
        assert "".join(deltas) == "a"
        assert found == "b" + REPLACEMENT

    def test_no_token_may_follow_the_end(self) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(stop="b"))
        assert detokenizer.append(ord("b")) == "b"
        with pytest.raises(ValueError, match="token 99 came after the end"):
            detokenizer.append(99)
        assert detokenizer.finish() is None


class TestCharacters:
    TEXT = "d\u00e9j\u00e0 \u6f22 \U0001f41d fin"

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
    def test_split_over_tokens(self, size: int) -> None:
        data = self.TEXT.encode()
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        detokenizer = IncrementalDetokenizer(ByteTokenizer(parts), SamplingParams())
        deltas, _ = run(detokenizer, range(258, 258 + len(parts)))
        assert "".join(deltas) == self.TEXT
        assert not any(REPLACEMENT in delta for delta in deltas)

    @pytest.mark.parametrize("parts", [[b"\xe6\xbc", b"\xa2"], [b"\xf0\x9f", b"\x90\x9d"]])
    def test_first_token_is_part_of_a_character(self, parts: list[bytes]) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(parts), SamplingParams())
        deltas, _ = run(detokenizer, [258, 259])
        assert deltas == ["", b"".join(parts).decode(), ""]

    def test_whole_characters_before_a_part_are_not_held(self) -> None:
        tokenizer = ByteTokenizer([b" \xe2\x80", b"\x9c"])
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), [258, 259])
        assert deltas == [" ", "\u201c", ""]

    def test_end_within_a_character(self) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams())
        deltas, _ = run(detokenizer, "a漢".encode()[:-1])
        assert deltas == ["a", "", "", REPLACEMENT]

    @given(data=st.binary(max_size=120))
    @settings(deadline=None, max_examples=200)
    def test_any_bytes_give_the_full_decode(self, data: bytes) -> None:
        deltas, _ = run(IncrementalDetokenizer(ByteTokenizer(), SamplingParams()), data)
        assert "".join(deltas) == data.decode("utf-8", errors="replace")

    def test_bytes_that_never_become_text_do_not_wait_for_the_end(self) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams())
        for _ in range(200):
            detokenizer.append(0xFF)
        assert len(detokenizer.visible_text) >= 195

    def test_tokens_without_bytes_inside_a_character(self) -> None:
        tokenizer = ByteTokenizer([b""])
        tokens = [0xE6, *[258] * 10, 0xBC, *[258] * 10, 0xA2]
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), tokens)
        assert "".join(deltas) == "漢"

    def test_special_tokens_are_skipped_or_kept(self) -> None:
        tokens = [256, ord("a"), 0xC3, 257, 0xA9, 257]
        skipped = IncrementalDetokenizer(ByteTokenizer(), SamplingParams())
        assert "".join(run(skipped, tokens)[0]) == "aé"
        tokens = [256, ord("a"), 257]
        kept = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(skip_special_tokens=False))
        assert "".join(run(kept, tokens)[0]) == "<s>a</s>"


TOKENIZERS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
}


class TestTokenizers:
    @pytest.mark.parametrize("name", ["byte_level", "metaspace", "word_piece"])
    @given(data=st.data(), skip=st.booleans())
    @settings(deadline=None, max_examples=150)
    def test_any_tokens_give_the_full_decode(
        self, name: str, data: st.DataObject, skip: bool
    ) -> None:
        tokenizer = TOKENIZERS[name]()
        ids = st.integers(0, tokenizer.vocab_size + 3)  # ids above the vocabulary have no text
        tokens = data.draw(st.lists(ids, max_size=80), label="tokens")
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
        deltas, _ = run(detokenizer, tokens)
        assert "".join(deltas) == tokenizer.decode(tokens, skip)

    @given(data=st.data())
    @settings(deadline=None, max_examples=150)
    def test_byte_fallback_of_whole_characters(self, data: st.DataObject) -> None:
        tokenizer = byte_fallback()
        first_byte = len(PIECES)
        pieces = st.integers(0, first_byte - 1).map(lambda token: [token])
        specials = st.sampled_from(sorted(tokenizer.special_token_ids)).map(lambda token: [token])
        characters = st.sampled_from("aé漢🐝\n").map(
            lambda character: [first_byte + byte for byte in character.encode()]
        )
        parts = data.draw(st.lists(pieces | characters | specials, max_size=40), label="parts")
        tokens = [token for part in parts for token in part]
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), tokens)
        assert "".join(deltas) == tokenizer.decode(tokens)
        assert not any(REPLACEMENT in delta for delta in deltas)

    @given(data=st.data())
    @settings(deadline=None, max_examples=150)
    def test_byte_fallback_of_any_tokens_loses_no_character(self, data: st.DataObject) -> None:
        tokenizer = byte_fallback()
        first_byte = len(PIECES)
        ids = st.integers(0, tokenizer.vocab_size - 1)
        tokens = data.draw(st.lists(ids, max_size=80), label="tokens")
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), tokens)
        raw = b"".join(
            PIECES[token].replace("▁", " ").encode()
            if token < first_byte
            else bytes([token - first_byte])
            for token in tokens
            if token not in tokenizer.special_token_ids
        )
        # The full decode drops valid characters beside invalid bytes; streaming keeps those that
        # it has shown, and shows none that the bytes do not hold.
        whole = tokenizer.decode(tokens).replace(REPLACEMENT, "")
        streamed = "".join(deltas).replace(REPLACEMENT, "")
        assert is_subsequence(whole, streamed)
        assert is_subsequence(streamed, raw.decode("utf-8", errors="ignore"))

    def test_byte_fallback_spoiled_after_the_fact(self) -> None:
        tokenizer = byte_fallback()
        first = len(PIECES)
        tokens = [first + byte for byte in [*"漢".encode(), 0xFF]] + [PIECES.index("▁hello")]
        assert tokenizer.decode(tokens) == REPLACEMENT * 4 + " hello"
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), tokens)
        assert "".join(deltas) == "漢" + REPLACEMENT + " hello"

    def test_byte_fallback_ends_within_a_character(self) -> None:
        tokenizer = byte_fallback()
        tokens = [len(PIECES) + byte for byte in b"\n\xe6\xbc"]
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), tokens)
        assert deltas == ["\n", "", "", REPLACEMENT * 2]

    @pytest.mark.parametrize("name", ["byte_level", "metaspace", "byte_fallback"])
    def test_tokens_without_text_leave_spaces_and_characters_alone(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        nothing = [tokenizer.vocab_size + 7] * 20
        if name == "metaspace":
            tokens = [PIECES.index("▁hello"), *nothing, PIECES.index("▁world")]
            expected = "hello world"
        else:
            names = [f"<0x{byte:02X}>" for byte in "漢".encode()]
            names = names if name == "byte_fallback" else ["æ", "¼", "¢"]
            vocab = tokenizer.tokenizer.get_vocab()
            tokens = [token for each in names for token in (vocab[each], *nothing)]
            expected = "漢"
        assert tokenizer.decode(tokens) == expected
        deltas, _ = run(IncrementalDetokenizer(tokenizer, SamplingParams()), tokens)
        assert "".join(deltas) == expected

    @pytest.mark.parametrize("name", list(TOKENIZERS))
    def test_skipped_tokens_cost_nothing(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
        for _ in range(100):
            detokenizer.append(min(tokenizer.special_token_ids))
        assert tokenizer.num_decoded == 0

    @pytest.mark.parametrize("name", list(TOKENIZERS))
    def test_cost_of_a_token_does_not_grow(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
        tokens = [(7 * index * index + index) % 13 for index in range(2000)]
        for token in tokens:
            detokenizer.append(token)
        assert tokenizer.longest <= 24
        assert tokenizer.num_decoded <= 20 * len(tokens)

    @pytest.mark.parametrize("data", ["🐝" * 300, "漢" * 300, "aé" * 300])
    def test_cost_does_not_grow_with_one_byte_per_token(self, data: str) -> None:
        tokenizer = ByteTokenizer()
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
        for byte in data.encode():
            detokenizer.append(byte)
        assert tokenizer.longest <= 24


class TestMakeDetokenizer:
    def test_text_is_asked_for(self) -> None:
        detokenizer = make_detokenizer(ByteTokenizer(), SamplingParams())
        assert isinstance(detokenizer, IncrementalDetokenizer)

    def test_no_text_is_asked_for(self) -> None:
        detokenizer = make_detokenizer(None, SamplingParams(detokenize=False))
        assert isinstance(detokenizer, NullDetokenizer)
        assert run(detokenizer, [1, 2, 3]) == ([""] * 4, None)

    def test_without_a_tokenizer_text_is_refused(self) -> None:
        with pytest.raises(RequestError, match="detokenize=True needs a tokenizer"):
            make_detokenizer(None, SamplingParams())
