"""Stands in for flash-attn-4 on a CPU: its function for packed sequences, computed in float64.

It refuses what the function refuses on Hopper and has its conventions: window sides of None, the
sink in the LSE. What is documented as the caller's affair raises ``IllegalAccess``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "4.0.0b36"
#: Parameters of ``flash_attn_varlen_func`` of that version.
SIGNATURE = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
    "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
    "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
)


class IllegalAccess(Exception):  # noqa: N818 - what CUDA calls it
    """The kernel would use memory that is not its own, or nobody knows what it would do."""


class Double(ModuleType):
    """``flash_attn.cute``; what its function was last called with stands in ``calls``."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute")
        self.calls: deque[dict[str, Any]] = deque(maxlen=8)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        block_sparse_tensors: None = None,
        aux_tensors: None = None,
        aux_scalars: None = None,
        return_lse: bool = False,
        scheduler_metadata: None = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Packed sequences over a paged cache: output, and LSE ``[N, T]`` if asked for."""
        self.calls.append({name: one for name, one in locals().items() if name != "self"})
        assert cu_seqlens_q is not None, "this double is for packed sequences"
        assert seqused_k is not None, "this double is for sequences of any length"
        assert page_table is not None, "this double is for paged caches"
        assert max_seqlen_q is not None, "this double wants the longest query"
        assert max_seqlen_k is not None, "this double wants the longest sequence"
        assert softmax_scale is not None, "this double wants a scale"
        assert num_splits == 1, "SplitKV not supported on SM 9.0"
        assert softcap == 0.0, "this double has no soft cap"
        assert score_mod is None, "this double has no score_mod"
        assert mask_mod is None, "this double has no mask_mod"
        _check(q, k, v, page_table)
        batch = len(cu_seqlens_q) - 1
        for lengths, size in ((cu_seqlens_q, batch + 1), (seqused_k, batch)):
            assert lengths.dtype == torch.int32, "must be int32"
            assert lengths.is_contiguous(), "must be contiguous"
            assert lengths.shape == (size,), f"must have shape ({size},)"
        assert page_table.shape[0] == batch, "page_table must have a row for each sequence"
        heads = q.shape[1]
        if learnable_sink is not None:
            assert learnable_sink.shape == (heads,)
            assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
        left, right = window_size
        if causal:
            right = 0
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(heads, len(q))
        starts = cu_seqlens_q.tolist()
        for index, seq_len in enumerate(seqused_k.tolist()):
            rows = slice(starts[index], starts[index + 1])
            query_len = rows.stop - rows.start
            if query_len > max_seqlen_q or seq_len > max_seqlen_k:
                raise IllegalAccess("a sequence is longer than the longest that was announced")
            if query_len > seq_len:
                raise IllegalAccess("nobody says what becomes of rows without keys")
            keys, values = _gather(k, v, page_table[index], seq_len)
            out[rows], lse[:, rows] = _attend(
                q[rows], keys, values, softmax_scale, left, right, learnable_sink
            )
        return out, lse if return_lse else None


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rows ``[R, N, H]`` over keys ``[n, K, H]``: output, and LSE ``[N, R]``."""
    group = q.shape[1] // keys.shape[1]
    k, v = (one.double().repeat_interleave(group, dim=1) for one in (keys, values))
    scores = scale * torch.einsum("rnh,jnh->nrj", q.double(), k)
    place = torch.arange(len(q))[:, None] + len(keys) - len(q)
    key = torch.arange(len(keys))[None]
    seen = torch.ones(len(q), len(keys), dtype=torch.bool)
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None])
    out = torch.einsum("nrj,jnh->rnh", torch.exp(scores - lse[..., None]), v)
    return out.to(q.dtype), lse.float()


def _gather(k: Tensor, v: Tensor, table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    used = -(-seq_len // k.shape[1])
    if used > len(table):
        raise IllegalAccess("a page table is too short for a sequence")
    blocks = table[:used].long()
    if not 0 <= int(blocks.min()) <= int(blocks.max()) < len(k):
        raise IllegalAccess(f"blocks {blocks.tolist()} of a cache of {len(k)}")
    return k[blocks].flatten(0, 1)[:seq_len], v[blocks].flatten(0, 1)[:seq_len]


def _check(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16"
    assert q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype"
    assert page_table.dtype == torch.int32, "page_table must be int32"
    assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
    assert k.shape[:3] == v.shape[:3]
    assert k.shape[3] == q.shape[2]
    assert q.shape[1] % k.shape[2] == 0, "num_head must be divisible by num_head_kv"
    for size in (k.shape[3], v.shape[3]):
        assert 8 <= size <= 256, "is not supported on SM90"
        assert size % 8 == 0, "is not supported on SM90"
