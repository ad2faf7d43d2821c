"""flash-attn's two paged functions, by the arguments that are used of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Attending:
    """What a layer tells the library in every call.

    Attributes:
        scale: of the scores.
        soft_cap: of the scores; 0 is none.
        slopes: of ALiBi, ``[N]``, float32; None is none.
    """

    scale: float
    soft_cap: float = 0.0
    slopes: Tensor | None = None


def fwd_kvcache(
    kernels: Any,
    layer: Attending,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    seq_lens: Tensor,
    table: Tensor,
    causal: bool,
    window: int | None,
    result: Tensor,
) -> Tensor:
    """Sequences of equally many query rows. Returns the LSE, ``[S, N, rows]``.

    Args:
        kernels: the library's compiled module.
        layer: the layer.
        q: ``[S, rows, N, H]``.
        caches: keys and values, ``[P, B, K, H]``.
        seq_lens: ``[S]``, int32.
        table: ``[S, width]``, int32.
        causal: whether rows see no later keys.
        window: keys that a row sees to its left, itself counted; None is all.
        result: as ``q``; written.
    """
    sums: Tensor
    _, sums = kernels.fwd_kvcache(
        q,
        *caches,
        None,  # new keys
        None,  # new values
        seq_lens,
        None,  # rotary cosines
        None,  # rotary sines
        None,  # places of the sequences
        None,  # left padding
        table,
        layer.slopes,
        result,
        layer.scale,
        causal,
        *_window_sides(window, causal),
        layer.soft_cap,
        True,  # order of rotary pairs
        0,  # splits of the keys: as many as the library thinks best
    )
    return sums


def varlen_fwd(
    kernels: Any,
    layer: Attending,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    table: Tensor,
    most: tuple[int, int],
    causal: bool,
    window: int | None,
    result: Tensor,
) -> Tensor:
    """Sequences of any query lengths. Returns the LSE, ``[N, R]``.

    Args:
        kernels, layer, caches, table, causal, window: as in ``fwd_kvcache``.
        q: ``[R, N, H]``.
        starts: first query row and first key of each sequence, then the totals: ``[S + 1]``, int32.
        most: query rows and keys of a sequence.
        result: as ``q``; written.
    """
    sums: Tensor
    _, sums, _, _ = kernels.varlen_fwd(
        q,
        *caches,
        result,
        *starts,
        None,  # used keys: all
        None,  # left padding
        table,
        layer.slopes,
        *most,
        0.0,  # dropout
        layer.scale,
        False,  # whether to clear the results first
        causal,
        *_window_sides(window, causal),
        layer.soft_cap,
        False,  # whether to return the weights
        None,  # random numbers for dropout
    )
    return sums


def _window_sides(window: int | None, causal: bool) -> tuple[int, int]:
    """Keys that a row sees to its left and right, itself not counted; -1 is all."""
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else -1
