"""The library's wrappers: objects that hold a plan, and its memory on the device.

A wrapper holds one plan. Several plans live at a time, so there is a wrapper for each; when a plan
is dropped, its wrapper serves the next one. Partial results lie in one workspace, which all plans
use in turn.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.attention import AttentionSpec, KVCacheSpec
from ._flashinfer_plan import Geometry, StepArrays, host_tensors

# Wrappers for other numbers of sequences than the latest ones are not kept for ever.
_MOST_IDLE_WRAPPERS = 64
# The private attribute of the library's wrappers that holds a plan on the host.
_PINNED_PLAN = "_pin_memory_int_workspace_buffer"


@dataclass(eq=False)
class HeldWrapper:
    """A wrapper with what it was made for.

    Attributes:
        wrapper: the library's object.
        workspace: for partial results.
        num_seqs: sequences of every plan in it; 0 if it takes plans of any number, and none that is
            captured.
        pages: where the blocks of all sequences stand: int32, on the device. None if the library
            keeps them itself.
        pinned: the library's own memory on the host, from which it copies each plan: uint8.
        copied: the event after which the library has copied its latest plan to the device; None on
            a CPU and before the first one.
    """

    wrapper: Any
    workspace: Tensor
    num_seqs: int
    pages: Tensor | None
    pinned: Tensor
    copied: Any = None

    def guard_pinned_plan(self) -> None:
        """Keep the memory of the plan, pinned, from being used anew while it is being copied.

        The library starts that copy behind torch's back: if the wrapper were dropped meanwhile,
        torch would give its memory to the next who wants some. A copy that torch knows of, of a
        byte and behind the other one, makes it wait for both.
        """
        self.workspace[:1].copy_(self.pinned[:1], non_blocking=True)


@dataclass(frozen=True)
class PlanSettings:
    """What a layer tells the library in every plan.

    Attributes:
        spec, cache: the layer.
        split: whether keys may be split where rows are prefilled.
        read_lengths: whether the library reads the length of each sequence; else it only takes the
            largest of them, and not fast.
    """

    spec: AttentionSpec
    cache: KVCacheSpec
    split: bool
    read_lengths: bool

    def layer(self) -> dict[str, Any]:
        """Arguments of ``plan`` for decode and prefill. The library takes float16 unless it is told
        the dtypes; the scale follows with each call, since it may be another one in every layer."""
        spec = self.spec
        return {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": self.cache.block_size,
            "sm_scale": 1.0,
            # The library does not count the row itself.
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.logits_soft_cap,
            "q_data_type": spec.dtype,
            "kv_data_type": self.cache.dtype,
            "o_data_type": spec.dtype,
        }

    def prefill(self) -> dict[str, Any]:
        """Arguments of the ``plan`` for prefill."""
        spec = self.spec
        return self.layer() | {
            "head_dim_qk": spec.head_size,
            "head_dim_vo": spec.v_head_size,
            "causal": spec.causal,
            "disable_split_kv": not self.split,
        }

    def decode(self) -> dict[str, Any]:
        """Arguments of the ``plan`` for decode."""
        return self.layer() | {"head_dim": self.spec.head_size}


class WrapperPool:
    """Makes wrappers, plans into them, and takes them back.

    Args:
        library: the module ``flashinfer``.
        settings: the layer.
        prefill_kernels: ``fa2`` or ``fa3``, for prefill; decode takes ``fa2``.
        device: where everything is.
    """

    def __init__(
        self, library: Any, settings: PlanSettings, prefill_kernels: str, device: torch.device
    ) -> None:
        self._library = library
        self._settings = settings
        self._prefill_kernels = prefill_kernels
        self._device = device
        self._geometry = Geometry.of(settings.spec, device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._idle: list[HeldWrapper] = []

    def prefill(self, arrays: StepArrays) -> HeldWrapper:
        """A wrapper with a plan for any batch."""
        held = self._take(0, 0, self._geometry.split_bytes(arrays))
        starts, page_starts, last_lens, pages, lengths = host_tensors(
            [
                arrays.query_start_loc,
                arrays.page_start_loc,
                arrays.last_page_lens,
                # An empty tensor has no address.
                arrays.pages if len(arrays.pages) else np.zeros(1, np.int32),
                self._lengths(arrays, self._settings.read_lengths),
            ],
            pinned=self._device.type == "cuda",
        )
        try:
            held.wrapper.plan(
                qo_indptr=starts,
                paged_kv_indptr=page_starts,
                paged_kv_indices=pages,
                paged_kv_last_page_len=last_lens,
                seq_lens=lengths,
                max_token_per_sequence=arrays.max_query_len,
                **self._settings.prefill(),
            )
        finally:  # it may fail when the copy has begun
            self._note_copy(held)
        return held

    def decode(self, arrays: StepArrays, table_width: int) -> HeldWrapper:
        """A wrapper with a plan for one query row of each sequence, which a graph can replay.

        Args:
            arrays: the step.
            table_width: columns of the widest block table that a later step may have.
        """
        num_seqs = arrays.num_seqs
        bytes_needed = self._geometry.captured_bytes(num_seqs)
        held = self._take(num_seqs, max(1, num_seqs * table_width), bytes_needed)
        self.decode_again(held, arrays)
        return held

    def decode_again(self, held: HeldWrapper, arrays: StepArrays) -> None:
        """Replace the plan of a wrapper for decode, in the same memory."""
        assert held.pages is not None
        self._await_copy(held)
        page_starts, last_lens, pages, lengths = host_tensors(
            [
                arrays.page_start_loc,
                arrays.last_page_lens,
                arrays.pages,
                self._lengths(arrays, False),
            ],
            pinned=self._device.type == "cuda",
        )
        # The library would wait for the device if it had to copy blocks from the host.
        placed = held.pages[: len(pages)]
        placed.copy_(pages, non_blocking=True)
        try:
            held.wrapper.plan(
                indptr=page_starts,
                indices=placed,
                last_page_len=last_lens,
                seq_lens=lengths,
                **self._settings.decode(),
            )
        finally:  # it may fail when the copy has begun
            self._note_copy(held)

    def return_with(self, plan: object, held: HeldWrapper) -> None:
        """Take a wrapper back when the plan that it serves is dropped."""
        weakref.finalize(plan, self._idle.append, held).atexit = False

    def _lengths(
        self, arrays: StepArrays, all_of_them: bool
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        # fa2 has no use for lengths, but the library looks for the largest in a Python loop.
        return arrays.seq_lens if all_of_them else np.array([arrays.max_seq_len], np.int32)

    def _take(self, num_seqs: int, num_pages: int, workspace_bytes: int) -> HeldWrapper:
        if self._workspace.numel() < workspace_bytes:
            # Plans of earlier steps keep theirs.
            self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self._device)
        # Plans are dropped at any time, even while this runs: no loop over the list itself.
        for held in tuple(self._idle):
            if held.workspace is not self._workspace:
                self._idle.remove(held)
                continue
            room = 0 if held.pages is None else held.pages.numel()
            if held.num_seqs == num_seqs and room >= num_pages:
                self._idle.remove(held)
                self._await_copy(held)
                return held
        while len(self._idle) > _MOST_IDLE_WRAPPERS:
            self._idle.pop(0)
        return self._make_decode(num_seqs, num_pages) if num_seqs else self._make_prefill()

    def _make_prefill(self) -> HeldWrapper:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, kv_layout="NHD", backend=self._prefill_kernels
        )
        return HeldWrapper(wrapper, self._workspace, 0, None, self._pinned_plan(wrapper))

    def _make_decode(self, num_seqs: int, num_pages: int) -> HeldWrapper:
        def numbers(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        pages = numbers(num_pages)
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            # The kernels without tensor cores lack group sizes such as 7, and are other modules.
            use_tensor_cores=True,
            paged_kv_indptr_buffer=numbers(num_seqs + 1),
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=numbers(num_seqs),
            backend="fa2",
        )
        # The library takes 8 MiB for a plan, here and on the device; there may be dozens of graphs.
        plan_bytes = self._geometry.captured_plan_bytes(num_seqs)
        own = torch.empty(plan_bytes, dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(self._workspace, own)
        pinned = self._pinned_plan(wrapper)
        return HeldWrapper(wrapper, self._workspace, num_seqs, pages, pinned)

    def _pinned_plan(self, wrapper: Any) -> Tensor:
        """Where the library writes a plan on the host; it has no public name for that."""
        pinned = getattr(wrapper, _PINNED_PLAN, None)
        if not isinstance(pinned, Tensor):
            raise RuntimeError(
                f"flashinfer {self._library.__version__} has no {_PINNED_PLAN} in its "
                f"{type(wrapper).__name__}, without which a plan cannot be kept until it is on "
                f"the device; install version 0.6.13, or set attention_backend to another one"
            )
        return pinned

    def _await_copy(self, held: HeldWrapper) -> None:
        """The library writes a plan where the copy of the one before may still be reading."""
        if held.copied is not None and not held.copied.query():
            held.copied.synchronize()

    def _note_copy(self, held: HeldWrapper) -> None:
        if self._device.type == "cuda":
            held.guard_pinned_plan()
            held.copied = torch.cuda.current_stream(self._device).record_event()
