"""What flashinfer's compiled modules do, in float64 on the CPU, with their conventions and limits.

Written from flashinfer 0.6.13: ``csrc/batch_prefill.cu``, ``attention/scheduler.cuh``,
``attention/prefill.cuh``, ``attention/variants.cuh``, ``page.cuh``, ``math.cuh``. A module has two
functions, ``plan`` and ``paged_run``, with the arguments of the real ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Streaming multiprocessors of the device that is imitated.
PROCESSORS = 1
#: ``math::inf``: what the kernels take for infinity, as a score before the scale.
INFINITY = 5e4
CAUSAL = 1
LOG2_E = math.log2(math.e)
_FP8 = torch.float8_e4m3fn


def tile_rows(packed_len: int, head_dim: int) -> int:
    """``FA2DetermineCtaTileQ`` from compute capability 8.0 on."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


@dataclass(frozen=True)
class PlanInfo:
    """What a plan decided.

    Attributes:
        tile: rows times heads of a tile.
        split: whether keys are cut into pieces.
        float_bytes, int_bytes: what it takes of the workspaces.
        row_starts, page_starts: the host arrays that it was made from.
    """

    tile: int
    split: bool
    float_bytes: int
    int_bytes: int
    row_starts: tuple[int, ...]
    page_starts: tuple[int, ...]


