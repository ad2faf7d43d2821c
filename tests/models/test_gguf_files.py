"""GGUF files: what is read, and what is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import TINY_CONFIG, make_tiny_llama, make_tiny_qwen2, write_tiny_gguf

from jackfield.core.errors import JackfieldError, ModelError, UnsupportedError
from jackfield.models.gguf_file import GGUFFile
from jackfield.models.gguf_weights import gguf_config, halves_from_pairs, iterate_gguf
from jackfield.models.rope import cos_sin_table


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, make_tiny_llama(tmp_path / "source", tie_word_embeddings=True))
    return path


def test_metadata_and_tensors_equal_the_reference_reader(tiny: Path) -> None:
    ours, theirs = GGUFFile(tiny), gguf.GGUFReader(tiny)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert np.array_equal(ours.tensor(tensor.name).numpy(), tensor.data)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_quantised_tensors_are_expanded_as_the_package_does(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    numbers = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    stored = gguf.quants.quantize(numbers, quantization)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("x", stored, raw_dtype=quantization)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    file = GGUFFile(tmp_path / "q.gguf")
    tensor = file.tensor("x")
    assert (tensor.shape, tensor.dtype) == ((6, 64), torch.float32)
    assert np.array_equal(tensor.numpy(), gguf.quants.dequantize(stored, quantization))
    assert np.abs(tensor.numpy() - numbers).max() < 0.4


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_configuration(tmp_path: Path, make: Callable[..., Any]) -> None:
    theirs = make(tmp_path / "source")
    write_tiny_gguf(tmp_path / "tiny.gguf", theirs)
    config = gguf_config(GGUFFile(tmp_path / "tiny.gguf"))
    assert config.architecture == type(theirs).__name__
    assert config.vocab_size == TINY_CONFIG["vocab_size"]
    assert config.num_layers == 2
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (4, 2, 16)
    assert config.attention_bias == (make is make_tiny_qwen2)
    assert (config.eos_token_ids, config.bos_token_id) == ((257,), 256)
    assert config.torch_dtype == torch.float32
    assert not config.tie_word_embeddings
    assert config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps)
    assert dict(iterate_gguf(GGUFFile(tmp_path / "tiny.gguf"), config)).keys() == set(
        theirs.state_dict()
    )


@given(st.integers(1, 6), st.integers(1, 16), st.sampled_from([(), (1,), (5,)]))
@settings(deadline=None, max_examples=30)
def test_row_order_of_converters_is_undone(heads: int, half: int, rest: tuple[int, ...]) -> None:
    """A converter stores row ``h * 2 * half + s * half + i`` at ``h * 2 * half + 2 * i + s``."""
    rows = torch.arange(heads * 2 * half * int(np.prod(rest))).view(heads * 2 * half, *rest)
    stored = torch.empty_like(rows)
    for head in range(heads):
        for side in range(2):
            for index in range(half):
                base = head * 2 * half
                stored[base + 2 * index + side] = rows[base + side * half + index]
    assert torch.equal(halves_from_pairs(stored, heads), rows)


def rewritten(tiny: Path, add: Callable[[gguf.GGUFWriter], object], arch: str = "llama") -> Path:
    """The tiny file's tensors and metadata, with additions that take precedence."""
    source = gguf.GGUFReader(tiny)
    path = tiny.with_name("changed.gguf")
    writer = gguf.GGUFWriter(path, arch)
    add(writer)
    done = set(writer.kv_data[0])
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key not in done:
            item = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


def test_unsupported_architecture_is_one_sentence(tiny: Path) -> None:
    """B049: what it is, and what is possible."""
    path = rewritten(tiny, lambda writer: None, arch="gemma3")
    with pytest.raises(UnsupportedError) as caught:
        gguf_config(GGUFFile(path))
    message = str(caught.value)
    for word in (str(path), "'gemma3'", "llama, qwen2"):
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda w: w.add_expert_count(8), ["expert_count=8"]),
        (lambda w: w.add_sliding_window(32), ["sliding_window=32"]),
        (lambda w: w.add_rope_dimension_count(8), ["rope.dimension_count=8", "16"]),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), ["'longrope'", "yarn"]),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), ["factor"]),
        (lambda w: w.add_head_count([4, 4]), ["head_count", "[4, 4]"]),
    ],
)
def test_unsupported_features_are_named(
    tiny: Path, add: Callable[[gguf.GGUFWriter], object], words: list[str]
) -> None:
    with pytest.raises(JackfieldError) as caught:
        gguf_config(GGUFFile(rewritten(tiny, add)))
    for word in words:
        assert word in str(caught.value)


def test_rope_scaling_keys(tiny: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    config = gguf_config(GGUFFile(rewritten(tiny, add)))
    assert config.max_position_embeddings == 64
    assert config.rope_scaling["rope_type"] == "yarn"
    assert config.rope_scaling["factor"] == 4.0
    assert config.rope_scaling["original_max_position_embeddings"] == 16


def test_rope_factors_divide_the_frequencies(tiny: Path) -> None:
    """How converters store Llama 3.1's scaling."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = rewritten(tiny, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    file = GGUFFile(path)
    config = gguf_config(file)
    frequencies = 10000.0 ** (-np.arange(0, 16, 2) / 16) / factors
    cos, sin = cos_sin_table(config, 50)
    assert np.allclose(cos[49], np.cos(49 * frequencies), atol=1e-5)
    assert np.allclose(sin[49], np.sin(49 * frequencies), atol=1e-5)
    assert "rope_freqs.weight" not in dict(iterate_gguf(file, config))
    wrong = rewritten(tiny, lambda writer: writer.add_tensor("rope_freqs.weight", factors[:5]))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has 5 numbers.*8"):
        gguf_config(GGUFFile(wrong))


def test_unknown_tensor_is_named(tiny: Path) -> None:
    extra = np.zeros((4, 4), dtype=np.float32)
    path = rewritten(tiny, lambda w: w.add_tensor("blk.0.attn_q_norm.weight", extra))
    file = GGUFFile(path)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        list(iterate_gguf(file, gguf_config(file)))


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 3000, -1])
def test_truncated_file(tiny: Path, kept: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"truncated|cannot read|no GGUF file|lacks") as caught:
        gguf_config(GGUFFile(tiny))
    assert str(tiny) in str(caught.value)


@given(st.binary(max_size=64))
@settings(deadline=None, max_examples=50)
def test_garbage_is_a_model_error(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.mktemp("junk") / "junk.gguf"
    path.write_bytes(b"GGUF" + junk)
    with pytest.raises(JackfieldError):
        gguf_config(GGUFFile(path))


def test_other_versions_are_refused(tiny: Path) -> None:
    content = bytearray(tiny.read_bytes())
    content[4] = 9
    tiny.write_bytes(content)
    with pytest.raises(ModelError, match="version 9"):
        GGUFFile(tiny)
