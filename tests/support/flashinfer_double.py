"""A stand-in for the module ``flashinfer`` on a CPU: its two wrappers for paged attention.

The wrappers have the signatures of flashinfer 0.6.13, recorded below, and do and refuse what those
in its ``prefill.py`` and ``decode.py`` do, as far as fa2 is concerned.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .flashinfer_kernels_double import KernelModuleDouble

VERSION = "0.6.13"
#: Parameters of the real methods, behind ``self``, in order.
PARAMETERS = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None "
        "paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None "
        "custom_mask_buf=None mask_indptr_buf=None backend='auto' jit_args=None jit_kwargs=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
        "num_kv_heads head_dim_qk page_size head_dim_vo=None custom_mask=None "
        "packed_custom_mask=None causal=False pos_encoding_mode='NONE' use_fp16_qk_reduction=False "
        "sm_scale=None window_left=-1 logits_soft_cap=None rope_scale=None rope_theta=None "
        "q_data_type='float16' kv_data_type=None o_data_type=None non_blocking=True "
        "prefix_len_ptr=None token_pos_in_items_ptr=None token_pos_in_items_len=0 "
        "max_item_len_ptr=None seq_lens=None seq_lens_q=None block_tables=None "
        "max_token_per_sequence=None max_sequence_kv=None fixed_split_size=None "
        "disable_split_kv=False"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": (
        "q paged_kv_cache args q_scale=None k_scale=None v_scale=None out=None lse=None "
        "return_lse=False enable_pdl=None window_left=None sinks=None kv_cache_sf=None "
        "skip_softmax_threshold_scale_factor=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False use_tensor_cores=False "
        "paged_kv_indptr_buffer=None paged_kv_indices_buffer=None "
        "paged_kv_last_page_len_buffer=None backend='auto' jit_args=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "float_workspace_buffer int_workspace_buffer"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
        "pos_encoding_mode='NONE' window_left=-1 logits_soft_cap=None q_data_type='float16' "
        "kv_data_type=None o_data_type=None data_type=None sm_scale=None rope_scale=None "
        "rope_theta=None non_blocking=True block_tables=None seq_lens=None fixed_split_size=None "
        "disable_split_kv=False q_len_per_req=1"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.run": (
        "q paged_kv_cache args q_scale=None k_scale=None v_scale=None out=None lse=None "
        "return_lse=False enable_pdl=None window_left=None sinks=None q_len_per_req=None "
        "skip_softmax_threshold_scale_factor=None kv_cache_sf=None"
    ),
}
_PLAN_BYTES = 8 * 1024 * 1024


class _Wrapper:
    """What both wrappers have in common.

    Attributes:
        planned: arguments of the latest ``plan``, for tests.
    """

    def __init__(self, workspace: Tensor, backend: str) -> None:
        self.workspace = workspace
        self.backend = backend
        self.int_workspace = torch.empty(_PLAN_BYTES, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(_PLAN_BYTES, dtype=torch.uint8)
        self.planned: dict[str, Any] = {}
        self.module: KernelModuleDouble
        self.info: Any = None
        self.row_starts = self.page_starts = self.pages = self.last_page_lens = torch.empty(0)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self.workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def _load(self, q: Any, kv: Any, o: Any, head_dims: tuple[int, int], settings: Any) -> None:
        window_left, soft_cap = settings
        self.module = KernelModuleDouble(
            q, kv, o, torch.int32, *head_dims, 0, window_left >= 0, soft_cap > 0, False
        )

    def _run(self, q: Tensor, cache: Any, causal: bool, options: dict[str, Any]) -> Any:
        k, v = cache
        planned = self.planned
        for tensor, dtype in ((q, planned["q_data_type"]), (k, planned["kv_data_type"])):
            if tensor.dtype != dtype:
                raise ValueError(f"The dtype {tensor.dtype} does not match {dtype} of plan")
        if k.shape[1] != planned["page_size"]:
            raise ValueError("another page size than planned")
        out, lse = options["out"], options["lse"]
        scale = planned["sm_scale"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        for factor in (options["q_scale"], options["k_scale"]):
            scale *= 1.0 if factor is None else factor
        if options["return_lse"]:
            lse = torch.empty(q.shape[:2]) if lse is None else lse
            _check(lse, q.shape[:2], torch.float32)
        out = torch.empty_like(q) if out is None else out
        _check(out, q.shape, planned["o_data_type"])
        self.module.paged_run(
            self.workspace,
            self.int_workspace,
            self.info,
            q,
            k,
            v,
            self.row_starts,
            self.page_starts,
            self.pages,
            self.last_page_lens,
            out,
            lse,
            int(causal),
            0,
            planned["window_left"],
            False,
            *(None,) * 6,
            planned["logits_soft_cap"] or 0.0,
            scale,
        )
        if options["v_scale"] not in (None, 1.0):
            out *= options["v_scale"]
        return (out, lse) if options["return_lse"] else out


def _check(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"expected {tuple(shape)} of {dtype}, got {tensor.shape}, {tensor.dtype}")


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        assert (kv_layout, use_cuda_graph, jit_args) == ("NHD", False, None), "not imitated"
        super().__init__(float_workspace_buffer, backend)

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        page_size: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        sm_scale: Any = None,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: Any = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: Any = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
    ) -> None:
        assert max_sequence_kv is None, "the library then forgets to read the lengths"
        self.planned = {name: value for name, value in locals().items() if name != "self"}
        self.row_starts, self.page_starts = qo_indptr.clone(), paged_kv_indptr.clone()
        self.pages, self.last_page_lens = paged_kv_indices.clone(), paged_kv_last_page_len.clone()
        settings = (window_left, logits_soft_cap or 0.0)
        self._load(q_data_type, kv_data_type, o_data_type, (head_dim_qk, head_dim_vo), settings)
        self.info = self.module.plan(
            self.workspace,
            self.int_workspace,
            self._pin_memory_int_workspace_buffer,
            qo_indptr,
            paged_kv_indptr,
            seq_lens,
            int(qo_indptr[-1]),
            len(qo_indptr) - 1,
            num_qo_heads,
            num_kv_heads,
            page_size,
            False,
            head_dim_qk,
            head_dim_vo,
            causal,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
            0,
        )

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
    ) -> Any:
        assert sinks is None, "fa2 ignores sinks"
        if q.shape[0] != int(self.row_starts[-1]):
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1]")
        return self._run(q, paged_kv_cache, self.planned["causal"], locals())


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        use_tensor_cores: Any = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
    ) -> None:
        assert (kv_layout, use_cuda_graph, use_tensor_cores) == ("NHD", True, True), "not imitated"
        assert jit_args is None
        super().__init__(float_workspace_buffer, backend)
        self.num_seqs = len(paged_kv_last_page_len_buffer)
        if len(paged_kv_indptr_buffer) != self.num_seqs + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self.row_starts = torch.arange(self.num_seqs + 1, dtype=torch.int32)
        self.page_starts, self.pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last_page_lens = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim: Any,
        page_size: Any,
        pos_encoding_mode: Any = "NONE",
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        non_blocking: Any = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
        q_len_per_req: Any = 1,
    ) -> None:
        # A graph would launch programs that no plan has filled in (flashinfer issue 4002).
        assert not disable_split_kv
        self.planned = {name: value for name, value in locals().items() if name != "self"}
        if len(last_page_len) != self.num_seqs:
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self.pages):
            raise ValueError("The size of indices should be less than or equal to the buffer")
        self.page_starts.copy_(indptr)
        self.last_page_lens.copy_(last_page_len)
        self.pages[: len(indices)].copy_(indices)
        settings = (window_left, logits_soft_cap or 0.0)
        self._load(q_data_type, kv_data_type, o_data_type, (head_dim, head_dim), settings)
        self.info = self.module.plan(
            self.workspace,
            self.int_workspace,
            self._pin_memory_int_workspace_buffer,
            torch.arange(self.num_seqs + 1, dtype=torch.int32),
            indptr,
            seq_lens,
            self.num_seqs,
            self.num_seqs,
            num_qo_heads,
            num_kv_heads,
            page_size,
            True,
            head_dim,
            head_dim,
            False,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
            0,
        )

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        q_len_per_req: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        assert sinks is None, "fa2 ignores sinks"
        assert len(q) == self.num_seqs, "one row for each sequence was planned"
        return self._run(q, paged_kv_cache, False, locals())


_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}


def get_batch_prefill_uri(
    backend: Any,
    dtype_q: Any,
    dtype_kv: Any,
    dtype_o: Any,
    dtype_idx: Any,
    head_dim_qk: Any,
    head_dim_vo: Any,
    pos_encoding_mode: Any,
    use_sliding_window: Any,
    use_logits_soft_cap: Any,
    use_fp16_qk_reduction: Any,
) -> str:
    """The name of a module, as the library makes it."""
    assert dtype_idx == torch.int32
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{_NAMES[dtype_q]}_dtype_kv_{_NAMES[dtype_kv]}_"
        f"dtype_o_{_NAMES[dtype_o]}_dtype_idx_i32_head_dim_qk_{head_dim_qk}_"
        f"head_dim_vo_{head_dim_vo}_posenc_{pos_encoding_mode}_use_swa_{use_sliding_window}_"
        f"use_logits_cap_{use_logits_soft_cap}_f16qk_{use_fp16_qk_reduction}"
        + ("_sm90" if backend == "fa3" else "")
    )


def make_double(folder: Path) -> SimpleNamespace:
    """The module, with an empty folder for prebuilt modules and one for compiled ones."""

    def no_toolkit() -> str:
        raise RuntimeError("Could not find nvcc and default cuda_home doesn't exist")

    return SimpleNamespace(
        __version__=VERSION,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        jit=SimpleNamespace(
            get_batch_prefill_uri=get_batch_prefill_uri,
            env=SimpleNamespace(
                FLASHINFER_AOT_DIR=folder / "aot", FLASHINFER_JIT_DIR=folder / "cached_ops"
            ),
            cpp_ext=SimpleNamespace(get_cuda_path=no_toolkit),
        ),
    )