def prefill_plan(
    row_starts: list[int],
    page_starts: list[int],
    total_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    graph: bool,
    window_left: int,
    disable_split: bool,
    processors: int,
) -> PlanInfo:
    """``PrefillPlan``: sizes only, step by step as the library computes them."""
    num_seqs = len(row_starts) - 1
    group = heads[0] // heads[1]
    packed = [(row_starts[i + 1] - row_starts[i]) * group for i in range(num_seqs)]
    pages = [page_starts[i + 1] - page_starts[i] for i in range(num_seqs)]
    if min(packed) < 0 or min(pages) < 0:
        raise RuntimeError("qo_indptr and kv_indptr should be non-negative differences")
    if graph:
        tile = tile_rows((total_rows - num_seqs + 1) * group, head_dim)
        tiles = -(-total_rows * group // tile) + num_seqs - 1
    else:
        tile = tile_rows(sum(packed) // num_seqs, head_dim)
        tiles = sum(-(-one // tile) for one in packed)
    if window_left >= 0:
        pages = [min(-(-(window_left + tile) // page_size), one) for one in pages]
    most = 2 * processors // heads[1]
    longest = max(1, *pages)
    low, high = max(128 // page_size, 1), longest

    def programs(chunk: int) -> int:
        counts = zip(packed, pages, strict=True)
        return sum(-(-rows // tile) * -(-max(length, 1) // chunk) for rows, length in counts)

    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if programs(middle) > most else (low, middle)
    split = (graph or low < longest) and not disable_split
    launched = programs(low if not disable_split else longest)
    padded = max(most, tiles) if graph else launched
    assert launched <= padded
    float_bytes, int_bytes = 0, 0
    for size in (4 * padded, 4 * padded, 4 * padded, 4 * (num_seqs + 1)):
        int_bytes = _aligned(int_bytes) + size
    int_bytes += 4
    if graph:
        int_bytes = _aligned(int_bytes) + 4
    if split:
        for size in (heads[0] * padded * tile * head_dim * 4, heads[0] * padded * tile * 4):
            float_bytes = _aligned(float_bytes) + size
        for size in (4 * (total_rows + 1), padded):
            int_bytes = _aligned(int_bytes) + size
    return PlanInfo(tile, split, float_bytes, int_bytes, tuple(row_starts), tuple(page_starts))


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class KernelModuleDouble:
    """A compiled fa2 module.

    Args:
        arguments: of ``get_batch_prefill_module`` behind the name of the kernels.
    """

    def __init__(self, *arguments: Any) -> None:
        self.q_dtype, self.kv_dtype, self.o_dtype, id_dtype = arguments[:4]
        self.head_dim, head_dim_vo, positions = arguments[4:7]
        self.window, self.soft_cap, fp16_reduction = arguments[7:]
        if self.q_dtype not in (torch.float16, torch.bfloat16) or self.o_dtype != self.q_dtype:
            raise RuntimeError(f"no module for {arguments}")
        if self.kv_dtype not in (self.q_dtype, _FP8) or id_dtype != torch.int32:
            raise RuntimeError(f"no module for {arguments}")
        if self.head_dim not in (64, 128, 256) or head_dim_vo != self.head_dim:
            raise RuntimeError(f"no module for {arguments}")
        assert (positions, fp16_reduction) == (0, False)

    def plan(self, *arguments: Any) -> PlanInfo:
        """``BatchPrefillWithKVCachePlan``."""
        float_workspace, int_workspace, pinned, row_starts, page_starts, _lengths = arguments[:6]
        total_rows, num_seqs, heads, kv_heads, page_size, graph = arguments[6:12]
        head_dim, head_dim_vo, _causal, window_left, fixed_split, no_split, colocated = arguments[
            12:
        ]
        assert (head_dim, head_dim_vo) == (self.head_dim, self.head_dim)
        assert (fixed_split, colocated) == (-1, 0)
        assert pinned.shape == int_workspace.shape
        assert len(row_starts) == len(page_starts) == num_seqs + 1
        for tensor in (row_starts, page_starts):
            assert tensor.device.type == "cpu"
            assert tensor.dtype == torch.int32
        assert (window_left >= 0) == self.window
        info = prefill_plan(
            row_starts.tolist(),
            page_starts.tolist(),
            total_rows,
            (heads, kv_heads),
            head_dim,
            page_size,
            graph,
            window_left,
            no_split,
            PROCESSORS,
        )
        for name, needed, workspace in (
            ("batch_prefill_tmp_v", info.float_bytes, float_workspace),
            ("batch_prefill_request_indices", info.int_bytes, int_workspace),
        ):
            if needed > workspace.numel() * workspace.element_size():
                raise RuntimeError(f"Buffer overflow when allocating memory for {name}")
        return info

    def paged_run(
        self,
        _float_workspace: Tensor,
        _int_workspace: Tensor,
        info: PlanInfo,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        row_starts: Tensor,
        page_starts: Tensor,
        pages: Tensor,
        last_page_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        _pdl: object,
        *more: Any,
    ) -> None:
        """``BatchPrefillWithPagedKVCacheRun``; ``more`` as ``prefill.py`` passes it."""
        mask, mask_starts, _slopes, prefix, positions, longest_item = more[:6]
        assert all(one is None for one in (mask, mask_starts, prefix, positions, longest_item))
        soft_cap, sm_scale = more[6:8]
        assert (soft_cap > 0) == self.soft_cap
        assert layout == 0, "only NHD is imitated; strides may be any"
        assert (q.dtype, k_cache.dtype) == (self.q_dtype, self.kv_dtype)
        if k_cache.stride() != v_cache.stride():
            raise RuntimeError("k/v strides differs")
        for tensor in (q, k_cache):
            unit = 16 // tensor.element_size()
            assert tensor.stride(-1) == 1, "misread"
            assert all(stride % unit == 0 for stride in tensor.stride()[:-1]), "misaligned"
        assert out.is_contiguous(), "written as if it were packed"
        assert lse is None or lse.is_contiguous(), "written as if it were packed"
        assert row_starts.tolist() == list(info.row_starts), "stale plan"
        assert page_starts.tolist() == list(info.page_starts), "stale plan"
        attention = _Attention(sm_scale, soft_cap, window_left, mask_mode == CAUSAL, info)
        page_size = k_cache.shape[1]
        for index in range(len(last_page_lens)):
            rows = slice(info.row_starts[index], info.row_starts[index + 1])
            if rows.start == rows.stop:
                continue
            own = pages[info.page_starts[index] : info.page_starts[index + 1]].long()
            last = int(last_page_lens[index])
            assert 1 <= last <= page_size, "not defined by the library"
            assert not len(own) or 0 <= int(own.min()) <= int(own.max()) < len(k_cache), "no page"
            length = (len(own) - 1) * page_size + last if len(own) else 0
            keys = k_cache[own].double().flatten(0, 1)[:length]
            values = v_cache[own].double().flatten(0, 1)[:length]
            result, sums = attention.attend(q[rows].double(), keys, values)
            out[rows] = result.to(out.dtype)
            if lse is not None:
                lse[rows] = sums.float()


@dataclass(frozen=True)
class _Attention:
    sm_scale: float
    soft_cap: float
    window_left: int
    causal: bool
    info: PlanInfo

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One sequence: output and LSE to base 2."""
        num_rows, num_heads = q.shape[:2]
        group = num_heads // keys.shape[1]
        visible = self._visible(num_rows, len(keys), group, keys.shape[1])
        if self.window_left >= 0:
            # Keys before the first row's window are not loaded.
            unread = max(0, len(keys) - num_rows - self.window_left)
            keys[:unread], values[:unread] = 0.0, 0.0
        scores = torch.einsum("qhd,khd->qhk", q, keys.repeat_interleave(group, 1))
        factor = self.sm_scale * LOG2_E
        if self.soft_cap > 0:
            scores = torch.tanh(scores * self.sm_scale / self.soft_cap)
            factor = self.soft_cap * LOG2_E
        scores = torch.where(visible, scores, -INFINITY)
        largest = (
            scores.amax(-1).clamp(min=-INFINITY)
            if len(keys)
            else scores.new_full((num_rows, num_heads), -INFINITY)
        )
        weights = torch.exp2((scores - largest[..., None]) * factor)
        # The running sum starts with the weight of a score of minus infinity.
        total = weights.sum(-1) + torch.exp2((-INFINITY - largest) * factor)
        result = torch.einsum("qhk,khd->qhd", weights, values.repeat_interleave(group, 1))
        blind = largest == -INFINITY
        result = torch.where(blind[..., None], 0.0, result / total[..., None])
        scaled = torch.where(blind, largest, largest * factor)
        return result, scaled + total.log2()

    def _visible(self, num_rows: int, num_keys: int, group: int, num_kv_heads: int) -> Tensor:
        """``[R, 1 or N, K]``, with the keys that a split loses in layers with a window that are not
        causal: it only covers the window and a tile of rows."""
        rows = torch.arange(num_rows)[:, None]
        keys = torch.arange(num_keys)[None]
        seen = torch.ones(num_rows, num_keys, dtype=torch.bool)
        if self.causal:
            seen &= keys <= num_keys - num_rows + rows
        if self.window_left < 0:
            return seen[:, None]
        seen &= keys + num_rows + self.window_left >= num_keys + rows
        if not self.info.split:
            return seen[:, None]
        # Tiles are runs of rows times the heads of a group: a row's heads may be in two of them.
        packed = rows * group + torch.arange(group)
        first = packed // self.info.tile * self.info.tile // group
        start = (num_keys + first - num_rows - self.window_left).clamp(min=0)
        covered = keys[:, None] < start[..., None] + self.window_left + self.info.tile
        return (seen[:, None] & covered).repeat(1, num_kv_heads, 1)
