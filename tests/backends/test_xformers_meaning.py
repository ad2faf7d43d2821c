"""The backends on xformers mean what the contract says, on top of the library's double."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import CPU, attend, make_batch, make_case
from support.xformers_backends import XformersCutlassOnCpu, XformersOnCpu

from jackfield.backends.xformers import XformersOptions
from jackfield.conformance.attention.contract import AttentionContract
from jackfield.core.attention import AttentionSpec

Narrow = Mapping[str, Sequence[str]]


class TestXformers(AttentionContract):
    """CUDA graphs are declared here: plans are updated in place, though nothing is captured."""

    backend = XformersOnCpu
    scale = "tiny"
    only: ClassVar[Narrow] = {
        "dtype": ("bfloat16",),
        "head_size": ("16", "64"),
        "group_size": ("1", "3"),
        "block_size": ("64",),
    }


class TestXformersCutlass(AttentionContract):
    backend = XformersCutlassOnCpu
    scale = "tiny"
    laws = (
        "declared",
        "refusals",
        "meaning",
        "lse",
        "nothing_visible",
        "nothing_else",
        "unseen_slots",
    )
    only: ClassVar[Narrow] = {
        "dtype": ("float32",),
        "head_size": ("8", "40"),
        "group_size": ("1", "3"),
        "block_size": ("1", "5"),
    }


FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 50},
    {"sinks": True},
    {"v_head_size": 48},
    {"num_heads": 2},
]
# Decoding; equal short queries beside decoding; prefill; chunks beside decoding; an idle sequence.
BATCHES = [
    ([1, 64, 65, 130, 7], [1, 1, 1, 1, 1]),
    ([90, 3, 64, 300], [3, 3, 1, 3]),
    ([80, 200, 65], [80, 200, 65]),
    ([100, 70, 20, 190, 9], [1, 70, 1, 40, 1]),
    ([60, 50, 90], [1, 0, 17]),
]


def layer(dtype: torch.dtype, **changes: Any) -> AttentionSpec:
    fields = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32, "v_head_size": 32}
    return AttentionSpec(**{**fields, "scale": 0.2, "dtype": dtype, **changes})


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("max_elements", [1, 20_000, 1 << 27])
def test_cutlass_in_one_copy_of_keys_and_in_several(
    features: dict[str, Any], max_elements: int
) -> None:
    options = XformersOptions(max_gathered_elements=max_elements)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for seq_lens, query_lens in BATCHES:
            batch = make_batch(seq_lens, query_lens, 16, 60)
            case = make_case(layer(dtype, **features), batch, 16, 60)
            backend = XformersCutlassOnCpu(case.spec, case.cache_spec, CPU, options)
            assert_meaning(case, *attend(backend, case, with_lse=True))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [(6, 2), (2, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("block_size", [64, 128])
def test_pages_and_copies(heads: tuple[int, int], block_size: int, sinks: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        spec = layer(dtype, num_heads=heads[0], num_kv_heads=heads[1], sinks=sinks)
        for seq_lens, query_lens in BATCHES:
            batch = make_batch(seq_lens, query_lens, block_size, 24)
            case = make_case(spec, batch, block_size, 24)
            backend = XformersOnCpu(case.spec, case.cache_spec, CPU)
            assert_meaning(case, *attend(backend, case, with_lse=True))


def test_queries_at_addresses_that_a_kernel_cannot_read_are_copied() -> None:
    """Rows that begin between borders of 16 bytes; the double refuses them."""
    batch = make_batch([40], [30], 16, 8)
    case = make_case(layer(torch.float16), batch, 16, 8)
    wide = torch.zeros(len(case.query), 6 * 32 + 3, dtype=torch.float16)
    query = wide[:, 1:-2].view(-1, 6, 32)
    query.copy_(case.query)
    out = torch.empty(case.query.shape, dtype=torch.float16)
    again = torch.empty_like(out)
    backend = XformersCutlassOnCpu(case.spec, case.cache_spec, CPU)
    plan = backend.plan(case.batch)
    backend.forward(query, case.cache, plan, out)
    backend.forward(case.query.contiguous(), case.cache, plan, again)
    assert torch.equal(out[:30], again[:30])
