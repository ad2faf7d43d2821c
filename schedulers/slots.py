"""How many tokens a request can write into the blocks that it was given."""

from __future__ import annotations

from ..core.block_manager import BlockManagerConfig


def writable_tokens(config: BlockManagerConfig, num_tokens: int) -> int:
    """Most tokens, all together, that need no more blocks once ``num_tokens`` have theirs.

    Lookahead slots do not count: whoever writes one token more needs one more of them.
    """
    slots = config.blocks_for(num_tokens) * config.block_size
    return slots if slots >= config.max_model_len else slots - config.num_lookahead_tokens
