"""A backend that this machine cannot run, judged for a CUDA device: by its own rules, unloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jackfield.core.attention import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    KVCacheSpec,
)
from jackfield.plugins.explain_elsewhere import Elsewhere, is_out_of_place, judge_on_cuda
from jackfield.plugins.registry import Origin, PartEntry, PartKind

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def entry_of(cls: type[AttentionBackend]) -> PartEntry:
    return PartEntry(PartKind.ATTENTION_BACKEND, cls.name, cls, Origin("mine"))


def found(cls: type[AttentionBackend], spec: AttentionSpec, **others: Any) -> Elsewhere:
    result = judge_on_cuda(entry_of(cls), [spec], **others)
    assert result is not None
    return result


def fussy(make: SimpleNamespace) -> type[AttentionBackend]:
    """A backend for CUDA that refuses negative scales, and cannot run here."""
    float32 = frozenset({torch.float32})
    told = Capabilities(
        device_types=frozenset({"cuda"}),
        dtypes=float32,
        kv_dtypes=float32,
        missing="fussylib is not installed",
        compute_capability=(8, 6),
    )
    base: type[AttentionBackend] = make.backend("fussy", told=told)

    class Fussy(base):  # type: ignore[valid-type,misc]
        @classmethod
        def unsupported(
            cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
        ) -> list[str]:
            reasons: list[str] = super().unsupported(spec, cache, device)
            return [*reasons, *(["scale is below 0"] if spec.scale < 0 else [])]

    return Fussy


def test_a_backend_is_asked_as_if_nothing_were_missing(make: SimpleNamespace) -> None:
    cls = fussy(make)
    assert is_out_of_place(entry_of(cls), CPU)
    assert found(cls, make.spec()) == Elsewhere(
        device="cuda",
        dtypes=("float32",),
        usable=True,
        compute_capability="8.6",
        block_size=16,
        missing="fussylib is not installed",
        reasons=(),
        note="",
    )
    assert found(cls, make.spec(), block_size=32).lines() == (
        "on CUDA: usable in float32 from compute capability 8.6, with block_size=32, once nothing "
        "is missing",
    )
    assert cls.capabilities(CPU).missing == "fussylib is not installed"


def test_its_own_reasons_count(make: SimpleNamespace) -> None:
    spec = make.spec(scale=-1.0, sinks=True)
    assert found(fussy(make), spec).lines() == (
        "on CUDA: sinks is not supported",
        "on CUDA: scale is below 0",
    )


def test_an_own_check_that_needs_the_library_is_left_out_and_said(make: SimpleNamespace) -> None:
    class Loading(fussy(make)):  # type: ignore[misc]
        @classmethod
        def unsupported(
            cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
        ) -> list[str]:
            raise ModuleNotFoundError("No module named 'fussylib'")

    first, second = found(Loading, make.spec()).lines()
    assert first.startswith("on CUDA: usable in float32")
    assert second == (
        "on CUDA: judged by its capabilities alone: its own check needs what is missing "
        "(ModuleNotFoundError: No module named 'fussylib')"
    )
    assert found(Loading, make.spec(sinks=True)).reasons == ("sinks is not supported",)


def test_a_gpu_that_is_here_counts(make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert found(fussy(make), make.spec()).reasons == (
        "compute capability 7.5 is below the needed 8.6",
    )


def test_a_backend_that_says_nothing_of_cuda(make: SimpleNamespace) -> None:
    base: type[AttentionBackend] = make.backend("shy")

    class Shy(base):  # type: ignore[valid-type,misc]
        @classmethod
        def capabilities(cls, device: torch.device) -> Capabilities:
            if device.type == "cuda":
                raise RuntimeError("no driver")
            can: Capabilities = super().capabilities(device)
            return can

    assert not is_out_of_place(entry_of(Shy), CPU)
    assert found(Shy, make.spec()).lines() == (
        "on CUDA: it cannot be judged: RuntimeError: no driver",
    )


def test_a_class_with_a_subclass_hook_is_judged_without_a_subclass(make: SimpleNamespace) -> None:
    made: list[type] = []

    class Registering(fussy(make)):  # type: ignore[misc]
        def __init_subclass__(cls, needed: int, **others: Any) -> None:
            made.append(cls)

    assert found(Registering, make.spec()).usable
    assert not made


def test_capabilities_that_are_none_are_the_reason(make: SimpleNamespace) -> None:
    class Empty(fussy(make)):  # type: ignore[misc]
        @classmethod
        def capabilities(cls, device: torch.device) -> Any:
            return None

    assert not is_out_of_place(entry_of(Empty), CPU)
    (reason,) = found(Empty, make.spec()).reasons
    assert reason.startswith("it cannot be judged: AttributeError: ")


def test_a_check_that_fails_with_nothing_missing_is_against_it(make: SimpleNamespace) -> None:
    base: type[AttentionBackend] = make.backend("dividing")

    class Dividing(base):  # type: ignore[valid-type,misc]
        @classmethod
        def unsupported(
            cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
        ) -> list[str]:
            return ["never"] * (1 // 0)

    result = found(Dividing, make.spec())
    assert not result.usable
    assert result.note == ""
    assert "it cannot be judged: ZeroDivisionError: " in result.reasons[0]
