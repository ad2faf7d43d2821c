"""Attention by matrix products and an explicit softmax: what a fused kernel cannot express (soft
cap, ALiBi, sinks, the LSE)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.attention import AttentionSpec
from ._paged_gather import Tile
from ._views import split


class ExplicitAttention:
    """Every feature of a spec, over gathered keys."""

    def __init__(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, score_elements: int
    ) -> None:
        """
        Args:
            spec: the layer.
            dtype: what everything is computed in.
            device: of all tensors.
            score_elements: most scores at a time, unless a single row of all sequences has more.
        """
        self._spec = spec
        self._dtype = dtype
        self._score_elements = score_elements
        self._slopes: Tensor | None = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device=device)
            self._slopes = slopes.view(spec.num_kv_heads, 1, spec.group_size, 1)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tile: Tile,
        sinks: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The rows of a tile, in bounded runs.

        Args:
            query: ``[S, R, N, H]``.
            keys: the tile's columns, ``[S, K, C, H]``.
            values: likewise, ``[S, K, C, Hv]``.
            tile: the rows' place and mask.
            sinks: ``[N]`` or None.
            scale: on the dot products.

        Returns:
            Output ``[S, R, N, Hv]`` and LSE ``[S, R, N]``, in the dtype of the computation; NaN in
            a row that sees nothing.
        """
        k, v = keys.to(self._dtype), values.to(self._dtype)
        k, v = k.contiguous(), v.contiguous()
        q, mask = query.to(self._dtype), tile.mask
        scores_per_row = len(k) * self._spec.num_heads * k.shape[2]
        step = max(1, self._score_elements // scores_per_row)
        parts = []
        for start in range(0, tile.num_rows, step):
            rows = slice(start, start + step)
            seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
            position = tile.position - tile.first_key + start
            parts.append(self._attend_rows(q[:, rows], k, v, seen, position, sinks, scale))
        results, sums = zip(*parts, strict=True)
        return torch.cat(results, dim=1), torch.cat(sums, dim=1)

    def _attend_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        position: int,
        sinks: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """A run of rows, the first of which stands at column ``position``, which may be negative.
        ``mask`` is as in ``Tile``, all else as in ``attend``."""
        spec, num_rows = self._spec, q.shape[1]
        rows = split(q, 2, -1, spec.group_size).transpose(1, 2).flatten(2, 3)
        scores = torch.matmul(rows, k.transpose(-1, -2)).mul_(scale)
        if spec.logits_soft_cap is not None:
            scores = scores.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
        scores = split(scores, 2, num_rows, spec.group_size)
        if self._slopes is not None:
            columns = torch.arange(k.shape[2], device=k.device)
            positions = torch.arange(position, position + num_rows, device=k.device)
            distance = (positions[:, None] - columns).to(scores.dtype)
            scores -= self._slopes * distance[:, None]
        if mask is not None:
            scores += mask.unsqueeze(3)
        lse = scores.logsumexp(-1)
        total = lse
        if sinks is not None:
            heads = sinks.to(lse.dtype).view(spec.num_kv_heads, 1, spec.group_size)
            total = torch.logaddexp(lse, heads)
        weights = scores.sub_(total.unsqueeze(-1)).exp_()
        result = split(torch.matmul(weights.flatten(2, 3), v), 2, num_rows, spec.group_size)
        return result.transpose(1, 2).flatten(2, 3), lse.transpose(1, 2).flatten(2, 3)
