"""What doubles of attention libraries compute with: one sequence, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_exactly(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence; a row without keys is 0, with an LSE of ``-inf``.

    Args:
        query: ``[q, N, H]``.
        key, value: ``[n, K, H]`` and ``[n, K, Hv]``; ``K`` divides ``N``.
        scale: factor on the dot products.
        hidden: which keys a row does not see: ``[q, n]``, bool.

    Returns:
        The result, ``[q, N, Hv]``, and the natural LSE, ``[q, N]``, float64.
    """
    group_size = query.shape[1] // key.shape[1]
    k, v = (one.double().repeat_interleave(group_size, dim=1) for one in (key, value))
    scores = torch.einsum("qnh,knh->qnk", query.double(), k) * scale
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return torch.einsum("qnk,knh->qnh", weights, v), lse


def hidden_keys(num_rows: int, num_keys: int, left: int | None, right: int | None) -> Tensor:
    """Keys outside a band around each row's own, rows aligned to the last key: ``[q, n]``, bool.

    Args:
        left, right: keys before and behind a row's own that it sees; None is all.
    """
    positions = torch.arange(num_keys - num_rows, num_keys)[:, None]
    distance = torch.arange(num_keys) - positions
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right is not None:
        hidden |= distance > right
    if left is not None:
        hidden |= distance < -left
    return hidden
