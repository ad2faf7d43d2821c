"""Where the keys of a batch lie, one sequence after the other, for operators without paging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._batch_parts import BatchPart, Int32, Int64


@dataclass(frozen=True)
class PackedKeys:
    """The keys that some row sees, sequence by sequence, oldest first; on the host.

    Attributes:
        slots: cache slot of each key, int64.
        key_lens: keys of each sequence: ``[S]``, int32. Its last key is its newest token, so that
            causality and windows, aligned to the end, mean what they meant.
        key_start_loc: first key of each sequence, then the total: ``[S + 1]``, int32.
    """

    slots: Int64
    key_lens: Int32
    key_start_loc: Int32

    @property
    def max_key_len(self) -> int:
        """The largest number of keys of a sequence; 0 if there are none."""
        return int(self.key_lens.max(initial=0))


def pack_keys(part: BatchPart, block_size: int, sliding_window: int | None) -> PackedKeys:
    """The keys that rows of a part see.

    With a window, those before the window of a sequence's first row are left out.

    Args:
        part: some sequences of a batch.
        block_size: ``B``.
        sliding_window: as in ``AttentionSpec``.
    """
    seq_lens = part.seq_lens.astype(np.int64)
    first_keys = np.zeros_like(seq_lens)
    if sliding_window is not None:
        first_keys = np.maximum(seq_lens - part.query_lens - sliding_window + 1, 0)
    key_lens = seq_lens - first_keys
    key_start_loc = np.zeros(len(key_lens) + 1, np.int32)
    np.cumsum(key_lens, out=key_start_loc[1:])
    positions = np.arange(key_start_loc[-1]) + np.repeat(first_keys - key_start_loc[:-1], key_lens)
    sequences = np.repeat(np.arange(len(key_lens)), key_lens)
    blocks = part.block_table[sequences, positions // block_size].astype(np.int64)
    return PackedKeys(
        slots=blocks * block_size + positions % block_size,
        key_lens=key_lens.astype(np.int32),
        key_start_loc=key_start_loc,
    )
