"""How a linear layer multiplies: on accelerators as torch does, on a CPU by what measures best.

Milliseconds for the four projections of ten layers of a 135M model (hidden size 576), best of 15,
on two cores with AVX2 and no 16-bit instructions, torch 2.13:

====  =========  ==============  =============  ==============  =============
rows  float32    float32         bfloat16       bfloat16        bfloat16
      F.linear   mm(w, x.t())    F.linear       widened linear  widened mm
====  =========  ==============  =============  ==============  =============
   1       12.2             9.7            4.0             9.2            9.5
   2       32.2             6.3            7.7            16.2            6.5
   4       17.0             6.2           14.8            16.9            7.1
  16       21.9            13.1           57.6            23.3           14.5
  32       32.9            20.6          114.8            27.7           21.1
====  =========  ==============  =============  ==============  =============

float16 behaves like bfloat16, its ``F.linear`` up to a fifth faster. The two float32 ways meet
between 64 and 128 rows (from a machine with other work on it, so no closer). The crossing point is
the library's, not a law: both give the same numbers to rounding, so a wrong threshold costs time
only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TRANSPOSED_MIN_ROWS = 2
TRANSPOSED_MAX_ROWS = 64
"""Rows between which ``mm(weight, x.t())`` beats ``F.linear(x, weight)`` in float32."""

WIDENED_MIN_ROWS = 2
"""Rows from which a float32 copy beats the 16-bit weight: one row is bound by reading the weight,
which the copy makes twice as long; more rows are bound by arithmetic."""


def product_for(weight: Tensor) -> Product:
    """The way to multiply by ``weight`` on its device, in its dtype."""
    if weight.device.type != "cpu":
        return Product()
    if weight.dtype == torch.float32:
        return Float32Product()
    if weight.dtype in (torch.bfloat16, torch.float16) and not _is_native(weight.dtype):
        return WidenedProduct()
    return Product()


class Product:
    """``F.linear``: the library of the device knows best."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Called once, when weight and bias have their values."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, and add the bias.

        Args:
            x: ``[rows, in_size]``; may be strided.
            weight: ``[out_size, in_size]``.
            bias: ``[out_size]``, or None.

        Returns:
            ``[rows, out_size]``; may be strided.
        """
        return F.linear(x, weight, bias)


class Float32Product(Product):
    """Float32 on a CPU: few rows are multiplied the other way round, into a transposed result."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Product``."""
        if TRANSPOSED_MIN_ROWS <= x.shape[0] <= TRANSPOSED_MAX_ROWS:
            out = torch.mm(weight, x.t()).t()
            return out if bias is None else out.add_(bias)
        return F.linear(x, weight, bias)


class WidenedProduct(Float32Product):
    """A 16-bit dtype on a CPU without instructions for it, by way of a float32 copy of the weight.

    16-bit values multiplied and summed in float32 and rounded once at the end are what a native
    16-bit product computes; it takes 6 bytes per weight instead of 2.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Make the copies."""
        self._weight = weight.detach().float()
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Product``."""
        if self._weight is None or x.shape[0] < WIDENED_MIN_ROWS:
            return F.linear(x, weight, bias)
        return super().__call__(x.float(), self._weight, self._bias).to(weight.dtype)


def _is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a 16-bit dtype, and torch uses them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
