"""Weights from safetensors files, and the rules for filling a model's parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..core.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors of old checkpoints that are computed and need no loading."""


def copy_weights(
    weights: Iterable[tuple[str, Tensor]],
    targets: Mapping[str, Tensor],
    tied: Mapping[str, Tensor] | None = None,
) -> None:
    """Fill parameters from a checkpoint; every one must be filled, every tensor must have a place.

    Args:
        weights: names and tensors of the checkpoint, in any order.
        targets: for each name, the (part of a) parameter that it fills, of the same shape.
        tied: names that a checkpoint may hold a second time although the configuration ties them,
            with the parameter that they must be equal to.

    Raises:
        ModelError: a tensor is missing, unknown, of a wrong shape or dtype, or a tied one differs.
    """
    missing = dict(targets)
    seconds: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in targets:
            _check(name, tensor, targets[name])
            targets[name].copy_(tensor)
            missing.pop(name, None)
        elif tied and name in tied:
            _check(name, tensor, tied[name])
            seconds[name] = tensor
        elif not name.endswith(_IGNORED_SUFFIXES):
            raise ModelError(
                f"the checkpoint holds the tensor {name!r}, for which this model has no parameter"
            )
    if missing:
        first = ", ".join(sorted(missing)[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"the checkpoint lacks {first}{more}")
    for name, tensor in seconds.items():
        same = (tied or {})[name]
        if not torch.equal(tensor.to(same.device, same.dtype), same):
            raise ModelError(
                f"the checkpoint holds a {name} that differs from the input embedding, but its "
                "configuration says tie_word_embeddings=true"
            )


def _check(name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensor.shape)}, and this configuration needs "
            f"{list(target.shape)}"
        )
    if not tensor.is_floating_point():
        raise ModelError(
            f"tensor {name!r} has dtype {tensor.dtype}; weights must be floating point numbers"
        )


def fill_with_random(model: nn.Module, seed: int) -> None:
    """Dummy weights: small random numbers, drawn on the host so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in model.named_parameters():
        drawn = torch.empty(parameter.shape).uniform_(-0.05, 0.05, generator=generator)
        parameter.data.copy_(drawn)


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint, after checking that none is missing.

    Raises:
        ModelError: no file, a file that the index lists is missing, or it is unclear which to take.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return [directory / name for name in sorted(set(_read_index(directory).values()))]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(path.name for path in found[:4])
        raise ModelError(f"{directory} holds several weight files ({names}) and no {INDEX}")
    pickled = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    if pickled:
        raise ModelError(
            f"{directory} holds its weights in {pickled[0].name} only; pickled weights can run "
            "code and are not loaded: convert them to safetensors"
        )
    raise ModelError(f"{directory} holds no *.safetensors file")


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name to file name, each file present."""
    path = directory / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is no readable weight index: {error}") from error
    for name, file in weight_map.items():
        if not (directory / file).is_file():
            raise ModelError(
                f"{path} says that tensor {name!r} is in {file}, which is not in {directory}"
            )
    return dict(weight_map)


def iterate_safetensors(
    directory: Path, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, on the host, in its stored dtype.

    Args:
        directory: of the checkpoint.
        wanted: whether a tensor of this name is read.

    Raises:
        ModelError: a file is missing or damaged, or lacks a tensor that the index puts there.
    """
    files = safetensors_files(directory)
    index = (
        _read_index(directory) if files[0].name != SINGLE and (directory / INDEX).is_file() else {}
    )
    for path in files:
        expected = {name for name, file in index.items() if file == path.name}
        yield from _iterate_file(path, expected, wanted)


def _iterate_file(
    path: Path, expected: set[str], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            lacking = sorted(expected - set(names))
            if lacking:
                raise ModelError(
                    f"{path} lacks the tensor {lacking[0]!r}, which {INDEX} puts there"
                )
            for name in filter(wanted, names):
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or incomplete: {error}") from error
