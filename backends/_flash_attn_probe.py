"""Whether an installed build of flash-attn has kernels for a head size.

The library can be built with some of its kernels. Such a build takes other head sizes all the same,
and may return wrong numbers without an error. So each function is tried once on a tiny batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._flash_attn_calls import Attending, fwd_kvcache, varlen_fwd

Caches = tuple[Tensor, Tensor]

_BLOCK_SIZE = 256
_ROWS, _KEYS, _HEADS = 4, 40, 2
# Numbers are around 1, and rounded to 8 bits twice.
_TOLERANCE = 0.05

# The kernels are kept with the verdict, so that no others can have their id.
_verdicts: dict[tuple[int, int, torch.dtype, torch.device], tuple[Any, str | None]] = {}


def wrong_kernels(
    kernels: Any, head_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with a build's results for a head size; None if nothing is.

    Tried once in a process for each head size, dtype and device.

    Args:
        kernels: the library's compiled module.
        head_size: elements of a head.
        dtype: of queries and cache.
        device: where to try it. Waits for it.
    """
    key = (id(kernels), head_size, dtype, device)
    if key not in _verdicts:
        with torch.inference_mode():
            _verdicts[key] = (kernels, _try(kernels, head_size, dtype, device))
    return _verdicts[key][1]


def _try(kernels: Any, head_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    random = torch.Generator().manual_seed(head_size)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    q = numbers(_ROWS, _HEADS, head_size)
    k, v = (numbers(1, _BLOCK_SIZE, 1, head_size) for _ in range(2))
    layer = Attending(head_size**-0.5)
    expected = _attend(q, k[0, :_KEYS, 0], v[0, :_KEYS, 0])
    for name, call in (("fwd_kvcache", _uniform), ("varlen_fwd", _ragged)):
        result = torch.full_like(q, torch.nan)
        try:
            call(kernels, layer, q, (k, v), result)
            largest = float((result.float() - expected).abs().max())
        except RuntimeError as error:
            return f"its {name} fails: {error}"
        if not largest <= _TOLERANCE:  # NaN too
            return f"its {name} is wrong by {largest:.3g} where numbers are around 1"
    return None


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in float32: rows are the last tokens, and see no later ones."""
    scores = torch.einsum("rnh,jh->nrj", q.float(), k.float()) * q.shape[-1] ** -0.5
    hidden = torch.ones(_ROWS, _KEYS, dtype=torch.bool, device=q.device).triu(_KEYS - _ROWS + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("nrj,jh->rnh", weights, v.float())


def _uniform(kernels: Any, layer: Attending, q: Tensor, caches: Caches, result: Tensor) -> None:
    lengths, table = _numbers(q, _KEYS), _numbers(q, 0)[None]
    fwd_kvcache(kernels, layer, q[None], caches, lengths, table, True, None, result[None])


def _ragged(kernels: Any, layer: Attending, q: Tensor, caches: Caches, result: Tensor) -> None:
    starts, table = (_numbers(q, 0, _ROWS), _numbers(q, 0, _KEYS)), _numbers(q, 0)[None]
    most = (_ROWS, _BLOCK_SIZE)
    varlen_fwd(kernels, layer, q, caches, starts, table, most, True, None, result)


def _numbers(q: Tensor, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=q.device)
