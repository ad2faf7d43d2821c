"""What an engine is made of, for people and logs."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.memory import format_bytes


@dataclass(frozen=True)
class EngineDescription:
    """The parts of an engine and their sizes.

    Attributes:
        model: name of the model.
        num_parameters: of the model.
        device, dtype: where and in what it computes.
        kv_cache_dtype: of the KV cache.
        attention_backend, scheduler, scheduling_policy, block_manager: names of the parts.
        block_size: tokens per KV block.
        num_blocks: KV blocks.
        bytes_per_block: of one KV block in all layers.
        max_model_len: most tokens of a request.
        num_host_blocks: blocks of swap space.
        prefix_caching: whether computed blocks are kept for other requests.
    """

    model: str
    num_parameters: int
    device: str
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    scheduler: str
    scheduling_policy: str
    block_manager: str
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    num_host_blocks: int = 0
    prefix_caching: bool = False

    def summary(self) -> str:
        """One line."""
        size = format_bytes(self.num_blocks * self.bytes_per_block)
        if self.kv_cache_dtype != self.dtype:
            size += f" of {self.kv_cache_dtype}"
        more = ", prefix caching" * self.prefix_caching
        if self.num_host_blocks:
            more += f", swap space for {self.num_host_blocks} blocks"
        return (
            f"{self.model}: {self.num_parameters / 1e6:.0f}M parameters, {self.dtype} on "
            f"{self.device}; attention {self.attention_backend}, scheduler {self.scheduler} "
            f"({self.scheduling_policy}), block manager {self.block_manager}, "
            f"{self.num_blocks} KV blocks of {self.block_size} tokens ({size}){more}"
        )
