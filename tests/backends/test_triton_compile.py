"""The kernels compile for a GPU, whether there is one or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "triton_offline.py"


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, because Triton interprets or compiles from its import on."""
    pytest.importorskip("triton.backends.nvidia", reason="Triton without its compiler for CUDA")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    names = result.stdout.splitlines()
    assert len(names) == len(set(names)) == 24
    assert {"block size 16 prefill", "block size 8 decode", "padded store"} <= set(names)
