"""Stands in for flash-attn 2 on a CPU: its compiled functions, computed in float64.

It refuses what they refuse and has their conventions: where windows and causality are aligned,
which LSE rows without keys have, what is added for ALiBi, when heads are swapped with rows. What
would read or write memory of somebody else raises ``IllegalAccess``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3.post2"
#: Parameters of the C++ functions of that version, which have no Python signature.
FWD_KVCACHE = (
    "q, kcache, vcache, k_, v_, seqlens_k_, rotary_cos_, rotary_sin_, cache_batch_idx_, "
    "leftpad_k_, block_table_, alibi_slopes_, out_, softmax_scale, is_causal, window_size_left, "
    "window_size_right, softcap, is_rotary_interleaved, num_splits"
)
VARLEN_FWD = (
    "q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, "
    "alibi_slopes_, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, "
    "window_size_left, window_size_right, softcap, return_softmax, gen_"
)
_TILE_ROWS = 64


class IllegalAccess(Exception):  # noqa: N818 - what CUDA calls it
    """The kernel would use memory that is not its own."""


@dataclass
class Call:
    """A call that was made.

    Attributes:
        function: its name.
        arguments: by parameter name.
    """

    function: str
    arguments: dict[str, Any]


@dataclass
class Kernels:
    """``flash_attn_2_cuda``: what it was last called with stands in ``calls``."""

    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=8))

    def fwd_kvcache(
        self,
        q: Tensor,
        kcache: Tensor,
        vcache: Tensor,
        k_: None,
        v_: None,
        seqlens_k_: Tensor,
        rotary_cos_: None,
        rotary_sin_: None,
        cache_batch_idx_: None,
        leftpad_k_: None,
        block_table_: Tensor,
        alibi_slopes_: Tensor | None,
        out_: Tensor | None,
        softmax_scale: float,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        is_rotary_interleaved: bool,
        num_splits: int,
        /,
    ) -> list[Tensor]:
        """Every sequence has ``q.shape[1]`` rows: output and LSE, ``[S, N, rows]``."""
        self.calls.append(Call("fwd_kvcache", {k: v for k, v in locals().items() if k != "self"}))
        _unused(k_, v_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_)
        _check_inputs(q, kcache, vcache, block_table_, alibi_slopes_)
        batch, rows, heads, size = q.shape
        kv_heads = kcache.shape[2]
        _check(batch > 0, "batch size must be positive")
        _check(0 <= num_splits <= 128, "num_splits > 128 not supported")
        _check_lengths("seqlens_k", seqlens_k_, batch)
        _check(block_table_.shape[0] == batch, "block_table must have shape (batch_size, ...)")
        if rows == 1 and alibi_slopes_ is None:
            is_causal = False
        if is_causal:
            window_size_right = 0
        unlimited = window_size_left < 0 and window_size_right < 0
        swapped = rows == 1 and heads > kv_heads and unlimited and alibi_slopes_ is None
        shape = (batch, heads // kv_heads, kv_heads, size) if swapped else tuple(q.shape)
        out = torch.empty(shape, dtype=q.dtype) if out_ is None else out_
        _check_output(out, q, shape)
        scores = _Scores(
            softmax_scale, softcap, window_size_left, window_size_right, alibi_slopes_, heads
        ).limited(block_table_.shape[1] * kcache.shape[1])
        lse = torch.empty(batch, heads, rows)
        for index, seq_len in enumerate(seqlens_k_.tolist()):
            keys, values = _gather(kcache, vcache, block_table_[index], seq_len)
            one, lse[index] = scores.attend(q[index], keys, values)
            if swapped:
                one = one.view(kv_heads, -1, size).transpose(0, 1)
            out[index] = one
        if swapped:
            out = out.transpose(1, 2).reshape(batch, 1, heads, size)
        return [out, lse]

    def varlen_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out_: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_k: Tensor | None,
        leftpad_k_: None,
        block_table_: Tensor,
        alibi_slopes_: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        p_dropout: float,
        softmax_scale: float,
        zero_tensors: bool,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        return_softmax: bool,
        gen_: None,
        /,
    ) -> list[Tensor]:
        """Packed sequences: output, LSE ``[N, rows]``, and two that nobody wants."""
        self.calls.append(Call("varlen_fwd", {k: v for k, v in locals().items() if k != "self"}))
        _unused(leftpad_k_, gen_, seqused_k)
        _check_inputs(q, k, v, block_table_, alibi_slopes_)
        _check(p_dropout == 0.0 and not return_softmax, "this double has no dropout")
        batch = len(cu_seqlens_q) - 1
        _check(batch > 0, "batch size must be positive")
        _check_lengths("cu_seqlens_q", cu_seqlens_q, batch + 1)
        _check_lengths("cu_seqlens_k", cu_seqlens_k, batch + 1)
        _check(block_table_.shape[0] == batch, "block_table must have shape (batch_size, ...)")
        _check(max_seqlen_q != 1, "this double does not swap heads of packed rows")
        _check(max_seqlen_k > 0, "this double wants keys")
        if is_causal:
            window_size_right = 0
        out = torch.empty_like(q) if out_ is None else out_
        _check_output(out, q, tuple(q.shape))
        if zero_tensors:
            out.zero_()
        heads = q.shape[1]
        scores = _Scores(
            softmax_scale, softcap, window_size_left, window_size_right, alibi_slopes_, heads
        ).limited(max_seqlen_k)
        lse = torch.full((heads, len(q)), math.nan)
        starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for index in range(batch):
            rows = slice(starts[index], starts[index + 1])
            query_len, seq_len = rows.stop - rows.start, key_starts[index + 1] - key_starts[index]
            if query_len > max_seqlen_q or seq_len > max_seqlen_k:
                raise IllegalAccess("a sequence is longer than the longest that was announced")
            if not query_len:
                continue
            scores.check_no_idle_tile(query_len, seq_len)
            keys, values = _gather(k, v, block_table_[index], seq_len)
            out[rows], lse[:, rows] = scores.attend(q[rows], keys, values)
        return [out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)]


class Double(ModuleType):
    """``flash_attn.flash_attn_interface`` with the compiled functions behind it."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.flash_attn_gpu = Kernels()

    @property
    def calls(self) -> list[Call]:
        """The last calls, oldest first."""
        return list(self.flash_attn_gpu.calls)


