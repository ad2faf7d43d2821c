"""flash_attn_4 on a GPU, with the library itself: meaning, and no waiting once it has compiled."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case
from support.cuda import no_synchronisation

from jackfield.backends.flash_attn_4 import LIBRARY, FlashAttn4Backend
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def library() -> None:
    if (reason := LIBRARY.missing(CUDA)) is not None:
        pytest.skip(reason)


# The compiler warns about what it does not know of its own dialect.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 100},
    {"causal": False, "sliding_window": 100},
    {"sinks": True},
    {"num_heads": 2},
    {"head_size": 64, "v_head_size": 64},
]
# Decoding, also of a long sequence; whole prompts; decoding on both sides of chunks; many.
BATCHES = [
    ([1, 128, 129, 40], [1, 1, 1, 1]),
    ([5000], [1]),
    ([80, 300, 65], [80, 300, 65]),
    ([300, 700, 20, 258, 1, 9], [1, 170, 1, 40, 1, 1]),
    ([33] * 300, [1] * 300),
]


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(14, 2, 128, 128, 0.09, torch.bfloat16), **changes)


def placed(case: Case) -> Case:
    names = {field.name for field in fields(AttentionBatch)}
    moved: dict[str, Any] = {
        name: getattr(case.batch, name).to(CUDA) for name in names if f"{name}_cpu" in names
    }
    return replace(
        case,
        batch=replace(case.batch, **moved),
        cache=KVCache(k=case.cache.k.to(CUDA), v=case.cache.v.to(CUDA)),
        query=case.query.to(CUDA),
        key=case.key.to(CUDA),
        value=case.value.to(CUDA),
        sinks=None if case.sinks is None else case.sinks.to(CUDA),
    )


def check(host: Case, *, with_lse: bool) -> None:
    """Twice: once what is needed has been compiled, nothing waits."""
    case = placed(host)
    backend = FlashAttn4Backend(case.spec, case.cache_spec, CUDA)
    shape = (len(case.query), case.spec.num_heads)
    out = torch.full((*shape, case.spec.v_head_size), UNTOUCHED, dtype=case.spec.dtype, device=CUDA)
    lse = torch.full(shape, UNTOUCHED, device=CUDA)
    wanted = lse if with_lse else None
    with torch.inference_mode():
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=wanted)
        first = out.clone()
        with no_synchronisation():
            plan = backend.plan(case.batch)
            backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=wanted)
    assert torch.equal(out, first)
    assert_meaning(host, out.cpu(), lse.cpu() if with_lse else None)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("block_size", [16, 128])
def test_every_feature(features: dict[str, Any], block_size: int) -> None:
    for seq_lens, query_lens in BATCHES:
        num_blocks = 3 + sum(-(-length // block_size) for length in seq_lens)
        batch = make_batch(seq_lens, query_lens, block_size, num_blocks)
        host = make_case(layer(**features), batch, block_size, num_blocks)
        check(host, with_lse=False)
        check(host, with_lse=True)


def test_rows_of_sequences_without_tokens() -> None:
    real = make_batch([0, 30, 0], [0, 2, 0], 16, 20)
    starts = torch.tensor([0, 40, 42, 43], dtype=torch.int32)
    slots = torch.full((43,), -1)
    batch = AttentionBatch.from_host(starts, real.seq_lens, real.block_table, slots)
    host = make_case(layer(), batch, 16, 20)
    check(host, with_lse=True)
