"""What torch_sdpa cannot do is refused, by name and in one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from support.attention_asserts import assert_impossible_calls_are_refused
from support.attention_cases import CPU, make_batch, make_case

from jackfield.backends._kv_store import store_on_host, store_without_sync
from jackfield.backends.torch_sdpa import TorchSdpaBackend, TorchSdpaOptions
from jackfield.core.attention import AttentionSpec, KVCacheSpec
from jackfield.core.errors import UnsupportedError
from jackfield.core.options import NoOptions

SPEC = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32)
CACHE = KVCacheSpec(8, 4, 2, 16, 16, torch.float32)


def test_a_device_type_that_is_not_declared() -> None:
    with pytest.raises(UnsupportedError, match=r"device=meta .* \(supported: cpu, cuda\)"):
        TorchSdpaBackend(SPEC, CACHE, torch.device("meta"))


def test_every_unsupported_dtype_is_named() -> None:
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.int8)
    cache = KVCacheSpec(8, 4, 2, 16, 16, torch.float8_e5m2)
    with pytest.raises(UnsupportedError) as caught:
        TorchSdpaBackend(spec, cache, CPU)
    assert [reason.split(" ")[0] for reason in caught.value.reasons] == [
        "dtype=int8",
        "kv_cache_dtype=float8_e5m2",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_feature_is_declared(device: str) -> None:
    spec = AttentionSpec(
        num_heads=7,
        num_kv_heads=1,
        head_size=24,
        v_head_size=40,
        scale=0.1,
        dtype=torch.bfloat16,
        causal=False,
        sliding_window=3,
        logits_soft_cap=4.0,
        alibi_slopes=(0.5,) * 7,
        sinks=True,
    )
    cache = KVCacheSpec(8, 5, 1, 24, 40, torch.float16)
    declared = TorchSdpaBackend.capabilities(torch.device(device))
    assert declared.unsupported(spec, cache, torch.device(device)) == []
    assert declared.lse
    assert declared.nonfinite_safe


def test_unknown_and_impossible_options() -> None:
    with pytest.raises(ValidationError, match="max_scores"):
        TorchSdpaOptions.model_validate({"max_scores": 1})
    with pytest.raises(ValidationError, match="max_score_elements"):
        TorchSdpaOptions(max_score_elements=0)
    with pytest.raises(TypeError, match="TorchSdpaOptions, not NoOptions"):
        TorchSdpaBackend(SPEC, CACHE, CPU, NoOptions())


def test_what_forward_cannot_use() -> None:
    assert_impossible_calls_are_refused(TorchSdpaBackend)


def test_sinks_that_are_missing() -> None:
    spec = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32, sinks=True)
    case = make_case(spec, make_batch([5], [2], 4, 8), 4, 8)
    backend = TorchSdpaBackend(spec, CACHE, CPU)
    with pytest.raises(ValueError, match=r"spec\.sinks, which is True"):
        backend.forward(
            case.query, case.cache, backend.plan(case.batch), torch.zeros(len(case.query), 4, 16)
        )


@pytest.mark.parametrize("store", [store_on_host, store_without_sync])
def test_a_slot_below_minus_one_is_an_error(store: Callable[..., None]) -> None:
    caches = torch.zeros(8, 2, 16), torch.zeros(8, 2, 16)
    new = torch.ones(2, 2, 16), torch.ones(2, 2, 16)
    with pytest.raises(IndexError):
        store(caches, torch.tensor([3, -2]), new)
