"""Sizing the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jackfield.core.attention import AttentionSpec
from jackfield.core.errors import CapacityError
from jackfield.core.memory import (
    StepLimits,
    _largest_steps,
    bytes_per_block,
    format_bytes,
    free_host_memory,
    free_in_control_group,
    gpu_kv_cache_bytes,
    host_kv_cache_bytes,
)

GIB = 2**30


def test_gpu_formula() -> None:
    """min(0.5 * 16, 16 - 6) - (4 + 1) GiB."""
    assert gpu_kv_cache_bytes(16 * GIB, 6 * GIB, 5 * GIB, 0.5) == 3 * GIB
    # What others use does not count against the share, but cannot be had either.
    assert gpu_kv_cache_bytes(16 * GIB, 10 * GIB, 5 * GIB, 0.9) == 1 * GIB


def test_gpu_without_room() -> None:
    with pytest.raises(CapacityError) as caught:
        gpu_kv_cache_bytes(16 * GIB, 6 * GIB, 9 * GIB, 0.5)
    message = str(caught.value)
    for part in ("gpu_memory_utilization=0.5", "16.00 GiB", "6.00 GiB", "8.00 GiB", "9.00 GiB"):
        assert part in message


@given(
    total=st.integers(1, 2**40),
    used=st.integers(0, 2**40),
    peak=st.integers(0, 2**40),
    share=st.floats(0.01, 1.0),
)
def test_gpu_size_is_never_negative(total: int, used: int, peak: int, share: float) -> None:
    try:
        size = gpu_kv_cache_bytes(total, used, peak, share)
    except CapacityError:
        assert min(int(total * share), total - used) <= peak
    else:
        assert 0 < size <= total - used - peak


def test_host_default() -> None:
    assert host_kv_cache_bytes(free_memory=8 * GIB, wanted=GIB) == GIB
    assert host_kv_cache_bytes(free_memory=8 * GIB, wanted=100 * GIB) == 2 * GIB
    assert 0 < free_host_memory() < 2**50


def test_control_group(tmp_path: Path) -> None:
    """File cache that the system would give back is free; no limit is no answer."""
    assert free_in_control_group(tmp_path) is None
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "900\n"),
        ("memory.stat", "anon 500\ninactive_file 300\n"),
    ):
        (tmp_path / name).write_text(text)
    assert free_in_control_group(tmp_path) == 400
    (tmp_path / "memory.current").write_text("2000")
    assert free_in_control_group(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max")
    assert free_in_control_group(tmp_path) is None


def test_bytes_per_block() -> None:
    spec = AttentionSpec(9, 3, 64, 64, 0.125, torch.float32)
    # 30 layers, 16 tokens, 3 heads, 64 elements of key and 64 of value, 4 bytes.
    assert bytes_per_block([spec] * 30, 16, torch.float32) == 30 * 16 * 3 * 128 * 4
    assert bytes_per_block([spec] * 30, 16, torch.bfloat16) == 30 * 16 * 3 * 128 * 2


def test_format_bytes() -> None:
    assert format_bytes(1.5 * GIB) == "1.50 GiB"
    assert format_bytes(100) == "100 B"
    assert format_bytes(2048) == "2.00 KiB"


@given(budget=st.integers(1, 5000), seqs=st.integers(1, 300), length=st.integers(1, 5000))
def test_profiled_steps_are_legal(budget: int, seqs: int, length: int) -> None:
    for query_lens in _largest_steps(StepLimits(budget, seqs, length)):
        assert 1 <= len(query_lens) <= seqs
        assert 1 <= sum(query_lens) <= budget
        assert all(1 <= query_len <= length for query_len in query_lens)
