"""Judges an attention backend for a CUDA device that is not on this machine.

Where a library is not installed, or there is no GPU, the reasons that have to do with the model are
not among those of this machine. They follow from what the backend declares for such a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.attention import AttentionBackend, AttentionSpec, dtype_name
from ..core.capabilities import Capabilities, as_if_present
from .registry import PartEntry
from .selection import layer_reasons

_CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Elsewhere:
    """A backend that this machine cannot run, judged for a CUDA device.

    Attributes:
        device: ``cuda``.
        dtypes: of the attention layers there.
        usable: whether it would serve the model on a device of the needed compute capability, with
            nothing missing.
        compute_capability: the smallest that it needs, such as ``8.0``; None if any will do.
        block_size: the one asked for, or the one that it prefers there; in tokens.
        missing: what it lacks on this machine; None if nothing.
        reasons: why it would not serve the model; empty if it would.
        note: what could not be asked here; empty if nothing.
    """

    device: str
    dtypes: tuple[str, ...]
    usable: bool
    compute_capability: str | None
    block_size: int
    missing: str | None
    reasons: tuple[str, ...]
    note: str

    def lines(self) -> tuple[str, ...]:
        """The verdict in words: one line, or one for each reason against it."""
        if not self.usable:
            return tuple(f"on CUDA: {reason}" for reason in self.reasons)
        words = [f"on CUDA: usable in {', '.join(self.dtypes)}"]
        if self.compute_capability is not None:
            words.append(f" from compute capability {self.compute_capability}")
        words.append(f", with block_size={self.block_size}")
        if self.missing is not None:
            words.append(", once nothing is missing")
        notes = (f"on CUDA: {self.note}",) if self.note else ()
        return ("".join(words), *notes)


def is_out_of_place(entry: PartEntry, device: torch.device) -> bool:
    """Whether it is this machine that a backend does not run on: its device, or what is missing."""
    try:
        can: Capabilities = entry.load().capabilities(device)
        return can.missing is not None or device.type not in can.device_types
    except Exception:  # then it is the backend that is broken, and its verdict says so
        return False


def judge_on_cuda(
    entry: PartEntry,
    specs: Sequence[AttentionSpec],
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Elsewhere | None:
    """What a backend would say of a model on a CUDA device with nothing missing.

    The device's compute capability is taken for sufficient, unless there is such a device here.

    Args:
        entry: the backend.
        specs: the specs of the model's layers, with the dtype that they would have there.
        block_size: in tokens; None takes what the backend prefers there.
        kv_dtype: of the cache; None is each spec's own dtype.

    Returns:
        None if the backend cannot be loaded; one that raises is not usable, for that reason.
    """
    try:
        cls: type[AttentionBackend] = entry.load()
    except Exception:  # a part that cannot be loaded has a verdict of its own
        return None
    dtypes = tuple(sorted({dtype_name(spec.dtype) for spec in specs}))
    try:
        can = cls.capabilities(_CUDA)
        needed = can.compute_capability
        capability = None if needed is None else ".".join(map(str, needed))
        size = can.preferred_block_size if block_size is None else block_size
        reasons, note = _judge(cls, can, specs, size, kv_dtype)
        missing = can.missing
    except Exception as error:
        reason = f"it cannot be judged: {in_short(error)}"
        return Elsewhere(_CUDA.type, dtypes, False, None, 0, None, (reason,), "")
    return Elsewhere(
        device=_CUDA.type,
        dtypes=dtypes,
        usable=not reasons,
        compute_capability=capability,
        block_size=size,
        missing=missing,
        reasons=reasons,
        note=note,
    )


def in_short(error: Exception) -> str:
    """An exception in one line: its type and its text."""
    return f"{type(error).__name__}: {error}"


def _judge(
    cls: type[AttentionBackend],
    can: Capabilities,
    specs: Sequence[AttentionSpec],
    block_size: int,
    kv_dtype: torch.dtype | None,
) -> tuple[tuple[str, ...], str]:
    """The reasons against a backend, and what could not be asked.

    Raises:
        Exception: whatever the backend's own check raises, unless something is missing here.
    """
    with as_if_present():
        try:
            return layer_reasons(cls.unsupported, specs, _CUDA, block_size, kv_dtype), ""
        except Exception as error:
            if can.missing is None and not isinstance(error, ImportError):
                raise
            note = (
                "judged by its capabilities alone: its own check needs what is missing "
                f"({in_short(error)})"
            )
        return layer_reasons(can.unsupported, specs, _CUDA, block_size, kv_dtype), note
