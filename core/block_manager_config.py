"""What every block manager is built from, and the arithmetic of blocks and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class BlockManagerConfig:
    """What every block manager is built from.

    Attributes:
        num_blocks: physical blocks, ids 0 to num_blocks - 1.
        block_size: tokens a block holds.
        max_model_len: most tokens that one request can ever have.
        watermark: share of the blocks that admissions leave available, so that running requests
            can grow; running requests may use them. At least 0 and below 1.
        num_host_blocks: blocks of swap space in host memory.
        enable_prefix_caching: share computed blocks between requests with a common prefix.
        num_lookahead_tokens: slots reserved beyond what is asked for (speculative decoding writes
            there), but never past ``max_model_len``.

    Raises:
        ConfigError: a number is out of its range.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    watermark: float = 0.01
    num_host_blocks: int = 0
    enable_prefix_caching: bool = False
    num_lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        for setting in ("num_blocks", "block_size", "max_model_len"):
            if getattr(self, setting) < 1:
                raise ConfigError(f"{setting}={getattr(self, setting)} must be at least 1")
        for setting in ("num_host_blocks", "num_lookahead_tokens"):
            if getattr(self, setting) < 0:
                raise ConfigError(f"{setting}={getattr(self, setting)} must be at least 0")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark} must be at least 0 and below 1")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request with ``num_tokens`` tokens needs, lookahead included."""
        ahead = min(num_tokens + self.num_lookahead_tokens, self.max_model_len)
        return -(-max(num_tokens, ahead) // self.block_size)

    def writable_tokens(self, num_tokens: int) -> int:
        """Most tokens, all together, that need no more blocks once ``num_tokens`` have theirs.

        Lookahead slots do not count: whoever writes one token more needs one more of them.
        """
        slots = self.blocks_for(num_tokens) * self.block_size
        return slots if slots >= self.max_model_len else slots - self.num_lookahead_tokens

    @property
    def watermark_blocks(self) -> int:
        """The watermark as a number of blocks, rounded down."""
        return int(self.watermark * self.num_blocks)
