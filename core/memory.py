"""How many KV blocks there is memory for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from .attention import AttentionBatch, AttentionSpec
from .batch import StepInputs
from .errors import CapacityError
from .layer_attention import LayerAttention, kv_cache_spec
from .model import Model
from .model_runner import ModelRunner
from .sampler import SamplingBatch

_GIB = 2**30
#: Share of the free host memory that the KV cache takes by default.
_HOST_SHARE = 0.25


def format_bytes(count: float) -> str:
    """``1.50 GiB`` for 1610612736."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers together."""
    return sum(kv_cache_spec(spec, 1, block_size, dtype).bytes_per_block for spec in specs)


def free_host_memory() -> int:
    """Bytes that can be had on this host, within the limit of a container (control groups v2)."""
    free = int(psutil.virtual_memory().available)
    in_group = free_in_control_group(Path("/sys/fs/cgroup"))
    return free if in_group is None else min(free, in_group)


def free_in_control_group(folder: Path) -> int | None:
    """Bytes left to the control group (v2) of this folder, file cache that the system would give
    back counted as free; None if it has no limit."""
    files = [folder / name for name in ("memory.max", "memory.current", "memory.stat")]
    if not all(file.is_file() for file in files):
        return None
    limit, current, stat = (file.read_text().strip() for file in files)
    if limit == "max":
        return None
    counts = dict(line.split() for line in stat.splitlines())
    in_use = int(current) - int(counts.get("inactive_file", 0))
    return max(0, int(limit) - in_use)


def host_kv_cache_bytes(free_memory: int, wanted: int) -> int:
    """The default size of a KV cache in host memory: what is wanted, at most a quarter of what is
    free."""
    return min(wanted, int(free_memory * _HOST_SHARE))


def gpu_kv_cache_bytes(
    total: int, used_by_others: int, peak_of_ours: int, utilization: float
) -> int:
    """What is left for the KV cache of ``min(utilization * total, total - used_by_others)``.

    Args:
        total: the device's memory, bytes.
        used_by_others: in use before this engine allocated anything, bytes. It does not count
            against the allowance.
        peak_of_ours: weights, activations and library workspaces at their peak, bytes.
        utilization: ``gpu_memory_utilization``.

    Raises:
        CapacityError: nothing is left.
    """
    allowance = min(int(total * utilization), total - used_by_others)
    left = allowance - peak_of_ours
    if left <= 0:
        raise CapacityError(
            f"no memory is left for the KV cache: gpu_memory_utilization={utilization} of "
            f"{total / _GIB:.2f} GiB, with {used_by_others / _GIB:.2f} GiB used by others, allows "
            f"{allowance / _GIB:.2f} GiB, and weights and activations take "
            f"{peak_of_ours / _GIB:.2f} GiB; raise gpu_memory_utilization, or lower "
            f"max_num_batched_tokens or max_num_seqs"
        )
    return left


@dataclass(frozen=True)
class DeviceMemory:
    """A look at a CUDA device's memory.

    Attributes:
        total: bytes of the device.
        used: bytes in use by anybody.
        reserved: of these, bytes that torch holds in this process.
    """

    total: int
    used: int
    reserved: int

    @staticmethod
    def now(device: torch.device) -> DeviceMemory:
        """Take the look, after giving cached memory back to the device."""
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, total - free, torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class StepLimits:
    """The largest step: ``max_num_batched_tokens`` new tokens, ``max_num_seqs`` requests, each
    with up to ``max_model_len`` tokens."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def measure_peak(
    model: Model,
    bind: Callable[[int], Sequence[LayerAttention]],
    block_size: int,
    limits: StepLimits,
    device: torch.device,
    before: DeviceMemory,
) -> int:
    """Bytes that weights and the largest steps need on a CUDA device, found by running them.

    The steps run on a cache of one block, which every block table names over and over: their
    results mean nothing, but they read and allocate as much as real ones.

    Args:
        model: with its weights on the device.
        bind: layers on a cache of the given number of blocks.
        block_size: tokens per block.
        limits: what the largest step is.
        device: a CUDA device.
        before: its memory before the engine allocated anything.
    """
    runner = ModelRunner(model, bind(1))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for query_lens in _largest_steps(limits):
        runner.execute(_dummy_inputs(query_lens, block_size, limits.max_model_len, device))
    torch.cuda.synchronize(device)
    peak_reserved = torch.cuda.max_memory_reserved(device)
    del runner
    after = DeviceMemory.now(device)
    outside_torch = (after.used - after.reserved) - (before.used - before.reserved)
    return peak_reserved - before.reserved + max(0, outside_torch)


def _largest_steps(limits: StepLimits) -> list[list[int]]:
    """Query lengths of: few long prefills, decodes beside a prefill, and decodes alone."""
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len
    full, rest = divmod(budget, longest)
    prefills = ([longest] * full + [rest] * (rest > 0))[: limits.max_num_seqs]
    decodes = [1] * min(limits.max_num_seqs, budget)
    chunk = min(budget - len(decodes) + 1, longest)
    return [prefills, [*decodes[1:], chunk], decodes]


def _dummy_inputs(
    query_lens: list[int], block_size: int, max_model_len: int, device: torch.device
) -> StepInputs:
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32)
    attention = AttentionBatch.from_host(
        query_start_loc=starts,
        seq_lens=torch.full((num_seqs,), max_model_len, dtype=torch.int32),
        block_table=torch.zeros(num_seqs, -(-max_model_len // block_size), dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        device=device,
    )
    ones, zeros = np.ones(num_seqs, np.float32), np.zeros(num_seqs, np.int64)
    # Nucleus sampling sorts the vocabulary: the sampler's largest need.
    sampling = SamplingBatch.from_host(
        temperature=ones,
        top_k=zeros,
        top_p=ones * 0.9,
        min_p=ones * 0.1,
        seeds=zeros.astype(np.uint64),
        positions=zeros,
        device=device,
    )
    return StepInputs(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        attention=attention,
        sample_indices=(starts[1:].to(torch.int64) - 1).to(device),
        sampling=sampling,
        sampled_ids=("",) * num_seqs,
        sampled_rows=zeros,
        sampled_positions=zeros,
    )
