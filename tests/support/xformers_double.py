"""A double of what Jackfield calls in ``xformers.ops.fmha`` 0.0.35, for the CPU.

Same signatures, same refusals, same layouts of the LSE; results in float64. Calls are kept in
``CALLS``. Read from xformers/ops/fmha/{attn_bias,common,cutlass,triton_splitk}.py.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .double_math import attend_exactly, hidden_keys

#: Parameters in xformers 0.0.35, without annotations: of ``fmha``, its operators, its biases.
SIGNATURES = {
    "Inputs": (
        "query, key, value, attn_bias=None, p=0.0, scale=None, output_dtype=None, is_partial=False"
    ),
}
OPERATOR_SIGNATURE = "inp, needs_gradient"
BIAS_SIGNATURES = {
    "_SeqLenInfo": "seqstart, max_seqlen, min_seqlen, seqstart_py",
    "_PaddedSeqLenInfo": (
        "seqstart, max_seqlen, min_seqlen, seqstart_py, seqlen, seqlen_py, padding"
    ),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (
        "q_seqinfo, k_seqinfo, block_tables, page_size"
    ),
    "BlockDiagonalCausalFromBottomRightMask": "q_seqinfo, k_seqinfo, _batch_sizes=None",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        "q_seqinfo, k_seqinfo, _batch_sizes=None, _window_size=0"
    ),
}


@dataclass
class _SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def intervals(self) -> list[tuple[int, int]]:
        return list(zip(self.seqstart_py, self.seqstart_py[1:], strict=False))


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    def __post_init__(self) -> None:
        assert len(self.seqstart_py) == len(self.seqlen_py) + 1


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask:
    """Rows of a sequence, aligned to its last key; keys in pages."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int


