"""Scales of a KV cache of 8 bits, as checkpoints hold them.

A calibrated checkpoint has one number for the keys and one for the values of each layer, which the
stored numbers are to be multiplied by. Tools call them ``model.layers.0.self_attn.k_scale`` and
``v_scale``, with a module in between (``attn``, ``qkv_proj``, ``k_proj``, ``v_proj``) or without;
or one ``kv_scale`` serves both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from torch import Tensor

from ..core.errors import ModelError

_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:(?:attn|qkv_proj|k_proj|v_proj)\.)?(k|v|kv)_scale"
)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a scale of the KV cache, and no weight."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(
    tensors: Iterable[tuple[str, Tensor]], num_layers: int
) -> tuple[tuple[float, float], ...] | None:
    """The scales of keys and values of each layer; None if there are none at all.

    Args:
        tensors: names and tensors of a checkpoint; those that are no scales do not count.
        num_layers: of the model.

    Raises:
        ModelError: a scale is no single finite number above 0, is there twice or is missing.
    """
    found: dict[tuple[int, str], float] = {}
    for name, tensor in tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        for half in match[2]:
            place = (int(match[1]), half)
            if place in found:
                raise ModelError(f"the checkpoint holds {half}_scale of layer {place[0]} twice")
            found[place] = _number(name, tensor)
    if not found:
        return None
    missing = [
        f"{half}_scale of layer {layer}"
        for layer in range(num_layers)
        for half in "kv"
        if (layer, half) not in found
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"the checkpoint holds scales of the KV cache, but lacks {', '.join(missing[:3])}{more}"
        )
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _number(name: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensor.shape)}; a scale of the KV cache must be one "
            "number for each layer"
        )
    scale = float(tensor)
    if not 0.0 < scale < math.inf:
        raise ModelError(f"tensor {name!r} is {scale}; a scale must be a finite number above 0")
    return scale
