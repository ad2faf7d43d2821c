"""Judges an attention backend for a CUDA device that is not on this machine.

Where a library is not installed, or there is no GPU, the reasons that have to do with the model are
not among those of this machine. They follow from what the backend declares for such a device.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ..core.attention import AttentionBackend, AttentionSpec, KVCacheSpec, dtype_name
from ..core.capabilities import Capabilities
from .registry import PartEntry
from .selection import Candidate, judge

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
    can: Capabilities = entry.load().capabilities(device)
    return can.missing is not None or device.type not in can.device_types


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
        None if the backend cannot be loaded, or does not say what it can do on CUDA.
    """
    try:
        cls: type[AttentionBackend] = entry.load()
        can = cls.capabilities(_CUDA)
    except Exception:  # a broken backend has a verdict of its own, with the reason
        return None
    needed = can.compute_capability
    changes = {"missing": None}
    if not torch.cuda.is_available():
        changes["compute_capability"] = None
    assumed = _assuming(cls, changes)
    found, note = _judge(assumed, entry, specs, block_size, kv_dtype), ""
    if found.broken:
        note = "judged by its capabilities alone: its own check needs what is missing"
        found = _judge(_without_own_check(assumed), entry, specs, block_size, kv_dtype)
    return Elsewhere(
        device=_CUDA.type,
        dtypes=tuple(sorted({dtype_name(spec.dtype) for spec in specs})),
        usable=found.usable,
        compute_capability=None if needed is None else ".".join(map(str, needed)),
        block_size=found.block_size,
        missing=can.missing,
        reasons=found.reasons,
        note=note,
    )


def _judge(
    cls: type[AttentionBackend],
    entry: PartEntry,
    specs: Sequence[AttentionSpec],
    block_size: int | None,
    kv_dtype: torch.dtype | None,
) -> Candidate:
    return judge(replace(entry, target=cls), specs, _CUDA, block_size, kv_dtype)


def _assuming(cls: type[AttentionBackend], changes: dict[str, Any]) -> type[AttentionBackend]:
    """The backend, with other capabilities, which its own ``unsupported`` then goes by."""

    def capabilities(_: type[AttentionBackend], device: torch.device) -> Capabilities:
        return replace(cls.capabilities(device), **changes)

    return _subclass(cls, "capabilities", capabilities)


def _without_own_check(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend, refusing only what its capabilities do not have."""

    def unsupported(
        made: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
    ) -> list[str]:
        return made.capabilities(device).unsupported(spec, cache, device)

    return _subclass(cls, "unsupported", unsupported)


def _subclass(cls: type[AttentionBackend], name: str, function: Any) -> type[AttentionBackend]:
    made = types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update({name: classmethod(function)})
    )
    return cast(type[AttentionBackend], made)
