"""Damaged and incomplete checkpoints are refused by name, before anything is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_tiny_llama
from torch import Tensor

from jackfield.core.errors import ModelError
from jackfield.models.llama import LlamaForCausalLM
from jackfield.models.loader import load_checkpoint
from jackfield.models.locate import locate

INDEX = "model.safetensors.index.json"


def load(directory: Path) -> LlamaForCausalLM:
    checkpoint = load_checkpoint(locate(str(directory)))
    model = LlamaForCausalLM(checkpoint.config, torch.float32, torch.device("cpu"))
    checkpoint.load_into(model)
    return model


def second_shard(directory: Path) -> tuple[Path, str]:
    """A shard, and a tensor that the index puts there."""
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    file = sorted(set(weight_map.values()))[1]
    return directory / file, min(name for name, where in weight_map.items() if where == file)


def change(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_tiny_llama(tmp_path, sharded=True)
    return tmp_path


def test_missing_shard(sharded: Path) -> None:
    """B047 (i)."""
    path, _ = second_shard(sharded)
    path.unlink()
    with pytest.raises(ModelError, match=path.name):
        load(sharded)


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    """B047 (ii)."""
    path, name = second_shard(sharded)
    change(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"{path.name}.*{name}"):
        load(sharded)


def test_truncated_shard(sharded: Path) -> None:
    """B047 (iii)."""
    path, _ = second_shard(sharded)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{path.name} is damaged or incomplete"):
        load(sharded)


def test_wrong_shape(sharded: Path) -> None:
    """B047 (iv)."""
    path, name = second_shard(sharded)
    shape = list(load_file(path)[name].shape)
    change(path, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    with pytest.raises(ModelError) as caught:
        load(sharded)
    for part in (name, "[3, 5]", str(shape)):
        assert part in str(caught.value)


def test_unreadable_index(sharded: Path) -> None:
    (sharded / INDEX).write_text("{")
    with pytest.raises(ModelError, match=INDEX):
        load(sharded)


def test_tied_checkpoint_without_output_layer(tmp_path: Path) -> None:
    """B046: the output layer is the embedding, not left random."""
    make_tiny_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_untied_checkpoint_without_output_layer(tmp_path: Path) -> None:
    """B046: it is named."""
    make_tiny_llama(tmp_path)
    change(tmp_path / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load(tmp_path)


def test_tied_checkpoint_with_a_second_copy(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    embedding = load_file(path)["model.embed_tokens.weight"]
    change(path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    load(tmp_path)
    change(path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelError, match=r"lm_head\.weight that differs.*tie_word_embeddings"):
        load(tmp_path)


def test_unknown_and_ignorable_tensors(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    computed = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(path, lambda tensors: tensors.update({computed: torch.zeros(8)}))
    load(tmp_path)
    change(path, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(8)}))
    with pytest.raises(ModelError, match=r"model\.extra\.weight"):
        load(tmp_path)


def test_missing_bias_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, attention_bias=True)
    name = "model.layers.1.self_attn.k_proj.bias"
    change(tmp_path / "model.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=name):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    name = "model.norm.weight"
    change(
        tmp_path / "model.safetensors",
        lambda tensors: tensors.update({name: torch.ones(64, dtype=torch.int8)}),
    )
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*int8"):
        load(tmp_path)
