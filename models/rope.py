"""Rotary position embedding (https://arxiv.org/abs/2104.09864), rotate-half style, and its
extensions to longer sequences.

Everything is computed once, when the model is built, as a table with one row per position; a step
picks its rows with one ``index_select`` and all layers share them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ModelError, UnsupportedError
from ..core.model import ModelConfig

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "freq_factors": (),
}
"""Kinds besides ``default`` with the fields that each cannot do without. ``freq_factors`` holds one
divisor per frequency and is how GGUF files store ``llama3`` scaling."""


def check_rope(config: ModelConfig) -> None:
    """Check a configuration's rope parameters.

    Raises:
        UnsupportedError: the kind is unknown, or the head size is odd.
        ModelError: a field that the kind needs is missing or not a number above 0.
    """
    if config.head_size % 2:
        raise UnsupportedError(
            "rotary embedding", [f"head_size={config.head_size} is odd (supported: even sizes)"]
        )
    scaling = config.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return
    if kind not in _REQUIRED:
        known = ", ".join(sorted(["default", *_REQUIRED.keys() - {"freq_factors"}]))
        raise UnsupportedError(
            "rotary embedding", [f"rope_type={kind!r} is not supported (supported: {known})"]
        )
    for name in (*_REQUIRED[kind], "original_max_position_embeddings"):
        value = scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            found = "is missing" if name not in scaling else f"is {value!r}"
            raise ModelError(
                f"rope parameters: {name} {found}, and rope_type={kind!r} needs a number above 0 "
                "(rope_scaling or rope_parameters in config.json)"
            )
    if kind == "llama3" and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        raise ModelError(
            f"rope parameters: high_freq_factor={scaling['high_freq_factor']} must be above "
            f"low_freq_factor={scaling['low_freq_factor']}"
        )
    if kind == "freq_factors" and len(scaling.get("freq_factors", ())) != config.head_size // 2:
        raise ModelError(
            f"rope_freqs.weight has {len(scaling.get('freq_factors', ()))} numbers, and a head of "
            f"{config.head_size} needs {config.head_size // 2}"
        )


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation per position of each pair of elements, and the factor on cosine and sine.

    For ``dynamic`` these are the frequencies within the original length.

    Returns:
        ``[head_size / 2]`` radians per position, float32, cpu; and the attention factor of
        ``yarn``, 1 for every other kind.
    """
    size, scaling = config.head_size, config.rope_scaling
    kind = scaling.get("rope_type", "default")
    inv_freq = _base_frequencies(config.rope_theta, size)
    if kind == "linear":
        return inv_freq / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, config.rope_theta, scaling)
    if kind == "freq_factors":
        return inv_freq / torch.tensor(scaling["freq_factors"], dtype=torch.float32), 1.0
    return inv_freq, 1.0


def cos_sin_table(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position below ``length``.

    ``dynamic`` (NTK-aware scaling whose strength grows with the sequence): the row of position p
    beyond the original length holds the frequencies that belong to a sequence of p + 1 tokens.
    That is what transformers applies to each token that it generates with a cache, and it does not
    depend on how a prompt is split over steps. (In one long prefill transformers gives all tokens
    the frequencies of the whole length, which a cache filled earlier cannot follow.)

    Returns:
        Two of ``[length, head_size / 2]``, float32, cpu.
    """
    positions = torch.arange(length, dtype=torch.float32)
    inv_freq, factor = inverse_frequencies(config)
    if config.rope_scaling.get("rope_type") == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(config, length)
    else:
        angles = torch.outer(positions, inv_freq)
    return angles.cos() * factor, angles.sin() * factor


def _base_frequencies(theta: float, size: int) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return torch.as_tensor(1.0 / (theta**exponents))


def _dynamic_frequencies(config: ModelConfig, length: int) -> Tensor:
    """``[length, head_size / 2]``: one row of frequencies per position."""
    size, scaling = config.head_size, config.rope_scaling
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    seq_lens = torch.arange(1, length + 1, dtype=torch.float64).clamp(min=original)
    stretch = (factor * seq_lens / original) - (factor - 1)
    theta = config.rope_theta * stretch ** (size / (size - 2))
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    frequencies = 1.0 / theta[:, None] ** exponents
    within = _base_frequencies(config.rope_theta, size)
    beyond = seq_lens[:, None] > original
    return torch.where(beyond, frequencies.to(torch.float32), within)


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, the band between
    them blended linearly in the number of turns over the original length."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns: Tensor = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = inv_freq / scaling["factor"]
    return (1 - kept) * stretched + kept * inv_freq


def _yarn(inv_freq: Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071): pairs that turn often are kept, pairs that turn
    rarely are interpolated, with a ramp between; attention gets a temperature."""
    pairs = inv_freq.shape[0]
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        """Index (a fraction, in elements / 2) of the pair that makes so many turns."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = pair_with(scaling.get("beta_fast") or 32)
    last = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # a ramp needs a width
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions.

    The table is computed in float32 and kept in the model's dtype, as the values are used; it has
    ``max_position_embeddings`` rows. The first half of a head pairs with the second, so with
    ``x = (x1, x2)`` the result is ``x * (cos, cos) + (x2, x1) * (-sin, sin)``: both factors are
    stored with the head's full width to save operations on each layer.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Compute the table.

        Raises:
            ModelError, UnsupportedError: see ``check_rope``.
        """
        super().__init__()
        check_rope(config)
        self.half_size = config.head_size // 2
        cos, sin = cos_sin_table(config, config.max_position_embeddings)
        self.register_buffer("cos", torch.cat((cos, cos), -1).to(device, dtype), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1).to(device, dtype), persistent=False)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of a step's tokens: twice ``[T, 1, head_size]``, for ``rotate``.

        Args:
            positions: ``[T]``, int64, below ``max_position_embeddings``.
        """
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(self, heads: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate ``[T, heads, head_size]``, which may be strided, into a new tensor."""
        cos, sin = rows
        return (heads * cos).addcmul_(heads.roll(self.half_size, -1), sin)
