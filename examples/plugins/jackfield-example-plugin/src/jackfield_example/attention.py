"""An attention backend that loops over sequences: slow, and short enough to be read.

Symbols for shapes are those of ``jackfield.core.attention``; in this file also ``Q``, new tokens of
one sequence, ``L``, keys that at least one of them sees, and ``G``, query heads per key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jackfield import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    Capabilities,
    KVCache,
    UnsupportedError,
)

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class SequencePlan:
    """Where one sequence's query rows and keys are.

    Attributes:
        rows: its rows of the query and the output.
        blocks: physical block of each key, ``[L]``, int64.
        offsets: place of each key in its block, ``[L]``, int64.
        visible: which keys each row sees, ``[Q, L]``, bool.
    """

    rows: slice
    blocks: Tensor
    offsets: Tensor
    visible: Tensor


@dataclass(frozen=True)
class LoopPlan(AttentionPlan):
    """One entry for each sequence that has query rows."""

    sequences: tuple[SequencePlan, ...]


class LoopBackend(AttentionBackend):
    """Attention in float32, one sequence after the other."""

    name: ClassVar[str] = "example_loop"

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Causal attention, any window, any head size, on CPU and CUDA. Never taken by ``auto``.

        Safe from NaN in unseen slots, because only keys that some row sees are gathered.
        """
        return Capabilities(
            device_types=frozenset({"cpu", "cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            different_kv_dtype=True,
            sliding_window=True,
            nonfinite_safe=True,
        )

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> LoopPlan:
        starts = batch.query_start_loc_cpu.tolist()
        lengths = batch.seq_lens_cpu.tolist()
        return LoopPlan(
            tuple(
                self._plan_sequence(slice(starts[s], starts[s + 1]), length, table)
                for s, (length, table) in enumerate(
                    zip(lengths, batch.block_table_cpu, strict=True)
                )
                if starts[s + 1] > starts[s]
            )
        )

    def _plan_sequence(self, rows: slice, length: int, table: Tensor) -> SequencePlan:
        first_row = length - (rows.stop - rows.start)
        window = self.spec.sliding_window or length
        first_key = max(0, first_row - window + 1)
        positions = torch.arange(first_row, length)[:, None]  # [Q, 1]
        keys = torch.arange(first_key, length)  # [L]
        visible = (keys <= positions) & (keys > positions - window)
        block_size = self.cache_spec.block_size
        return SequencePlan(
            rows=rows,
            blocks=table[keys // block_size].long().to(self.device),
            offsets=(keys % block_size).to(self.device),
            visible=visible.to(self.device),
        )

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        stored = slot_mapping >= 0
        slots = slot_mapping[stored]
        block_size = self.cache_spec.block_size
        place = (slots // block_size, slots % block_size)
        cache.k[place] = key[stored].to(cache.k.dtype)
        cache.v[place] = value[stored].to(cache.v.dtype)

    def forward(
        self,
        query: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None or lse is not None:
            asked = "sinks" if sinks is not None else "lse"
            raise UnsupportedError(
                f"attention backend {self.name!r}", [f"{asked} is not supported"]
            )
        if not isinstance(plan, LoopPlan):
            raise TypeError(f"the plan is a {type(plan).__name__}, not one that plan() returned")
        for sequence in plan.sequences:
            place = (sequence.blocks, sequence.offsets)
            attended = self._attend(
                query[sequence.rows].float(),
                cache.k[place].float(),
                cache.v[place].float(),
                sequence.visible,
            )
            out[sequence.rows] = attended.to(out.dtype)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """``[Q, N, H]``, ``[L, K, H]``, ``[L, K, Hv]`` and ``[Q, L]`` to ``[Q, N, Hv]``."""
        num_rows, num_heads, head_size = query.shape
        num_kv_heads = key.shape[1]
        grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
        scores = torch.einsum("qkgh,lkh->kgql", grouped, key) * self.spec.scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("kgql,lkh->qkgh", weights, value)
        return attended.reshape(num_rows, num_heads, value.shape[-1])
