"""Plugins made of thin air: fake entry points, and attention backends with chosen capabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jackfield import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    hookimpl,
)


@dataclass
class FakeEntryPoint:
    """As much of an entry point as discovery uses."""

    name: str
    plugin: object = None
    error: BaseException | None = None
    version: str = "1.0"
    value: str = "somewhere"
    loads: list[str] = field(default_factory=list)

    @property
    def dist(self) -> SimpleNamespace:
        return SimpleNamespace(name=f"dist-{self.name}", version=self.version)

    def load(self) -> object:
        self.loads.append(self.name)
        if self.error is not None:
            raise self.error
        return self.plugin


def plugin_of(api: str | None = "1.0", **hooks: Any) -> SimpleNamespace:
    """A plugin whose hooks register ``{name: target}``, or are the given functions."""
    plugin = SimpleNamespace()
    if api is not None:
        plugin.JACKFIELD_API_VERSION = api
    for hook, parts in hooks.items():
        setattr(plugin, hook, hookimpl(parts if callable(parts) else _registering(parts)))
    return plugin


def _registering(parts: dict[str, Any]) -> Callable[[Any], None]:
    def hook(register: Any) -> None:
        for name, target in parts.items():
            register(name, target)

    return hook


def backend_of(
    backend_name: str,
    auto_priority: int = 0,
    told: object = None,
    options: type[Any] | None = None,
    **capabilities: Any,
) -> type[AttentionBackend]:
    """A backend class that declares float32 on a CPU and what is given; ``told`` replaces its
    capabilities, and is raised if it is an exception."""

    class Backend(AttentionBackend):
        name = backend_name

        @classmethod
        def capabilities(cls, device: torch.device) -> Capabilities:
            if isinstance(told, Exception):
                raise told
            if told is not None:
                return told  # type: ignore[return-value]
            float32 = frozenset({torch.float32})
            values: dict[str, Any] = {
                "device_types": frozenset({"cpu"}),
                "dtypes": float32,
                "kv_dtypes": float32,
            }
            return Capabilities(**values, auto_priority=auto_priority, **capabilities)

        def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
            return AttentionPlan()

        def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
            cache.k.view(-1, *key.shape[1:])[slots] = key

        def forward(
            self, query: Tensor, cache: KVCache, plan: AttentionPlan, out: Tensor, **_: Any
        ) -> Tensor:
            return out.zero_()

    if options is not None:
        Backend.Options = options
    return Backend


def spec_of(**changes: Any) -> AttentionSpec:
    values: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "v_head_size": 16,
        "scale": 0.25,
        "dtype": torch.float32,
    }
    return AttentionSpec(**{**values, **changes})


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The makers above, as one object."""
    return SimpleNamespace(
        entry_point=FakeEntryPoint, plugin=plugin_of, backend=backend_of, spec=spec_of
    )
