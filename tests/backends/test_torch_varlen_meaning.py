"""torch_varlen means what the contract says, on top of a double of torch's function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, attend, make_batch, make_case
from support.varlen_backends import PagedVarlenOnCpu, VarlenOnCpu
from support.varlen_double import CALLS

from jackfield.backends.torch_varlen import TorchVarlenOptions
from jackfield.conformance.attention.contract import AttentionContract
from jackfield.core.attention import AttentionSpec

Narrow = Mapping[str, Sequence[str]]


class TestCopies(AttentionContract):
    backend = VarlenOnCpu
    scale = "tiny"
    only: ClassVar[Narrow] = {
        "dtype": ("bfloat16",),
        "head_size": ("8", "40"),
        "group_size": ("1", "3"),
        "block_size": ("1", "5"),
    }


class TestPages(AttentionContract):
    """Blocks of 256 are read in place, unless there is a window."""

    backend = PagedVarlenOnCpu
    scale = "tiny"
    laws = ("meaning", "nothing_visible", "nonfinite_slots", "table_tail")
    only: ClassVar[Narrow] = {
        "dtype": ("float16",),
        "head_size": ("8",),
        "group_size": ("1", "3"),
        "block_size": ("256",),
    }


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 1},
    {"sliding_window": 50},
    {"causal": False, "sliding_window": 50},
    {"sinks": True},
    {"num_heads": 2},
]
# Decoding; prefill; chunks beside decoding; an idle sequence.
BATCHES = [
    ([1, 64, 256, 257, 7], [1, 1, 1, 1, 1]),
    ([80, 200, 65], [80, 200, 65]),
    ([100, 70, 20, 290, 9], [1, 70, 1, 40, 1]),
    ([60, 50, 90], [1, 0, 17]),
]


@pytest.mark.parametrize("kind", [VarlenOnCpu, PagedVarlenOnCpu])
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
def test_every_feature(kind: type[VarlenOnCpu], features: dict[str, Any], block_size: int) -> None:
    fields = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32, "v_head_size": 32, "scale": 0.2}
    for dtype in (torch.float16, torch.bfloat16):
        spec = AttentionSpec(**{**fields, "dtype": dtype, **features})
        for seq_lens, query_lens in BATCHES:
            num_blocks = 6 + sum(-(-length // block_size) for length in seq_lens)
            batch = make_batch(seq_lens, query_lens, block_size, num_blocks)
            case = make_case(spec, batch, block_size, num_blocks)
            for elements in (1, 1 << 27):
                options = TorchVarlenOptions(max_gathered_elements=elements)
                backend = kind(case.spec, case.cache_spec, CPU, options)
                CALLS.clear()
                assert_meaning(case, *attend(backend, case, with_lse=True))
                paged = kind is PagedVarlenOnCpu and block_size == 256
                in_place = paged and spec.sliding_window is None
                assert all((call.block_table is not None) == in_place for call in CALLS)
