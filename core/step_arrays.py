"""The arrays of one step, side by side in host memory that reaches the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor


class HostBuffer:
    """A reusable block of host memory that goes to the device in one copy.

    Arrays are carved out of it one after the other; 8-byte types must come first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._parts: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        self._used = 0
        self._uploaded: torch.cuda.Event | None = None

    def reset(self, num_bytes: int) -> None:
        """Start over with room for ``num_bytes``, once the last upload has read the memory."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        if self._memory.numel() < num_bytes:
            size = max(num_bytes, 2 * self._memory.numel())
            pinned = self._device.type == "cuda"
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._parts.clear()
        self._used = 0

    def carve(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The next part of the buffer, uninitialised."""
        size = dtype.itemsize * int(np.prod(shape))
        part = self._memory[self._used : self._used + size].view(dtype).view(shape)
        self._parts.append((self._used, size, dtype, shape))
        self._used += size
        return part

    def upload(self) -> list[Tensor]:
        """Device copies of all parts, in order; on a CPU the parts themselves."""
        memory = self._memory[: self._used].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._uploaded.record(torch.cuda.current_stream(self._device))
        return [
            memory[start : start + size].view(dtype).view(shape)
            for start, size, dtype, shape in self._parts
        ]


@dataclass(frozen=True)
class StepArrays:
    """The integers of a step of ``S`` sequences and ``T`` tokens, all on one device.

    Attributes:
        input_ids, positions, slot_mapping: ``[T]``, int64.
        sample_indices: rows whose logits are wanted, ``[R]``, int64.
        query_start_loc: ``[S + 1]``, int32.
        seq_lens: ``[S]``, int32.
        block_table: ``[S, table_width]``, int32.
        buffer: what they are parts of, in this order.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_indices: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    buffer: HostBuffer

    @staticmethod
    def carve(
        buffer: HostBuffer, *, num_seqs: int, num_tokens: int, num_sampled: int, table_width: int
    ) -> StepArrays:
        """Uninitialised arrays on the host, in place of the buffer's earlier ones."""
        long, short = torch.int64, torch.int32
        buffer.reset(
            8 * (3 * num_tokens + num_sampled) + 4 * (2 * num_seqs + 1 + num_seqs * table_width)
        )
        return StepArrays(
            input_ids=buffer.carve(long, num_tokens),
            positions=buffer.carve(long, num_tokens),
            slot_mapping=buffer.carve(long, num_tokens),
            sample_indices=buffer.carve(long, num_sampled),
            query_start_loc=buffer.carve(short, num_seqs + 1),
            seq_lens=buffer.carve(short, num_seqs),
            block_table=buffer.carve(short, num_seqs, table_width),
            buffer=buffer,
        )

    def fill_idle(self, count: int) -> None:
        """Make the last ``count`` sequences idle: a query row each, no token, no slot."""
        if not count:
            return
        for array in (self.input_ids, self.positions, self.seq_lens, self.block_table):
            array.numpy()[-count:] = 0
        self.slot_mapping.numpy()[-count:] = -1
        starts = self.query_start_loc.numpy()
        starts[-count:] = starts[-count - 1] + np.arange(1, count + 1)

    def upload(self) -> StepArrays:
        """The same arrays on the device, in one copy."""
        names = [field.name for field in fields(self) if field.name != "buffer"]
        parts = dict(zip(names, self.buffer.upload(), strict=True))
        return StepArrays(**parts, buffer=self.buffer)
