"""Who is timed: backends by name, with options of their own, or all that are registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.attention import AttentionBackend, KVCacheSpec
from ...core.errors import PluginError
from ...core.options import PartOptions
from ...plugins.discovery import discover
from ...plugins.registry import PartKind
from ...plugins.selection import validate_options
from ..cli_conformance import find_backend, parse_backend_options
from .cases import BenchCase
from .data import Layer

KIND = PartKind.ATTENTION_BACKEND


@dataclass(frozen=True)
class Contestant:
    """A backend with its options.

    Attributes:
        label: its name; with options, what was typed.
        backend: the class.
        options: for the constructor.
    """

    label: str
    backend: type[AttentionBackend]
    options: PartOptions

    def block_size(self, asked: int | None, device: torch.device) -> int:
        """The block size that was asked for, else the one that ``auto`` takes."""
        return self.backend.capabilities(device).preferred_block_size if asked is None else asked

    def refusals(self, case: BenchCase, layer: Layer, cache_spec: KVCacheSpec) -> tuple[str, ...]:
        """Every reason why it cannot serve the case; empty if it can."""
        reasons = self.backend.unsupported(layer.spec(case), cache_spec, layer.device)
        mixed = self.backend.capabilities(layer.device).mixed_batches
        if case.kind == "mixed" and not mixed:
            reasons = [*reasons, "mixed batches of decoding and prefill are not supported"]
        return tuple(reasons)


def named(typed: Sequence[str]) -> list[Contestant]:
    """The backends that are asked for.

    Args:
        typed: a registered name or ``package.module:Class`` each, a JSON object with its options
            behind it if it has any: ``triton{"decode": {...}}``.

    Raises:
        PluginError: a backend is unknown, contested or broken.
        ConfigError: its options are wrong.
    """
    found: dict[str, Contestant] = {}
    for text in typed:
        name, brace, rest = text.partition("{")
        backend = find_backend(name.strip())
        values = parse_backend_options(brace + rest if brace else None)
        options = validate_options(KIND, backend.name, backend, values)
        label = f"{backend.name} {brace}{rest}" if brace else backend.name
        if label in found and found[label].backend is not backend:
            # Two classes of one name.
            label = text
        found[label] = Contestant(label, backend, options)
    return list(found.values())


def everybody(device: torch.device) -> tuple[list[Contestant], dict[str, str]]:
    """All registered backends that run on the device, and why each other one does not."""
    host = discover()
    found, unavailable = [], {}
    for entry in host.registry.entries(KIND):
        try:
            backend: type[AttentionBackend] = entry.load()
            options = validate_options(KIND, entry.name, backend, None)
        except PluginError as error:
            unavailable[entry.name] = str(error)
            continue
        try:
            can = backend.capabilities(device)
        except Exception as error:
            text = f"its capabilities cannot be told: {type(error).__name__}: {error}"
            unavailable[entry.name] = text
            continue
        if can.missing is not None:
            unavailable[entry.name] = can.missing
        elif device.type not in can.device_types:
            supported = ", ".join(sorted(can.device_types))
            unavailable[entry.name] = (
                f"device={device.type} is not supported (supported: {supported})"
            )
        else:
            found.append(Contestant(entry.name, backend, options))
    for _, name in (one for one in host.registry.conflicts() if one[0] is KIND):
        unavailable[name] = str(host.registry.conflict(KIND, name))
    return found, unavailable