@dataclass
class BlockDiagonalCausalFromBottomRightMask:
    """Packed rows and packed keys, each sequence's rows aligned to its last key."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=False)
        for (q_start, q_end), (k_start, k_end) in pairs:
            if k_end - k_start < q_end - q_start:
                raise ValueError("Expected `num_keys >= num_queries`")


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same with a window, the row's own key counted."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")


@dataclass
class Inputs:
    """What an operator is given."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False

    @property
    def scale_float(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def check(self) -> None:
        """What ``Inputs.validate_inputs`` refuses, and what Jackfield has no use for."""
        query, key, value = self.query, self.key, self.value
        assert (self.p, self.output_dtype, self.is_partial) == (0.0, None, False)
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError("Query/Key/Value should either all have the same dtype")
        if query.shape[:1] + query.shape[2:-1] != key.shape[:1] + key.shape[2:-1]:
            raise ValueError("Incompatible shapes for attention inputs")
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise ValueError("Incompatible shapes for attention inputs")
        if query.shape[0] != 1:
            raise ValueError("Expected batch_size=1 when using block-diagonal bias")
        if self.attn_bias.q_seqinfo.seqstart.device != query.device:
            raise ValueError("Attention bias and Query/Key/Value should be on the same device")


@dataclass
class Context:
    """What an operator returns beside the result."""

    lse: Tensor
    out: Tensor


@dataclass
class Call:
    """One call of an operator."""

    op: type
    inputs: Inputs
    wants_lse: bool

    @property
    def query(self) -> Tensor:
        return self.inputs.query

    @property
    def key(self) -> Tensor:
        return self.inputs.key

    @property
    def value(self) -> Tensor:
        return self.inputs.value

    @property
    def bias(self) -> Any:
        return self.inputs.attn_bias


#: The latest calls; tests empty it.
CALLS: deque[Call] = deque(maxlen=50)


class _FwOp:
    """An operator of the forward pass."""

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[Tensor, Context | None]:
        inp.check()
        reasons = cls.reasons(inp)
        if reasons:
            raise ValueError(f"{cls.__name__} is not supported because: {'; '.join(reasons)}")
        CALLS.append(Call(cls, inp, needs_gradient))
        out, lse = cls.compute(inp)
        return out, Context(lse, out) if needs_gradient else None

    @classmethod
    def reasons(cls, inp: Inputs) -> list[str]:
        raise NotImplementedError

    @classmethod
    def compute(cls, inp: Inputs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class SplitKFwOp(_FwOp):
    """``triton_splitk.FwOp``."""

    BLOCK_N = 64

    @classmethod
    def reasons(cls, inp: Inputs) -> list[str]:
        q, k, bias = inp.query, inp.key, inp.attn_bias
        if not isinstance(bias, PagedBlockDiagonalCausalWithOffsetPaddedKeysMask):
            return [f"attn_bias type is {type(bias)}"]
        rows = bias.q_seqinfo
        return _failed(
            {
                f"dtype={q.dtype}": q.dtype not in (torch.half, torch.bfloat16),
                f"Embed dim {q.shape[-1]} not supported": q.shape[-1]
                not in (16, 32, 64, 128, 256, 512),
                "query.shape[-1] != value.shape[-1]": q.shape[-1] != inp.value.shape[-1],
                "not of 5 dimensions": q.ndim != 5,
                "stride % 8": any(one.stride(-2) % 8 for one in (q, k, inp.value)),
                "stride(-1) > 1": any(one.stride(-1) > 1 for one in (q, k, inp.value)),
                "Expected other total of queries": q.shape[1] != rows.seqstart_py[-1],
                "Variable query len": rows.max_seqlen != rows.min_seqlen,
                "Query length should not be larger than 16": rows.max_seqlen > 16,
                "key.shape[1] should be divisible by the page size": k.shape[1] % bias.page_size
                != 0,
                "page size should be divisible by the block size": bias.page_size % cls.BLOCK_N
                != 0,
            }
        )

    @classmethod
    def compute(cls, inp: Inputs) -> tuple[Tensor, Tensor]:
        bias, pages = inp.attn_bias, inp.key.shape[1] // inp.attn_bias.page_size
        table, lengths = bias.block_tables, bias.k_seqinfo.seqlen
        assert table.dtype == lengths.dtype == torch.int32
        assert lengths.stride(0) == 1
        # The kernel computes addresses of whatever the table holds.
        assert bool(((table >= 0) & (table < pages)).all())
        assert int(lengths.max()) <= table.shape[1] * bias.page_size
        num_seqs, (num_heads, group) = len(lengths), inp.query.shape[2:4]
        query = inp.query.view(num_seqs, -1, num_heads * group, inp.query.shape[-1])
        keys, values = (one[0, :, :, 0] for one in (inp.key, inp.value))
        out, sums = [], []
        for q, line, length in zip(query, table.long(), lengths.tolist(), strict=True):
            places = torch.arange(length)
            slots = line[places // bias.page_size] * bias.page_size + places % bias.page_size
            hidden = hidden_keys(len(q), length, None, 0)
            scale = inp.scale_float
            one, lse = attend_exactly(q, keys[slots], values[slots], scale, hidden)
            out.append(one)
            sums.append(lse)
        result = torch.stack(out).view(num_seqs, -1, num_heads, group, inp.query.shape[-1])
        lse = torch.cat(sums).t().reshape(1, num_heads, group, -1)
        return result.to(inp.query.dtype), lse.float().contiguous()


class CutlassFwOp(_FwOp):
    """``cutlass.FwOp``, for input of 4 dimensions."""

    @classmethod
    def reasons(cls, inp: Inputs) -> list[str]:
        q, v = inp.query, inp.value
        unit = 4 if q.dtype == torch.float else 8
        kinds = (
            BlockDiagonalCausalFromBottomRightMask,
            BlockDiagonalCausalLocalAttentionFromBottomRightMask,
        )
        return _failed(
            {
                f"attn_bias type is {type(inp.attn_bias)}": type(inp.attn_bias) not in kinds,
                f"dtype={q.dtype}": q.dtype not in (torch.float, torch.half, torch.bfloat16),
                "a stream for each group": q.ndim != 4,
                "shape[-1] % unit": bool(q.shape[-1] % unit or v.shape[-1] % unit),
                "stride(-2) % unit": bool(q.stride(-2) % unit or v.stride(-2) % unit),
                "stride(-1) > 1": q.stride(-1) > 1 or v.stride(-1) > 1,
            }
        )

    @classmethod
    def compute(cls, inp: Inputs) -> tuple[Tensor, Tensor]:
        bias = inp.attn_bias
        rows, keys = bias.q_seqinfo, bias.k_seqinfo
        for one in (inp.query, inp.key, inp.value):
            # What the real one does not check, and misreads or faults on.
            assert one.data_ptr() % 16 == 0
            assert all(stride * one.element_size() % 16 == 0 for stride in one.stride()[:-1])
        for info, tensor in ((rows, inp.query), (keys, inp.key)):
            assert info.seqstart.dtype == torch.int32
            assert info.seqstart.is_contiguous()
            assert info.seqstart.tolist() == info.seqstart_py
            lens = [end - start for start, end in info.intervals()]
            assert (max(lens), min(lens)) == (info.max_seqlen, info.min_seqlen)
            assert info.seqstart_py[-1] == tensor.shape[1]
        left = getattr(bias, "_window_size", None)
        left = None if left is None else left - 1
        num_seqs, num_heads = len(rows.seqstart_py) - 1, inp.query.shape[2]
        out = []
        padded = torch.full((num_seqs, num_heads, -(-rows.max_seqlen // 32) * 32), torch.inf)
        intervals = zip(rows.intervals(), keys.intervals(), strict=True)
        for index, ((q_start, q_end), (k_start, k_end)) in enumerate(intervals):
            q = inp.query[0, q_start:q_end]
            k, v = (one[0, k_start:k_end] for one in (inp.key, inp.value))
            hidden = hidden_keys(len(q), len(k), left, 0)
            one, lse = attend_exactly(q, k, v, inp.scale_float, hidden)
            out.append(one)
            padded[index, :, : len(q)] = lse.t()
        return torch.cat(out).unsqueeze(0).to(inp.query.dtype), padded


def _failed(checks: dict[str, bool]) -> list[str]:
    return [reason for reason, failed in checks.items() if failed]


#: The parts of the module that have names of their own.
attn_bias = SimpleNamespace(
    _SeqLenInfo=_SeqLenInfo,
    _PaddedSeqLenInfo=_PaddedSeqLenInfo,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask=(
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    ),
    BlockDiagonalCausalFromBottomRightMask=BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask=(
        BlockDiagonalCausalLocalAttentionFromBottomRightMask
    ),
)
triton_splitk = SimpleNamespace(FwOp=SplitKFwOp)
cutlass = SimpleNamespace(FwOp=CutlassFwOp)


def module() -> ModuleType:
    """This module."""
    return sys.modules[__name__]
