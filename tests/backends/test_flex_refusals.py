"""What flex cannot do is refused, by name and in one sentence."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from support.attention_asserts import assert_impossible_calls_are_refused
from support.attention_cases import CPU

from jackfield.backends.flex import FlexBackend, FlexOptions
from jackfield.core.attention import AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import NoOptions
from jackfield.plugins import builtin

SPEC = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32)
CACHE = KVCacheSpec(8, 4, 2, 16, 16, torch.float32)
CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_it_is_registered() -> None:
    found: dict[str, str | type] = {}

    def register(name: str, target: str | type) -> None:
        found[name] = target

    builtin.jackfield_attention_backends(register)
    assert found["flex"] == f"{FlexBackend.__module__}:FlexBackend"


def test_a_device_type_that_is_not_declared() -> None:
    with pytest.raises(UnsupportedError, match=r"device=meta .* \(supported: cpu, cuda\)"):
        FlexBackend(SPEC, CACHE, torch.device("meta"))


def test_auto_never_chooses_it() -> None:
    assert FlexBackend.capabilities(CPU).auto_priority == 0
    assert FlexBackend.capabilities(CUDA).auto_priority == 0


def test_a_cpu_has_every_feature() -> None:
    spec = AttentionSpec(
        num_heads=7,
        num_kv_heads=1,
        head_size=24,
        v_head_size=40,
        scale=0.1,
        dtype=torch.float64,
        causal=False,
        sliding_window=3,
        logits_soft_cap=4.0,
        alibi_slopes=(0.5,) * 7,
        sinks=True,
    )
    cache = KVCacheSpec(8, 5, 1, 24, 40, torch.float16)
    declared = FlexBackend.capabilities(CPU)
    assert declared.unsupported(spec, cache, CPU) == []
    assert declared.lse
    assert declared.nonfinite_safe


@pytest.mark.usefixtures("hopper")
def test_what_a_gpu_lacks_is_named() -> None:
    spec = AttentionSpec(4, 2, 8, 512, 0.25, torch.float64)
    cache = KVCacheSpec(8, 24, 2, 8, 512, torch.float8_e4m3fn)
    declared = FlexBackend.capabilities(CUDA)
    assert declared.unsupported(spec, cache, CUDA) == [
        "head_size=8 is not supported (supported: 16 to 256)",
        "v_head_size=512 is not supported (supported: 16 to 256)",
        "block_size=24 is not supported (supported: 16, 32, 64, 128, 256)",
        "dtype=float64 is not supported (supported: bfloat16, float16, float32)",
        "kv_cache_dtype=float8_e4m3fn is not supported (supported: bfloat16, float16, float32)",
    ]
    assert not declared.nonfinite_safe


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    cache = KVCacheSpec(8, 16, 2, 16, 16, torch.float32)
    reasons = FlexBackend.capabilities(CUDA).unsupported(SPEC, cache, CUDA)
    assert reasons == ["compute capability 7.5 is below the needed 8.0"]


def test_unknown_and_impossible_options() -> None:
    with pytest.raises(ValidationError, match="compiled"):
        FlexOptions.model_validate({"compiled": True})
    with pytest.raises(ValidationError, match="max_score_elements"):
        FlexOptions(max_score_elements=0)
    with pytest.raises(TypeError, match="FlexOptions, not NoOptions"):
        FlexBackend(SPEC, CACHE, CPU, NoOptions())
    with pytest.raises(UnsupportedError, match="compile=true is not supported on device=cpu"):
        FlexBackend(SPEC, CACHE, CPU, FlexOptions(compile=True))


def test_what_forward_cannot_use() -> None:
    assert_impossible_calls_are_refused(FlexBackend)
