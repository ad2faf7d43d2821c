"""Layers that the built-in models are made of.

A layer tells under which checkpoint names its parameters are stored (``shards``), so that fused
projections load from the separate tensors of a checkpoint without a rule per model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cpu_product import product_for

_OWN_NORM_MIN_ROWS = 32
"""Rows from which torch's rms_norm is slower on a CPU than its parts: at 2048 rows of 576 elements
4.6 ms against 0.35 ms, at 16 rows 30 us against 36 us (torch 2.13, two cores)."""

Shard = tuple[str, Tensor]
"""A checkpoint name and the part of a parameter that it fills."""


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """Root mean square normalisation (https://arxiv.org/abs/1910.07467), computed in float32.

    In a 16-bit dtype the normalised value is rounded before it is multiplied by the weight, which
    is what the checkpoints were trained and evaluated with.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``[T, size]`` into a new tensor."""
        if x.device.type == "cpu" and len(x) >= _OWN_NORM_MIN_ROWS:
            return self._by_hand(x)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.weight)

    def _by_hand(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().mul_(1 / self.shape[0]).add_(self.eps).rsqrt_()
        normalised: Tensor = (wide * scale).to(x.dtype)
        return normalised.mul_(self.weight)

    def shards(self, name: str) -> Iterator[Shard]:
        """The weight, whole."""
        yield f"{name}.weight", self.weight.data


class Embedding(nn.Module):
    """Rows of a table by token id."""

    def __init__(
        self, vocab_size: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, size, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[T]``, int64, to ``[T, size]``."""
        return self.weight.index_select(0, input_ids)

    def shards(self, name: str) -> Iterator[Shard]:
        """The weight, whole."""
        yield f"{name}.weight", self.weight.data


class Linear(nn.Module):
    """``x @ weight.T + bias``, one or several projections of the same input in one product.

    Attributes:
        weight: ``[sum of out_sizes, in_size]``.
        bias: ``[sum of out_sizes]``, or None.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate.

        Args:
            in_size: width of the input.
            out_sizes: widths of the projections, in order; their outputs lie side by side.
            bias: whether there is one.
            dtype, device: of the parameters.
        """
        super().__init__()
        self.out_sizes = tuple(out_sizes)
        total = sum(self.out_sizes)
        self.weight = empty_parameter(total, in_size, dtype=dtype, device=device)
        self.bias = empty_parameter(total, dtype=dtype, device=device) if bias else None
        self._shares_weight = False
        self._product = product_for(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, in_size]`` to ``[rows, sum of out_sizes]``."""
        return self._product(x, self.weight, self.bias)

    def shards(self, *names: str) -> Iterator[Shard]:
        """Weight (and bias) of each projection, under the given names in order."""
        for name, weight in zip(
            names, torch.split(self.weight.data, list(self.out_sizes)), strict=True
        ):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(
                names, torch.split(self.bias.data, list(self.out_sizes)), strict=True
            ):
                yield f"{name}.bias", bias

    @classmethod
    def sharing(cls, weight: nn.Parameter) -> Linear:
        """A layer whose weight is another one's (tied embeddings)."""
        layer = cls(weight.shape[1], (0,), False, weight.dtype, weight.device)
        layer.weight, layer.out_sizes = weight, (weight.shape[0],)
        layer._shares_weight = True
        return layer

    def finish_loading(self) -> None:
        """Prepare the product now that the weight has its values; give the weight's memory back
        if the product keeps a layout of its own and nobody else shares the weight."""
        self._product.prepare(self.weight, self.bias)
        if self._product.replaces_weight and not self._shares_weight:
            self.weight = empty_parameter(
                0, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device
            )
