"""From files to a checkpoint: what the composition root calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.errors import ModelError
from ..core.model import Model, ModelConfig
from .config import parse_config
from .gguf_file import GGUFFile
from .gguf_weights import gguf_config, iterate_gguf
from .kv_scales import is_kv_scale, read_kv_scales
from .locate import ModelFiles
from .tokenizer import HFTokenizer, load_gguf_tokenizer, load_tokenizer
from .weights import fill_with_random, iterate_safetensors


@dataclass(frozen=True)
class Checkpoint:
    """A model's constants, its weights and its tokenizer; nothing large is read before it is used.

    Attributes:
        files: where it lies.
        config: its constants.
        tokenizer_source: directory or Hugging Face id of a tokenizer to use instead of its own.
    """

    files: ModelFiles
    config: ModelConfig
    tokenizer_source: str | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors under their Hugging Face names, on the host, but for the scales of a
        KV cache.

        Raises:
            ModelError: a file is missing or damaged.
        """
        if self.files.kind == "gguf":
            return iterate_gguf(self._gguf, self.config)
        return iterate_safetensors(self.files.path, lambda name: not is_kv_scale(name))

    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
        """For each layer the scales of keys and values in a cache of 8 bits; None without.

        Raises:
            ModelError: a file is missing or damaged, or a scale is missing or wrong.
        """
        if self.files.dummy or self.files.kind == "gguf":
            return None
        tensors = iterate_safetensors(self.files.path, is_kv_scale)
        return read_kv_scales(tensors, self.config.num_layers)

    def load_into(self, model: Model, seed: int = 0) -> None:
        """Fill a model's parameters and let it pack them.

        Args:
            model: built from ``config``.
            seed: of the random numbers, where the checkpoint was located as ``dummy``.

        Raises:
            ModelError: a file or tensor is missing, damaged, unknown or of a wrong shape.
        """
        if self.files.dummy:
            fill_with_random(model, seed)
        else:
            model.load_weights(self.weights())
        model.finish_loading()

    @cached_property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer, loaded when first asked for.

        Raises:
            ModelError: there is none, or it cannot be read.
        """
        if self.tokenizer_source is not None:
            return load_tokenizer(self.tokenizer_source)
        if self.files.kind == "gguf":
            return load_gguf_tokenizer(self._gguf)
        return load_tokenizer(self.files.path)

    @cached_property
    def _gguf(self) -> GGUFFile:
        return GGUFFile(self.files.path)


def load_checkpoint(files: ModelFiles, tokenizer: str | None = None) -> Checkpoint:
    """Open a checkpoint: reads its configuration, not its weights.

    Args:
        files: what ``locate`` found.
        tokenizer: directory or Hugging Face id of another tokenizer than its own.

    Raises:
        ModelError, UnsupportedError: see ``read_model_config``.
    """
    return Checkpoint(files, read_model_config(files), tokenizer)


def read_model_config(files: ModelFiles) -> ModelConfig:
    """The constants of a checkpoint, without touching its weights.

    Raises:
        ModelError: a file is missing or malformed.
        UnsupportedError: the model needs something that is not supported.
    """
    if files.kind == "gguf":
        return gguf_config(GGUFFile(files.path))
    generation = files.path / "generation_config.json"
    return parse_config(
        _read_json(files.path / "config.json"),
        _read_json(generation) if generation.is_file() else None,
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content
