"""A failing case as one Python file that needs torch and nothing else."""

from __future__ import annotations

import inspect
import re
import textwrap
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from ...core.attention import dtype_name
from .cases import AttentionCase
from .laws import Law
from .reproducer_record import record_violation
from .reproducer_text import assemble
from .subject import LawViolation, Subject

_HOW_TO_USE = """\
Run this file with Python 3.10 or later and torch; nothing else is needed. It makes the inputs from
the parameters below, computes in float64 what is right, and compares that with what the backend
computed, which is recorded in this file. To try a kernel of your own, call it in the function
kernel(): what that returns is compared instead. The exit status is 1 if the fault shows, else 0."""

#: Columns of the text.
_WIDTH = 98


def write_reproducer(
    path: Path, law: Law, subject: Subject, case: AttentionCase, violation: LawViolation
) -> None:
    """Write a Python file that shows a failure without Jackfield.

    Where the violation does not hold all that was computed (the first of two runs, or a cache that
    was written to), the backend is run again.

    Args:
        path: the file.
        law: what was violated.
        subject: the backend, and where it ran.
        case: the smallest failing case.
        violation: what ``law.check`` raised for it.
    """
    record = record_violation(law, subject, case, violation)
    case_text = _case_text(record.source.case)
    texts = {
        "Law": f"{law.name}: {law.title()}",
        "Backend": _backend_text(subject),
        "Seen": str(violation),
        "Case": "; ".join(case_text.splitlines()),
    }
    head = _head(law, texts, case_text)
    text = assemble(head, record.source, record.form, record.assignments(), texts)
    path.write_text(text, encoding="utf-8")


def reproducer_name(law: Law, backend_name: str, dtype: torch.dtype, case: AttentionCase) -> str:
    """Name of a reproducer's file: the same for the same case, safe on every file system."""
    words = "_".join([backend_name, law.name, dtype_name(dtype)])
    return f"{re.sub(r'[^A-Za-z0-9_]+', '_', words)}_{zlib.crc32(repr(case).encode()):08x}.py"


def _head(law: Law, texts: Mapping[str, str], case: str) -> str:
    """The docstring of the file."""
    paragraphs = [
        f"An attention backend breaks the law {law.name}.",
        _filled(f"Backend: {texts['Backend']}"),
        "Law:\n" + textwrap.indent(inspect.getdoc(law) or law.name, "    "),
        _filled(f"Seen: {texts['Seen']}"),
        "Case:\n" + "\n".join(_filled(line, "    ") for line in case.splitlines()),
        _HOW_TO_USE,
        "Found by the conformance suite of Jackfield.",
    ]
    return "\n\n".join(paragraphs)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False
    )


def _backend_text(subject: Subject) -> str:
    """Name, class, versions, options and device."""
    backend = subject.backend
    package = backend.__module__.partition(".")[0]
    distributions = metadata.packages_distributions().get(package, [])
    versions = [f"{name} {metadata.version(name)}" for name in dict.fromkeys(distributions)]
    device = str(subject.device)
    if subject.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(subject.device)}, CUDA {torch.version.cuda})"
    options = [f"options {subject.options!r}"] if subject.options is not None else []
    return ", ".join(
        [
            f"{backend.name} ({backend.__module__}.{backend.__qualname__})",
            *versions,
            f"torch {torch.__version__}",
            *options,
            f"device {device}",
        ]
    )


def _case_text(case: AttentionCase) -> str:
    """The case in words; slopes of many heads are left to the parameters."""
    return re.sub(r"alibi_slopes \([^)]{80,}\)", "alibi_slopes", str(case))
