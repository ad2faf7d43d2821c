"""What can be done to attention's results by means of their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Take the sinks' share of the weight from results that were computed without sinks, in place.

    A sink adds ``exp(sink)`` to the sum that the weights are divided by, so that a result shrinks
    by ``exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink)``; a row that sees no key has an
    LSE of ``-inf`` and becomes 0.

    Args:
        out: ``[T, N, Hv]``.
        lse: ``[T, N]``, float32, natural logarithm, without the sink.
        sinks: ``[N]``, float32.
    """
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))


def blank_rows(out: Tensor, lse: Tensor | None, rows: Tensor) -> None:
    """Give rows that see no key what the contract wants: 0, and an LSE of ``-inf``.

    Args:
        out: ``[T or more, N, Hv]``.
        lse: ``[T or more, N]``, float32, or None.
        rows: int64, on the device of ``out``.
    """
    out.index_fill_(0, rows, 0.0)
    if lse is not None:
        lse.index_fill_(0, rows, -torch.inf)
