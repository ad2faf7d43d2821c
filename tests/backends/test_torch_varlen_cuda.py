"""torch_varlen on a GPU, with torch's own function: meaning, no waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import make_batch, make_case
from support.gpu_cases import CUDA, attend_twice, on_gpu, spoil_hidden

from jackfield.backends.torch_varlen import TorchVarlenBackend, TorchVarlenOptions
from jackfield.core.attention import AttentionSpec

pytestmark = pytest.mark.gpu

# Decoding; prefill; chunks beside decoding.
BATCHES = [
    ([1, 64, 257, 700], [1, 1, 1, 1]),
    ([80, 500, 65], [80, 500, 65]),
    ([100, 400, 20, 190, 9], [1, 70, 1, 40, 1]),
]


@pytest.fixture(autouse=True)
def library() -> None:
    reason = TorchVarlenBackend.capabilities(CUDA).missing
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"causal": False, "sliding_window": 100},
        {"sinks": True},
        {"head_size": 72, "v_head_size": 72},
        {"head_size": 8, "v_head_size": 8},
        {"head_size": 256, "v_head_size": 256},
        {"num_heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [16, 256])
def test_equals_the_oracle(dtype: torch.dtype, changes: dict[str, Any], block_size: int) -> None:
    """On a torch that can page, blocks of 256 are read in place."""
    spec = replace(AttentionSpec(14, 2, 128, 128, 0.09, dtype), **changes)
    num_blocks = 8 + 1600 // block_size
    for seq_lens, query_lens in BATCHES:
        batch = make_batch(seq_lens, query_lens, block_size, num_blocks)
        host = make_case(spec, batch, block_size, num_blocks)
        spoil_hidden(host)
        case = on_gpu(host)
        for options in (TorchVarlenOptions(), TorchVarlenOptions(max_gathered_elements=1 << 17)):
            backend = TorchVarlenBackend(case.spec, case.cache_spec, CUDA, options)
            assert_meaning(host, *attend_twice(backend, case))
        out, _ = attend_twice(backend, case, with_lse=False)
        assert_meaning(host, out, None)
