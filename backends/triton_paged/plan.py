"""Plans: the work lists of a batch on the device, in buffers that a captured CUDA graph keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.attention import AttentionBatch, AttentionPlan, AttentionSpec
from .planning import (
    DECODE_SIZE,
    PREFILL_SIZE,
    Geometry,
    Int32,
    WorkLists,
    build_work,
)


@dataclass
class TritonPlan(AttentionPlan):
    """A step's work lists; ``plan(into=...)`` replaces their contents.

    Attributes:
        buffer: everything that is copied to the device, int32; the next three are parts of it.
        prefill_items, decode_items: see ``WorkLists``, flat.
        table: the block table, ``[S, width]`` of the batch, flat, and what the kernels may read,
            not use, behind it.
        partial_out, partial_sums, arrivals: buffers of the decode kernel, shared by all plans of a
            backend.
        slot_rows: query rows times group size of a partial result.
        query_start_loc: first query row of each sequence, then their total, ``[S + 1]``.
        table_width: columns of the widest block table that fits.
        num_tokens: query rows that belong to a sequence.
        num_prefill_items, num_decode_items: entries of the lists.
        num_programs: of the decode kernel, for each key/value head.
        most_programs: what the list has room for.
    """

    buffer: Tensor
    prefill_items: Tensor
    decode_items: Tensor
    table: Tensor
    partial_out: Tensor
    partial_sums: Tensor
    arrivals: Tensor
    slot_rows: int
    query_start_loc: Int32
    table_width: int
    num_tokens: int
    num_prefill_items: int
    num_decode_items: int
    num_programs: int
    most_programs: int


class PlanMaker:
    """Makes plans and owns the buffers for partial results.

    Args:
        geometry: tiles and lengths.
        spec: the layer.
        device: where plans go.
    """

    def __init__(self, geometry: Geometry, spec: AttentionSpec, device: torch.device) -> None:
        self._geometry = geometry
        self._spec = spec
        self._device = device
        self._partial_out = torch.empty(0, dtype=torch.float32, device=device)
        self._partial_sums = torch.empty(0, dtype=torch.float32, device=device)
        self._arrivals = torch.empty(0, dtype=torch.int32, device=device)

    def make(self, batch: AttentionBatch, into: TritonPlan | None) -> TritonPlan:
        """A new plan, or ``into`` with the contents for this batch.

        Raises:
            ValueError: ``into`` was made for other query lengths or a narrower block table.
        """
        work = build_work(batch, self._geometry)
        plan = self._allocate(batch, work) if into is None else into
        starts = batch.query_start_loc_cpu.numpy()
        if not np.array_equal(starts, plan.query_start_loc):
            raise ValueError(
                f"into was planned for query_start_loc={plan.query_start_loc.tolist()}, not for "
                f"{starts.tolist()}: a captured graph has one number of query rows a sequence"
            )
        width = batch.block_table_cpu.shape[1]
        if width > plan.table_width:
            raise ValueError(
                f"into was planned for block tables of up to {plan.table_width} columns, not for "
                f"{width}: plan the batch that is captured with the widest table"
            )
        self._fill(plan, batch, work)
        return plan

    def _allocate(self, batch: AttentionBatch, work: WorkLists) -> TritonPlan:
        num_seqs, width = batch.block_table_cpu.shape
        geometry = self._geometry
        most_keys = width * geometry.block_size
        most_chunks = geometry.most_chunks(most_keys)
        stored = geometry.most_items(work.num_decoded, most_keys) if most_chunks > 1 else 0
        most_items = max(stored, work.num_decoded)
        programs = min(geometry.programs, most_items)
        # Programs without work need an item too.
        sizes = (
            len(work.prefill) * PREFILL_SIZE,
            (most_items + programs) * DECODE_SIZE,
            # A table without columns would be a null pointer, and kernels read past its end.
            num_seqs * width + geometry.table_overrun,
        )
        buffer = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        prefill, decode, table = torch.split(buffer, list(sizes))
        slot_rows = work.longest_decoded * geometry.group_size
        self._reserve(stored, slot_rows)
        return TritonPlan(
            buffer=buffer,
            prefill_items=prefill,
            decode_items=decode,
            table=table,
            partial_out=self._partial_out,
            partial_sums=self._partial_sums,
            arrivals=self._arrivals,
            slot_rows=slot_rows,
            query_start_loc=batch.query_start_loc_cpu.numpy().copy(),
            table_width=width,
            num_tokens=batch.num_tokens,
            num_prefill_items=len(work.prefill),
            num_decode_items=0,
            num_programs=0,
            most_programs=programs,
        )

    def _reserve(self, slots: int, slot_rows: int) -> None:
        """Grow the buffers for partial results; plans of earlier steps keep theirs."""
        slots = max(1, slots) * self._spec.num_kv_heads
        rows = max(1, slots * slot_rows)
        if self._partial_sums.numel() < 2 * rows:
            size = rows * self._spec.v_head_size
            self._partial_out = torch.empty(size, dtype=torch.float32, device=self._device)
            self._partial_sums = torch.empty(2 * rows, dtype=torch.float32, device=self._device)
        if self._arrivals.numel() < 2 * slots:
            self._arrivals = torch.zeros(2 * slots, dtype=torch.int32, device=self._device)

    def _fill(self, plan: TritonPlan, batch: AttentionBatch, work: WorkLists) -> None:
        """Write all lists and the table, in one copy to the device."""
        on_gpu = self._device.type == "cuda"
        host = plan.buffer
        if on_gpu:
            # The allocator of pinned memory gives a piece away again only after its copy.
            host = torch.empty(plan.buffer.shape, dtype=torch.int32, pin_memory=True)
        memory: Int32 = host.numpy()
        decode = _with_idle_programs(work, plan.most_programs)
        parts = (
            (work.prefill, plan.prefill_items),
            (decode, plan.decode_items),
            (batch.block_table_cpu.numpy(), plan.table),
        )
        place = 0
        for part, room in parts:
            memory[place : place + part.size].reshape(part.shape)[...] = part
            place += room.numel()
        if on_gpu:
            plan.buffer.copy_(host, non_blocking=True)
        plan.num_programs = work.programs
        plan.num_decode_items = len(work.decode)


def _with_idle_programs(work: WorkLists, programs: int) -> Int32:
    """Decode items, with ones of no rows for programs that a graph starts without need."""
    idle = programs - work.programs
    if idle <= 0:
        return work.decode
    items = np.zeros((len(work.decode) + idle, DECODE_SIZE), np.int32)
    items[: work.programs] = work.decode[: work.programs]
    items[programs:] = work.decode[work.programs :]
    items[work.programs : programs, 6] = -1
    items[work.programs : programs, 8] = 1
    following = items[:, 7]
    following[following > 0] += idle
    return items