@dataclass(frozen=True)
class _Scores:
    """What is done to dot products; window sides of -1 are unlimited."""

    scale: float
    soft_cap: float
    left: int
    right: int
    slopes: Tensor | None
    heads: int

    def limited(self, max_seqlen_k: int) -> _Scores:
        """Sides that are no limit are not seen as one, and then decide about ALiBi's form."""
        left = -1 if self.left >= max_seqlen_k else self.left
        right = -1 if self.right >= max_seqlen_k else self.right
        return _Scores(self.scale, self.soft_cap, left, right, self.slopes, self.heads)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[R, N, H]`` over keys ``[n, K, H]``: output, and LSE ``[N, R]``."""
        rows, keys_each = len(q), len(keys)
        group = self.heads // keys.shape[1]
        k, v = (one.double().repeat_interleave(group, dim=1) for one in (keys, values))
        scores = self.scale * torch.einsum("rnh,jnh->nrj", q.double(), k)
        if self.soft_cap > 0:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        place = torch.arange(rows)[:, None] + keys_each - rows
        key = torch.arange(keys_each)[None]
        if self.slopes is not None:
            causal = self.left < 0 and self.right == 0
            bias = key.expand(rows, -1) if causal else -(place - key).abs()
            scores = scores + self.slopes.double()[:, None, None] * bias
        seen = torch.ones(rows, keys_each, dtype=torch.bool)
        if self.left >= 0:
            seen &= key >= place - self.left
        if self.right >= 0:
            seen &= key <= place + self.right
        scores = scores.masked_fill(~seen, -math.inf)
        blind = ~seen.any(dim=1)
        if keys_each == 0:
            return torch.zeros_like(q), torch.full((self.heads, rows), math.inf)
        lse = torch.logsumexp(scores, dim=-1).masked_fill(blind, 0.0)
        out = torch.einsum("nrj,jnh->rnh", torch.exp(scores - lse[..., None]), v)
        return out.to(q.dtype), lse.masked_fill(blind, math.inf).float()

    def check_no_idle_tile(self, query_len: int, seq_len: int) -> None:
        """A tile of rows that sees no key writes its LSE where a padded batch has it."""
        for first in range(0, query_len, _TILE_ROWS):
            end = seq_len
            if self.right >= 0:
                end = min(end, first + _TILE_ROWS + seq_len - query_len + self.right)
            if end <= 0:
                raise IllegalAccess("the LSE of rows without keys goes to memory of others")


def _gather(k: Tensor, v: Tensor, table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    used = -(-seq_len // k.shape[1])
    if used > len(table):
        raise IllegalAccess("a block table is too short for a sequence")
    blocks = table[:used].long()
    if used and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(k):
        raise IllegalAccess(f"blocks {blocks.tolist()} of a cache of {len(k)}")
    return k[blocks].flatten(0, 1)[:seq_len], v[blocks].flatten(0, 1)[:seq_len]


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, slopes: Tensor | None
) -> None:
    _check(q.dtype in (torch.float16, torch.bfloat16), "only support fp16 and bf16 data type")
    _check(k.dtype == q.dtype, "query and key must have the same dtype")
    _check(v.dtype == q.dtype, "query and value must have the same dtype")
    _check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    _check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    for tensor in (q, k, v):
        _check_access(tensor)
    _check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    _check(q.shape[-1] <= 256, "only supports head dimension at most 256")
    _check(q.shape[-1] % 8 == 0, "must have a head_size that is a multiple of 8")
    _check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide")
    _check(k.shape == v.shape and k.shape[3] == q.shape[-1], "v must have shape ...")
    if slopes is not None:
        _check(slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32")
        _check(slopes.shape == (q.shape[-2],), "ALiBi slopes must have shape (num_heads,)")


def _check_output(out: Tensor, q: Tensor, shape: Sequence[int]) -> None:
    _check(out.dtype == q.dtype, "Output must have the same dtype as inputs")
    _check(tuple(out.shape) == tuple(shape), f"out must have shape {tuple(shape)}")
    _check_access(out)


def _check_lengths(name: str, lengths: Tensor, size: int) -> None:
    _check(lengths.dtype == torch.int32, f"{name} must have dtype int32")
    _check(lengths.is_contiguous(), f"{name} must be contiguous")
    _check(lengths.shape == (size,), f"{name} must have shape ({size},)")


def _check_access(tensor: Tensor) -> None:
    _check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    unaligned = [stride for stride in tensor.stride()[:-1] if stride % 8]
    if tensor.numel() and (unaligned or tensor.data_ptr() % 16):
        raise IllegalAccess("rows are read and written 16 bytes at a time")


def _unused(*arguments: object) -> None:
    _check(all(one is None for one in arguments), "this double wants None here")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
