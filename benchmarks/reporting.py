"""What the results of the benchmarks have in common: where and how they were made."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import jackfield


def provenance() -> dict[str, Any]:
    """The command, the machine and the versions, for the head of a result file."""
    return {
        "command": "python " + " ".join(sys.argv),
        "machine": {
            "device": f"cpu, {torch.backends.cpu.get_cpu_capability()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "jackfield": jackfield.__version__,
        },
    }


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write ``provenance`` and the report as JSON; None writes nothing."""
    if path is not None:
        text = json.dumps({**provenance(), **report}, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
