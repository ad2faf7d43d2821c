"""A double of ``torch.nn.attention.varlen`` for the CPU, as in torch 2.11 and as in torch 2.13.

Same signatures, same refusals; results in float64. Calls are kept in ``CALLS``. Torch has no such
kernel for a CPU: it raises ``NotImplementedError``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .double_math import attend_exactly, hidden_keys

_COMMON = (
    "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, "
    "return_aux=None, scale=None, window_size=(-1, -1)"
)
#: Parameters of ``varlen_attn``, without annotations.
SIGNATURES = {
    "2.11": _COMMON,
    "2.13": _COMMON + ", enable_gqa=False, seqused_k=None, block_table=None, num_splits=None",
}


class AuxRequest(NamedTuple):
    """What is returned beside the result."""

    lse: bool = False


@dataclass
class Call:
    """The arguments of one call; the paging ones are None where the signature has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    return_aux: AuxRequest | None
    scale: float | None
    window_size: tuple[int, int]
    enable_gqa: bool | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None


#: The latest calls; tests empty it.
CALLS: deque[Call] = deque(maxlen=50)


def _varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    return _run(
        Call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size)
    )


def _varlen_attn_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    return _run(
        Call(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            return_aux,
            scale,
            window_size,
            enable_gqa,
            seqused_k,
            block_table,
            num_splits,
        )
    )


def _run(call: Call) -> Any:
    CALLS.append(call)
    _check(call)
    left, right = (None if one < 0 else one for one in call.window_size)
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    starts = call.cu_seq_q.tolist()
    out, sums = torch.zeros_like(call.query), []
    for index, (first, end) in enumerate(pairwise(starts)):
        keys, values = _keys(call, index)
        hidden = hidden_keys(end - first, len(keys), left, right)
        result, lse = attend_exactly(call.query[first:end], keys, values, scale, hidden)
        out[first:end] = result.to(out.dtype)
        sums.append(lse)
    if call.return_aux is not None and call.return_aux.lse:
        return out, torch.cat(sums).t().float().contiguous()
    return out


def _keys(call: Call, index: int) -> tuple[Tensor, Tensor]:
    if call.block_table is None or call.seqused_k is None:
        first, end = call.cu_seq_k[index : index + 2].tolist()
        return call.key[first:end], call.value[first:end]
    places = torch.arange(int(call.seqused_k[index]))
    page_size = call.key.shape[1]
    pages = call.block_table[index].long()[places // page_size]
    return call.key[pages, places % page_size], call.value[pages, places % page_size]


def _check(call: Call) -> None:
    query, key, value = call.query, call.key, call.value
    paged = call.block_table is not None
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (
        torch.float16,
        torch.bfloat16,
    ):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or value.shape[-1] != query.shape[-1]:
        raise RuntimeError("head_size should be a multiple of 8, at most 256")
    for tensor in (query, key, value):
        if tensor.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        # What the kernel does not check, and faults on.
        assert tensor.data_ptr() % 16 == 0
        assert all(stride * 2 % 16 == 0 for stride in tensor.stride()[:-1])
    heads, kv_heads = query.shape[1], key.shape[-2]
    if call.enable_gqa is False and heads != kv_heads:
        raise ValueError("Expect query and key/value to have the same number of heads")
    if heads % kv_heads:
        raise ValueError("Expect number of query heads to be a multiple of kv heads for GQA")
    for starts in (call.cu_seq_q, call.cu_seq_k):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert len(starts) == len(call.cu_seq_q)
    assert int(call.cu_seq_q[-1]) == len(query)
    assert int(call.cu_seq_q.diff().max()) == call.max_q
    assert int(call.cu_seq_k.diff().max()) == call.max_k
    assert int(call.cu_seq_k.diff().min()) > 0
    if not paged:
        assert int(call.cu_seq_k[-1]) == len(key)
        return
    assert call.block_table is not None
    assert call.seqused_k is not None
    if key.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    assert call.block_table.dtype == call.seqused_k.dtype == torch.int32
    assert bool(((call.block_table >= 0) & (call.block_table < len(key))).all())
    # More splits leave rows unwritten.
    assert call.num_splits == 1


def module(version: str) -> Any:
    """The double as of a version of torch: 2.11 or 2.13."""
    functions: dict[str, Callable[..., Any]] = {
        "2.11": _varlen_attn_2_11,
        "2.13": _varlen_attn_2_13,
    }
    return SimpleNamespace(varlen_attn=functions[version], AuxRequest=AuxRequest)
