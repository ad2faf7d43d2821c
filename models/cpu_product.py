"""How a linear layer multiplies: on accelerators as torch does, on a CPU with a packed weight.

On a CPU the weight is laid out once in the blocks that oneDNN's kernels read, instead of at every
call; ``torch.compile`` does the same to the linear layers of a frozen model. Milliseconds for the
projections of twelve layers of a 135M model (hidden size 576) and its output layer, float32, two
cores with AVX2, torch 2.13:

====  ========  ====================  ======
rows  F.linear  mm(weight, x.t()).t()  packed
====  ========  ====================  ======
   1      20.8                  20.9    12.2
   2      42.4                  17.1    14.6
  16      51.0                  31.0    29.4
  64      86.8                  77.0    67.5
1024     666.8                         625.6
====  ========  ====================  ======

Where the CPU has instructions for bfloat16 products (AVX512-BF16), the packed weight is bfloat16
and takes a fifth off a whole generation of 16 prompts: 5.2 s became 4.2 s.

Without instructions for 16-bit products, F.linear in bfloat16 or float16 is bound by arithmetic
from 4 rows on (18 GFLOP/s against 140 in float32), so the packed weight is float32 there too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 16
"""What oneDNN is told to lay the weight out for; of 1, 16, 32 and the true number it is near the
best for all numbers of rows."""

WIDENED_MIN_ROWS = 2
"""Rows from which a float32 copy beats the 16-bit weight: one row is bound by reading the weight,
which the copy makes twice as long; more rows are bound by arithmetic."""


def product_for(weight: Tensor) -> Product:
    """The way to multiply by ``weight`` on its device, in its dtype."""
    if weight.device.type != "cpu" or not _can_pack():
        return Product()
    if weight.dtype in (torch.bfloat16, torch.float16):
        return PackedProduct() if _is_native(weight.dtype) else WidenedProduct()
    return PackedProduct() if weight.dtype == torch.float32 else Product()


class Product:
    """``F.linear``: the library of the device knows best."""

    #: Whether ``weight`` is not read any more once ``prepare`` has been called.
    replaces_weight = False

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Called once, when weight and bias have their values."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, and add the bias.

        Args:
            x: ``[rows, in_size]``; may be strided.
            weight: ``[out_size, in_size]``.
            bias: ``[out_size]``, or None.

        Returns:
            ``[rows, out_size]``, contiguous.
        """
        return F.linear(x, weight, bias)


class PackedProduct(Product):
    """A CPU that has instructions for the dtype, by a weight in oneDNN's own layout."""

    replaces_weight = True
    #: Dtype of the packed weight; None is the weight's own.
    packed_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Lay the weight out."""
        dtype = self.packed_dtype or weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().to(dtype), _PACKED_FOR_ROWS
        )
        self._bias = None if bias is None else bias.detach().to(dtype)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Product``."""
        if self._packed is None:
            return F.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out


class WidenedProduct(PackedProduct):
    """A 16-bit dtype on a CPU without instructions for it, by way of a packed float32 weight.

    16-bit values multiplied and summed in float32 and rounded once at the end are what a native
    16-bit product computes; it takes 6 bytes per weight instead of 2.
    """

    replaces_weight = False
    packed_dtype = torch.float32

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Product``."""
        if self._packed is None or x.shape[0] < WIDENED_MIN_ROWS:
            return F.linear(x, weight, bias)
        return super().__call__(x.float(), weight, bias).to(x.dtype)


def _can_pack() -> bool:
    """Whether this build of torch has oneDNN with the operators for frozen linear layers."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in operators
    )


def _is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a 16-bit dtype."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
