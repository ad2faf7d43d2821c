"""Tokenizers: transformers' own, and those rebuilt from GGUF files."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path

import gguf
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import byte_tokenizer, make_tiny_llama, write_tiny_gguf

from jackfield.core.errors import ModelError, RequestError, UnsupportedError
from jackfield.models.gguf_file import GGUFFile
from jackfield.models.tokenizer import HFTokenizer, load_gguf_tokenizer, load_tokenizer

TEXTS = st.text(max_size=60) | st.text(alphabet=" \n\tab1\uff12é'日s.-_", max_size=40)
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    path = tmp_path_factory.mktemp("gguf")
    write_tiny_gguf(path / "tiny.gguf", make_tiny_llama(path / "source"))
    return GGUFFile(path / "tiny.gguf")


@pytest.fixture(scope="module", params=["directory", "gguf"])
def tokenizer(request: pytest.FixtureRequest, directory: Path, tiny_gguf: GGUFFile) -> HFTokenizer:
    if request.param == "gguf":
        return load_gguf_tokenizer(tiny_gguf)
    return load_tokenizer(directory)


@given(text=TEXTS)
@settings(deadline=None, max_examples=100)
def test_round_trip(tokenizer: HFTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: HFTokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>")
    assert ids[1::2] == [258, 259]
    assert len(ids) == 4
    assert tokenizer.special_token_ids >= {256, 257}
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_start|>b<|im_end|>"


def test_invalid_utf8_is_replaced(tokenizer: HFTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_chat_template(tokenizer: HFTokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    ids = tokenizer.apply_chat_template(USER, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    ids = tokenizer.apply_chat_template(USER)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text + "<|im_start|>assistant\n"
    own = "{{ messages[0]['content'] }}!"
    assert tokenizer.decode(tokenizer.apply_chat_template(USER, chat_template=own)) == "Hi!"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render"),
        ("{{ messages[3]['content'] }}", "cannot render"),
    ],
)
def test_failing_template_is_a_request_error(
    tokenizer: HFTokenizer, template: str, word: str
) -> None:
    with pytest.raises(RequestError, match=word):
        tokenizer.apply_chat_template(USER, chat_template=template)


def test_no_template_is_a_request_error() -> None:
    inner = byte_tokenizer()
    inner.chat_template = None
    tokenizer = HFTokenizer(inner)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.decode(tokenizer.apply_chat_template(USER, chat_template="x")) == "x"


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json.*setting 'tokenizer'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="'owner/none' is no directory here"):
        load_tokenizer("owner/none")


def test_loading_and_long_texts_are_quiet(
    directory: Path, tiny_gguf: GGUFFile, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokenizer in (load_tokenizer(directory), load_gguf_tokenizer(tiny_gguf)):
            tokenizer.encode("x" * 5000)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level != logging.ERROR


def metadata_file(
    path: Path, tokens: list[str], kinds: list[int], scores: list[float] | None = None, **more: str
) -> GGUFFile:
    """A GGUF file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(more.pop("model", "gpt2"))
    for key, value in more.items():
        writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return GGUFFile(path)


def test_unknown_rules_are_refused(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab"]
    with pytest.raises(UnsupportedError, match=r"pre='chatglm-bpe'.*smollm"):
        load_gguf_tokenizer(metadata_file(tmp_path / "a", tokens, [1] * 3, pre="chatglm-bpe"))
    with pytest.raises(UnsupportedError, match=r"model='bert'.*gpt2, llama"):
        load_gguf_tokenizer(metadata_file(tmp_path / "b", tokens, [1] * 3, model="bert"))


WORD_PARTS = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "▁▁", "ca"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORD_PARTS]
SCORES = [0.0] * 259 + [-float((7 * index) % 11) for index in range(len(WORD_PARTS))]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORD_PARTS)]
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    return load_gguf_tokenizer(metadata_file(path, PIECES, kinds, SCORES, model="llama"))


def reference_pieces(text: str) -> list[str]:
    """SentencePiece's rule: merge the pair whose union scores best, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (SCORES[PIECES.index(a + b)], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in WORD_PARTS
        ]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(text=st.text(alphabet="abc ", max_size=16))
@settings(deadline=None, max_examples=200)
def test_sentencepiece_merges_the_best_score_first(sentencepiece: HFTokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert ids[0] == 1, "the begin token, which these models have by default"
    expected = reference_pieces(text) if text else []
    assert [PIECES[index] for index in ids[1:]] == expected
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_falls_back_to_bytes(sentencepiece: HFTokenizer) -> None:
    ids = sentencepiece.encode("aé", add_special_tokens=False)
    assert [PIECES[index] for index in ids] == ["▁a", "<0xC3>", "<0xA9>"]
    assert sentencepiece.decode(ids) == "aé"
    assert sentencepiece.encode("<s>", add_special_tokens=False) == [1]


class ReferenceBPE:
    """Byte-pair encoding written down from its definition, to compare with."""

    GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, file: GGUFFile) -> None:
        merges = file.metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        tokens = file.metadata["tokenizer.ggml.tokens"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.chars = {byte: chr(byte) for byte in printable}
        self.chars |= {byte: chr(256 + index) for index, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        digits_apart = regex.findall(r"\p{N}|\P{N}+", text)
        words = [word for part in digits_apart for word in regex.findall(self.GPT2, part)]
        return [index for word in words for index in self._word(word)]

    def knows(self, text: str) -> bool:
        return all(self.chars[byte] in self.ids for byte in text.encode())

    def _word(self, word: str) -> list[int]:
        parts = [self.chars[byte] for byte in word.encode()]
        while True:
            ranked = [
                (self.ranks[pair], index)
                for index, pair in enumerate(itertools.pairwise(parts))
                if pair in self.ranks
            ]
            if not ranked:
                return [self.ids[part] for part in parts if part in self.ids]
            at = min(ranked)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def demo_gguf(demo_file: Path) -> GGUFFile:
    return GGUFFile(demo_file)


@pytest.fixture(scope="module")
def demo_tokenizer(demo_gguf: GGUFFile) -> HFTokenizer:
    return load_gguf_tokenizer(demo_gguf)


@pytest.fixture(scope="module")
def demo_reference(demo_gguf: GGUFFile) -> ReferenceBPE:
    return ReferenceBPE(demo_gguf)


@pytest.mark.demo
@given(text=TEXTS | st.text(alphabet="the quick brown 0123456789\n ", max_size=60))
@settings(deadline=None, max_examples=200)
def test_demo_tokens_equal_the_definition(
    demo_reference: ReferenceBPE, demo_tokenizer: HFTokenizer, text: str
) -> None:
    """Some bytes are no token of this model: it has no way to write them, and drops them."""
    ids = demo_tokenizer.encode(text)
    assert ids == demo_reference.encode(text)
    if demo_reference.knows(text):
        assert demo_tokenizer.decode(ids) == text


@pytest.mark.demo
def test_demo_special_tokens(demo_tokenizer: HFTokenizer) -> None:
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    assert demo_tokenizer.special_token_ids == frozenset(range(17))
    assert demo_tokenizer.encode("  42") == [*demo_tokenizer.encode("  "), 36, 34]
    text = demo_tokenizer.decode(
        demo_tokenizer.apply_chat_template(USER), skip_special_tokens=False
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
