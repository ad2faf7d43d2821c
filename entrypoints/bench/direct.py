"""Libraries called as their own documentation says, on the tensors that their backend was given.

Metadata is made beforehand. What a backend adds to these calls, on the device and on the host, is
the price of the contract. A function here is chosen by the name of the backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.options import PartOptions
from .data import BenchData

#: Bytes of flashinfer's workspace; the third that its documentation recommends may be too little.
_WORKSPACE = 384 << 20
#: Query rows of a sequence that xformers' split-K takes with a causal bias.
_MOST_SPLITK_ROWS = 16


class NoDirectCall(Exception):  # noqa: N818 - it is no error
    """The library has no call for the batch; the text says why."""


@dataclass(frozen=True)
class DirectCall:
    """A library's own call.

    Attributes:
        name: of the function.
        call: makes it, and returns ``[T, N, H]``.
    """

    name: str
    call: Callable[[], Tensor]


def direct_call(backend: str, data: BenchData, options: PartOptions) -> DirectCall | None:
    """The call that a backend stands on, for the tensors of a case; None if it stands on none.

    Args:
        backend: its name.
        data: the tensors.
        options: of the backend: the call is made with the same kernels.

    Raises:
        NoDirectCall: there is none for this batch.
        Exception: whatever the library raises.
    """
    maker = DIRECT_CALLS.get(backend)
    if maker is None:
        return None
    if data.cache.k.dtype != data.query.dtype:
        raise NoDirectCall("the direct calls are made with a cache of the query's dtype only")
    return maker(data, options)


def flash_attn(data: BenchData, options: PartOptions) -> DirectCall:
    """FlashAttention 2: ``flash_attn_with_kvcache`` to decode, else ``flash_attn_varlen_func``."""
    library = importlib.import_module("flash_attn.flash_attn_interface")
    q, k, v, batch, scale = data.query, data.cache.k, data.cache.v, data.batch, data.spec.scale
    if data.case.kind == "decode":
        return DirectCall(
            "flash_attn_with_kvcache",
            lambda: library.flash_attn_with_kvcache(
                q.unsqueeze(1),
                k,
                v,
                cache_seqlens=batch.seq_lens,
                block_table=batch.block_table,
                softmax_scale=scale,
                causal=True,
            ).squeeze(1),
        )
    key_starts = _starts(batch.seq_lens)
    return DirectCall(
        "flash_attn_varlen_func",
        lambda: library.flash_attn_varlen_func(
            q,
            k,
            v,
            batch.query_start_loc,
            key_starts,
            batch.max_query_len,
            batch.max_seq_len,
            softmax_scale=scale,
            causal=True,
            block_table=batch.block_table,
        ),
    )


def flash_attn_4(data: BenchData, options: PartOptions) -> DirectCall:
    """FlashAttention 4: its ``flash_attn_varlen_func`` with a page table."""
    library = importlib.import_module("flash_attn.cute")
    q, k, v, batch, scale = data.query, data.cache.k, data.cache.v, data.batch, data.spec.scale

    def call() -> Tensor:
        result = library.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            page_table=batch.block_table,
            softmax_scale=scale,
            causal=True,
        )
        return _first(result)

    return DirectCall("flash_attn.cute.flash_attn_varlen_func", call)


def flashinfer(data: BenchData, options: PartOptions) -> DirectCall:
    """The paged wrappers of FlashInfer: decode with tensor cores, in the form that a CUDA graph can
    replay; else prefill, with the kernels that the backend was told to take."""
    library = importlib.import_module("flashinfer")
    spec, batch, size = data.spec, data.batch, data.cache_spec.block_size
    layout, cache = _layout(data)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=data.query.device)
    lengths = batch.seq_lens_cpu
    pages = (lengths + size - 1) // size
    indptr, last = _starts(pages), (lengths - 1) % size + 1
    used = torch.arange(batch.block_table_cpu.shape[1]) < pages[:, None]
    indices = batch.block_table_cpu[used].to(data.query.device)
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_size)
    common = {
        "sm_scale": spec.scale,
        "q_data_type": spec.dtype,
        "kv_data_type": data.cache_spec.dtype,
    }
    if data.case.kind == "decode":
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout=layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(indptr, device=data.query.device),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(indptr[1:], device=data.query.device),
            backend="fa2",
        )
        wrapper.plan(indptr, indices, last, *heads, size, **common)
        name = "BatchDecodeWithPagedKVCacheWrapper.run"
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout=layout, backend=getattr(options, "backend", "auto")
        )
        starts = batch.query_start_loc_cpu
        wrapper.plan(starts, indptr, indices, last, *heads, size, causal=True, **common)
        name = "BatchPrefillWithPagedKVCacheWrapper.run"
    return DirectCall(name, lambda: wrapper.run(data.query, cache))


def xformers(data: BenchData, options: PartOptions) -> DirectCall:
    """The paged split-K operator of xFormers, which is for batches of few new tokens."""
    if data.case.kind != "decode":
        raise NoDirectCall(
            "the paged split-K operator of xformers takes batches of equal query lengths up to "
            f"{_MOST_SPLITK_ROWS} only"
        )
    fmha = importlib.import_module("xformers.ops.fmha")
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    spec, batch, size = data.spec, data.batch, data.cache_spec.block_size
    bias = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1] * batch.num_seqs,
        batch.seq_lens_cpu.tolist(),
        batch.block_table,
        size,
        device=data.query.device,
    )
    groups, group_size = spec.num_kv_heads, spec.group_size
    q = data.query.view(1, -1, groups, group_size, spec.head_size)
    k, v = (
        one.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group_size, -1)
        for one in (data.cache.k, data.cache.v)
    )

    def call() -> Tensor:
        out: Tensor = fmha.memory_efficient_attention_forward(
            q, k, v, attn_bias=bias, scale=spec.scale, op=fmha.triton_splitk.FwOp
        )
        return out.squeeze(0).flatten(1, 2)

    return DirectCall("memory_efficient_attention_forward", call)


#: Makers of direct calls by the name of the backend.
DIRECT_CALLS: dict[str, Callable[[BenchData, PartOptions], DirectCall]] = {
    "flash_attn": flash_attn,
    "flash_attn_4": flash_attn_4,
    "flashinfer": flashinfer,
    "xformers": xformers,
}


def dense_call(data: BenchData) -> DirectCall:
    """Torch's fused attention of prompts of one length, contiguous and unpaged; flash attention in
    16 bits on CUDA."""
    case = data.case
    shape = (len(case.sequences), case.sequences[0][0])
    q, k, v = (
        one.reshape(*shape, *one.shape[1:]).transpose(1, 2).contiguous()
        for one in (data.query, data.key, data.value)
    )
    flash = q.device.type == "cuda" and q.dtype.itemsize == 2

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]) if flash else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return DirectCall("torch sdpa, dense", call)


def _layout(data: BenchData) -> tuple[str, tuple[Tensor, Tensor]]:
    """FlashInfer's name for the order of a block, and the cache in that order."""
    k, v = data.cache.k, data.cache.v
    if k.is_contiguous():
        return "NHD", (k, v)
    return "HND", (k.transpose(1, 2), v.transpose(1, 2))


def _starts(lengths: Tensor) -> Tensor:
    """``[0, first, first + second, ...]``, int32, where the lengths are."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _first(result: Any) -> Tensor:
    """The output of a call that may return an LSE with it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
