"""Finding a model by name: a directory, a GGUF file, a Hugging Face id, or ``demo``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.errors import ModelError
from . import demo
from .weights import safetensors_files

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class ModelFiles:
    """Where a checkpoint lies.

    Attributes:
        kind: ``safetensors`` for a directory with ``config.json``, ``gguf`` for one file.
        path: the directory or the file.
        name: for people: what was asked for.
        dummy: whether its weights are to be random numbers instead of the stored ones.
    """

    kind: Literal["safetensors", "gguf"]
    path: Path
    name: str
    dummy: bool = False


def locate(model: str, load_format: LoadFormat = "auto", revision: str | None = None) -> ModelFiles:
    """Find a model, fetching it if it is not on this machine.

    Args:
        model: a directory, a ``.gguf`` file, a Hugging Face id, or ``demo``.
        load_format: what to insist on; ``auto`` takes what is there.
        revision: branch, tag or commit of a Hugging Face id.

    Raises:
        ModelError: it is none of these, cannot be fetched, or holds no weights that can be loaded.
    """
    dummy = load_format == "dummy"
    if revision is not None and (model == "demo" or Path(model).expanduser().exists()):
        raise ModelError(
            f"revision={revision!r} is for Hugging Face ids, and model={model!r} is none: leave "
            "revision unset"
        )
    if model == "demo" and not Path(model).exists():
        files = ModelFiles("gguf", demo.demo_file(), "demo", dummy)
    elif (path := Path(model).expanduser()).is_dir():
        files = _in_directory(path, model, load_format)
    elif path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"model={model!r} is a file, but no .gguf file; for safetensors name the directory"
            )
        files = ModelFiles("gguf", path, path.stem, dummy)
    elif path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"model={model!r} is neither a directory nor a GGUF file here, and no Hugging Face id "
            "(owner/name) either"
        )
    else:
        files = ModelFiles("safetensors", _fetch(model, revision, dummy), model, dummy)
    if load_format in ("safetensors", "gguf") and files.kind != load_format:
        raise ModelError(f"model={model!r} is {files.kind}, and load_format={load_format!r}")
    if files.kind == "safetensors" and not dummy:
        safetensors_files(files.path)
    return files


def _in_directory(directory: Path, name: str, load_format: LoadFormat) -> ModelFiles:
    """A directory is a safetensors checkpoint, or holds exactly one GGUF file."""
    gguf = sorted(directory.glob("*.gguf"))
    if load_format != "gguf" and ((directory / "config.json").is_file() or not gguf):
        if not (directory / "config.json").is_file():
            raise ModelError(f"model={name!r} is a directory without config.json or GGUF file")
        return ModelFiles("safetensors", directory, name, load_format == "dummy")
    if len(gguf) != 1:
        found = ", ".join(path.name for path in gguf) or "none"
        raise ModelError(
            f"model={name!r} must hold one GGUF file, and holds {found}: name the file itself"
        )
    return ModelFiles("gguf", gguf[0], name, load_format == "dummy")


def _fetch(model: str, revision: str | None, dummy: bool) -> Path:
    """Download a checkpoint, or find it among those downloaded before."""
    from huggingface_hub import snapshot_download

    patterns = _TEXT_FILES if dummy else [*_TEXT_FILES, "*.safetensors"]
    try:
        directory = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    # Transport, protocol and validation errors of three libraries all mean: not to be had.
    except Exception as error:
        at = "" if revision is None else f" (revision={revision!r})"
        raise ModelError(
            f"model={model!r}{at} is neither a directory nor a GGUF file here, and as a Hugging "
            "Face id it cannot be had: the hub cannot be reached, does not know it, or does not "
            "give it without a login"
        ) from error
    return Path(directory)
