"""Batch assembly: from a step plan to the tensors that the model and the backends read.

Each admitted request has a row in arrays that outlive the step (its tokens, its block table, its
sampling settings), so that a step is assembled by a handful of numpy operations, whatever the
number of requests, and reaches the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import AttentionBatch
from .block_manager import BlockManager
from .request import Request
from .sampler import SamplingBatch
from .scheduler import MoveKind, StepPlan
from .step_arrays import HostBuffer, StepArrays

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """What one step computes on.

    Attributes:
        input_ids: ``[T]``, int64, device.
        positions: ``[T]``, int64, device.
        attention: lengths and places of the step.
        sample_indices: rows of the hidden states whose logits are wanted, ``[R]``, int64, device.
        sampling: settings of those rows; None if no row samples.
        sampled_ids: the requests of those rows.
        sampled_rows: their rows in the assembler, ``[R]``, int64, numpy.
        sampled_positions: where their new tokens go in the sequence, ``[R]``, int64, numpy.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    sample_indices: Tensor
    sampling: SamplingBatch | None
    sampled_ids: tuple[str, ...]
    sampled_rows: Int64
    sampled_positions: Int64


class BatchAssembler:
    """Keeps the rows of the admitted requests and assembles steps from them.

    Args:
        max_num_seqs: rows.
        max_model_len: most tokens of a row.
        block_size: tokens per block.
        device: where the step runs.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        max_blocks = -(-max_model_len // block_size)
        self._tokens: Int32 = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._block_table: Int32 = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks: Int64 = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens: Int64 = np.zeros(max_num_seqs, np.int64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k: Int64 = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        # Two buffers in turn: a copy to the device may still be under way when the next step is
        # assembled.
        self._buffers = (HostBuffer(device), HostBuffer(device))

    def release(self, request_id: str) -> None:
        """Give a row back when its request has ended or lost its blocks."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)

    def record(self, inputs: StepInputs, tokens: Sequence[int]) -> None:
        """Append each sampling request's new token to its row.

        Args:
            inputs: the step, as ``assemble`` returned it.
            tokens: in the order of ``inputs.sampled_ids``.
        """
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        inside = positions < self._tokens.shape[1]  # a token past the model length ends its request
        self._tokens[rows[inside], positions[inside]] = np.asarray(tokens, np.int32)[inside]

    def assemble(
        self,
        plan: StepPlan,
        find_request: Callable[[str], Request | None],
        block_manager: BlockManager,
        padded_size: Callable[[int], int] = lambda num_seqs: num_seqs,
    ) -> StepInputs:
        """Tensors of a step. Rows of preempted requests must have been released before.

        Args:
            plan: what to compute, at least one token.
            find_request: looks a live request up by id.
            block_manager: read for block tables.
            padded_size: how many sequences a step of so many, one token each, is padded to: with
                idle ones, which have a query row, no token and no slot.
        """
        scheduled = plan.scheduled
        rows = np.array(
            [self._row_of(item.request_id, find_request) for item in scheduled], np.int64
        )
        computed = np.array([item.num_computed_tokens for item in scheduled], np.int64)
        query_lens = np.array([item.num_new_tokens for item in scheduled], np.int64)
        seq_lens = computed + query_lens
        self._refresh_block_tables(plan, rows, seq_lens, block_manager)
        samples = np.array([item.samples for item in scheduled], bool)

        num_seqs, num_tokens = len(scheduled), int(query_lens.sum())
        max_query_len, max_seq_len = int(query_lens.max()), int(seq_lens.max())
        num_idle = padded_size(num_seqs) - num_seqs if max_query_len == 1 else 0
        host = StepArrays.carve(
            self._next_buffer(),
            num_seqs=num_seqs + num_idle,
            num_tokens=num_tokens + num_idle,
            num_sampled=int(samples.sum()),
            table_width=max(1, -(-max_seq_len // self._block_size)),
        )
        self._fill(host, rows, query_lens, seq_lens)
        unwritten = [index for index, item in enumerate(scheduled) if not item.writes]
        for index in unwritten:
            end = int(query_lens[: index + 1].sum())
            host.slot_mapping.numpy()[end - query_lens[index] : end] = -1
        host.sample_indices.numpy()[:] = np.cumsum(query_lens)[samples] - 1
        host.fill_idle(num_idle)
        device = host.upload()
        attention = AttentionBatch(
            query_start_loc=device.query_start_loc,
            seq_lens=device.seq_lens,
            block_table=device.block_table,
            slot_mapping=device.slot_mapping,
            query_start_loc_cpu=host.query_start_loc,
            seq_lens_cpu=host.seq_lens,
            block_table_cpu=host.block_table,
            slot_mapping_cpu=host.slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return StepInputs(
            input_ids=device.input_ids,
            positions=device.positions,
            attention=attention,
            sample_indices=device.sample_indices,
            sampling=self._sampling(rows[samples], seq_lens[samples]),
            sampled_ids=tuple(item.request_id for item in scheduled if item.samples),
            sampled_rows=rows[samples],
            sampled_positions=seq_lens[samples],
        )

    def _fill(self, host: StepArrays, rows: Int64, query_lens: Int64, seq_lens: Int64) -> None:
        """Write what follows from the lengths of the scheduled sequences and from their rows."""
        num_seqs, num_tokens = len(rows), int(query_lens.sum())
        ends = np.cumsum(query_lens)
        host.query_start_loc.numpy()[0] = 0
        host.query_start_loc.numpy()[1 : num_seqs + 1] = ends
        host.seq_lens.numpy()[:num_seqs] = seq_lens
        host.block_table.numpy()[:num_seqs] = self._block_table[rows, : host.block_table.shape[1]]
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(num_tokens) + np.repeat(seq_lens - ends, query_lens)
        host.positions.numpy()[:num_tokens] = positions
        host.input_ids.numpy()[:num_tokens] = self._tokens[token_rows, positions]
        blocks = self._block_table[token_rows, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        host.slot_mapping.numpy()[:num_tokens] = slots

    def _next_buffer(self) -> HostBuffer:
        self._buffers = self._buffers[::-1]
        return self._buffers[0]

    def _row_of(self, request_id: str, find_request: Callable[[str], Request | None]) -> int:
        row = self._rows.get(request_id)
        if row is not None:
            return row
        request = find_request(request_id)
        if request is None:
            raise RuntimeError(f"the scheduler planned {request_id!r}, which is no live request")
        if not self._free_rows:
            raise RuntimeError(
                f"the scheduler admitted more than max_num_seqs={len(self._rows)} requests"
            )
        row = self._free_rows.pop()
        self._rows[request_id] = row
        tokens = request.token_ids
        self._tokens[row, : len(tokens)] = tokens
        self._num_blocks[row] = 0
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        params = request.params
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = request.seed
        return row

    def _refresh_block_tables(
        self, plan: StepPlan, rows: Int64, seq_lens: Int64, block_manager: BlockManager
    ) -> None:
        """Fetch the tables that grew; all of them after a copy, which may have moved blocks."""
        needed = -(-seq_lens // self._block_size)
        moved = any(move.kind is MoveKind.COPY for move in plan.moves)
        stale = np.ones(len(rows), bool) if moved else needed > self._num_blocks[rows]
        for index in np.flatnonzero(stale):
            table = block_manager.block_table(plan.scheduled[index].request_id)
            row = rows[index]
            if len(table) < needed[index]:
                raise RuntimeError(
                    f"block manager {block_manager.name!r} gave {len(table)} blocks for "
                    f"{seq_lens[index]} tokens; {needed[index]} are needed"
                )
            count = min(len(table), self._block_table.shape[1])
            self._block_table[row, :count] = table[:count]
            self._num_blocks[row] = count

    def _sampling(self, rows: Int64, seq_lens: Int64) -> SamplingBatch | None:
        if not len(rows):
            return None
        return SamplingBatch.from_host(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seed[rows],
            positions=seq_lens - self._num_prompt_tokens[rows],
            device=self._device,
        )
