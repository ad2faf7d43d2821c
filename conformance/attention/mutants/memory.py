"""What several mutants share: reading memory that is not theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.attention import AttentionBatch
from ..plain_backend import PlainBackend, PlannedSequence


def end_of_last_block(sequence: PlannedSequence, block_size: int) -> int:
    """Number of slots in a sequence's blocks."""
    return -(-sequence.num_tokens // block_size) * block_size


class AnyMemory(PlainBackend):
    """Reads past the end do not fail, as on a device: block ids that no cache has point somewhere
    into it, and columns that no block table has read its last one."""

    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        """As in ``PlainBackend``, for any number of tokens."""
        width = batch.block_table_cpu.shape[1]
        columns = torch.arange(-(-num_tokens // self.cache_spec.block_size)).clamp(max=width - 1)
        ids = batch.block_table_cpu[index, columns].long() % self.cache_spec.num_blocks
        return ids.to(self.device)
