"""Doubles of what the direct calls of the benchmark need of libraries; plain torch, one sequence
after the other. Each takes what the real one takes, by the same names."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    lengths: list[int],
    table: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention, aligned at the end, through a block table; ``[T, N, H]``."""
    assert table.dtype == torch.int32
    outs = []
    for index, length in enumerate(lengths):
        rows = q[starts[index] : starts[index + 1]]
        blocks = table[index, : math.ceil(length / k.shape[1])].long()
        keys, values = (one[blocks].flatten(0, 1)[:length] for one in (k, v))
        groups = rows.shape[1] // keys.shape[1]
        first = length - len(rows)
        mask = torch.arange(length) <= first + torch.arange(len(rows))[:, None]
        outs.append(
            F.scaled_dot_product_attention(
                rows.transpose(0, 1),
                keys.repeat_interleave(groups, 1).transpose(0, 1),
                values.repeat_interleave(groups, 1).transpose(0, 1),
                attn_mask=mask,
                scale=scale,
            ).transpose(0, 1)
        )
    return torch.cat(outs)


def _flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    assert causal
    starts = [q.shape[1] * index for index in range(len(q) + 1)]
    lengths = cache_seqlens.tolist()
    flat = q.flatten(0, 1)
    out = paged(flat, k_cache, v_cache, starts, lengths, block_table, softmax_scale)
    return out.view_as(q)


def _flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    assert causal
    assert cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_k == int(lengths.max())
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    starts = cu_seqlens_q.tolist()
    return paged(q, k, v, starts, lengths.tolist(), block_table, softmax_scale)


def _flash_attn_4_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, None]:
    assert causal
    assert max_seqlen_k == int(seqused_k.max())
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    starts = cu_seqlens_q.tolist()
    return paged(q, k, v, starts, seqused_k.tolist(), page_table, softmax_scale), None


class _Wrapper:
    """Either wrapper of FlashInfer."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert backend in ("auto", "fa2", "fa3")
        self.layout = kv_layout

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Attend with what was planned."""
        k, v = (one if self.layout == "NHD" else one.transpose(1, 2) for one in cache)
        starts = torch.arange(len(q) + 1) if self.starts is None else self.starts
        pages = self.indptr.diff()
        lengths = (pages - 1) * k.shape[1] + self.last
        table = torch.zeros((len(pages), int(pages.max())), dtype=torch.int32)
        for row, own in zip(table, torch.split(self.indices, pages.tolist()), strict=True):
            row[: len(own)] = own
        return paged(q, k, v, starts.tolist(), lengths.tolist(), table, self.scale)

    def _planned(
        self, starts: Tensor | None, indptr: Tensor, indices: Tensor, last: Tensor, scale: float
    ) -> None:
        for one in (indptr, indices, last):
            assert one.dtype == torch.int32
        assert int(last.min()) >= 1
        self.starts, self.indptr, self.indices, self.last = starts, indptr, indices, last
        self.scale = scale


class _Decode(_Wrapper):
    def __init__(
        self,
        workspace: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor,
        paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor,
        backend: str,
    ) -> None:
        super().__init__(workspace, kv_layout, backend)
        assert use_cuda_graph
        assert use_tensor_cores
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.room = len(paged_kv_indices_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Take what there is to read."""
        assert num_qo_heads % num_kv_heads == 0
        assert len(indices) <= self.room
        self._planned(None, indptr, indices, last_page_len, sm_scale)


class _Prefill(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Take what there is to read."""
        assert causal
        self._planned(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sm_scale
        )


def _bias(q_seqlen: list[int], kv_seqlen: list[int], table: Tensor, size: int, **_: Any) -> Any:
    return SimpleNamespace(q=q_seqlen, kv=kv_seqlen, table=table, size=size)


def _memory_efficient(
    q: Tensor, k: Tensor, v: Tensor, *, attn_bias: Any, scale: float, op: str
) -> Tensor:
    assert op == "split-K"
    assert q.shape[3] == k.shape[3] == v.shape[3]
    starts = [sum(attn_bias.q[:index]) for index in range(len(attn_bias.q) + 1)]
    # One head stands for a group: the others are the same memory.
    keys, values = (
        one[0, :, :, 0].reshape(-1, attn_bias.size, *one.shape[2:3], one.shape[4]) for one in (k, v)
    )
    flat = q[0].flatten(1, 2)
    out = paged(flat, keys, values, starts, attn_bias.kv, attn_bias.table, scale)
    return out.view_as(q)


#: Module names with what is called of them.
DOUBLES: dict[str, Any] = {
    "flash_attn.flash_attn_interface": SimpleNamespace(
        flash_attn_with_kvcache=_flash_attn_with_kvcache,
        flash_attn_varlen_func=_flash_attn_varlen_func,
    ),
    "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=_flash_attn_4_varlen_func),
    "flashinfer": SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=_Decode, BatchPrefillWithPagedKVCacheWrapper=_Prefill
    ),
    "xformers.ops.fmha": SimpleNamespace(
        memory_efficient_attention_forward=_memory_efficient,
        triton_splitk=SimpleNamespace(FwOp="split-K"),
    ),
    "xformers.ops.fmha.attn_bias": SimpleNamespace(
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask=SimpleNamespace(from_seqlens=_bias)
    ),
}
