"""The flashinfer backend on a GPU: what the double on a CPU cannot show.

Layers differ as little as possible, since each combination of dtype, head size and window is a
module that the library compiles for a minute or two, unless it is there already.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.attention_asserts import assert_meaning as assert_output
from support.attention_cases import UNTOUCHED, Case, make_batch, make_case, visible_slots
from support.cuda import no_synchronisation
from torch import Tensor

from jackfield.backends.flashinfer import FlashInferBackend
from jackfield.conformance.attention.oracle import attention_oracle
from jackfield.core.attention import AttentionBatch, AttentionSpec, KVCache

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BLOCK, BLOCKS = 16, 600
#: Decode and chunks together, several row tiles, a block more and less, and an idle sequence.
MIXED = ([1, 700, 257, 256, 300, 150, 129, 0], [1, 1, 2, 40, 3, 150, 1, 1])
DECODE = ([1, 700, 257, 256, 17, 16, 0, 2000], [1] * 8)
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sliding_window": 100},
    {"causal": False, "sliding_window": 100},
    {"sinks": True},
    {"scale": -0.05},
    {"scale": 0.002},
    {"num_heads": 5, "num_kv_heads": 5},
    {"num_heads": 16, "num_kv_heads": 1},
]


@pytest.fixture(autouse=True)
def _usable() -> None:
    reason = FlashInferBackend.capabilities(DEVICE).missing
    if reason is not None:
        pytest.skip(reason)


def layer(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(28, 4, 128, 128, 0.09, torch.bfloat16), **changes)


def placed(case: Case) -> Case:
    """The case on the GPU."""
    names = {field.name for field in fields(AttentionBatch)}
    moved: dict[str, Any] = {
        name: getattr(case.batch, name).to(DEVICE) for name in names if f"{name}_cpu" in names
    }
    return replace(
        case,
        batch=replace(case.batch, **moved),
        cache=replace(case.cache, k=case.cache.k.to(DEVICE), v=case.cache.v.to(DEVICE)),
        query=case.query.to(DEVICE),
        key=case.key.to(DEVICE),
        value=case.value.to(DEVICE),
        sinks=None if case.sinks is None else case.sinks.to(DEVICE),
    )


def case_of(
    lengths: tuple[list[int], list[int]], columns: int | None = None, seed: int = 0, **changes: Any
) -> tuple[Case, Case]:
    """The case on the host and on the GPU, NaN in all slots that no row sees."""
    needed = -(-max(lengths[0]) // BLOCK)
    extra = 2 if columns is None else columns - needed
    batch = make_batch(*lengths, BLOCK, BLOCKS, extra_columns=extra, seed=seed)
    host = make_case(layer(**changes), batch, BLOCK, BLOCKS)
    hidden = ~visible_slots(host)
    host.cache.k[hidden], host.cache.v[hidden] = torch.nan, torch.nan
    return host, placed(host)


def backend_of(case: Case) -> FlashInferBackend:
    reasons = FlashInferBackend.unsupported(case.spec, case.cache_spec, DEVICE)
    if reasons:
        pytest.skip("; ".join(reasons))
    return FlashInferBackend(case.spec, case.cache_spec, DEVICE)


def empty_results(case: Case) -> tuple[Tensor, Tensor]:
    shape = (len(case.query), case.spec.num_heads)
    out = torch.full((*shape, case.spec.v_head_size), UNTOUCHED, dtype=case.spec.dtype)
    return out.to(DEVICE), torch.full(shape, UNTOUCHED, device=DEVICE)


def attend(backend: FlashInferBackend, case: Case) -> tuple[Tensor, Tensor]:
    out, lse = empty_results(case)
    plan = backend.plan(case.batch)
    backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=lse)
    return out.cpu(), lse.cpu()


def assert_meaning(case: Case, out: Tensor, lse: Tensor) -> None:
    """As always, but for the LSE: the kernels add up weights that they have rounded to 16 bits."""
    assert_output(case, out, None)
    owned = case.batch.num_tokens
    _, expected = attention_oracle(case.spec, case.query, case.cache, case.batch, case.sinks)
    torch.testing.assert_close(lse[:owned].double(), expected[:owned], rtol=0, atol=2**-8)
    assert bool((lse[owned:] == UNTOUCHED).all())


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_every_feature_without_waiting(
    features: dict[str, Any], lengths: tuple[list[int], list[int]]
) -> None:
    host, case = case_of(lengths, **features)
    backend = backend_of(case)
    assert_meaning(host, *attend(backend, case))
    out, lse = empty_results(case)
    with no_synchronisation():
        plan = backend.plan(case.batch)
        backend.forward(case.query, case.cache, plan, out, sinks=case.sinks, lse=lse)
    assert_meaning(host, out.cpu(), lse.cpu())


@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_a_cache_of_8_bits(lengths: tuple[list[int], list[int]]) -> None:
    host, case = case_of(lengths)
    scales: dict[str, Any] = {"k_scale": 0.02, "v_scale": 0.03}
    stored: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    for name in ("k", "v"):
        numbers = getattr(host.cache, name).float().nan_to_num(0.0)
        stored[name] = (numbers / scales[f"{name}_scale"]).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * scales[f"{name}_scale"]
    host = replace(host, cache=KVCache(**meant))
    on_gpu: dict[str, Any] = {name: tensor.to(DEVICE) for name, tensor in stored.items()}
    coded = KVCache(**on_gpu, **scales)
    cache_spec = replace(case.cache_spec, dtype=torch.float8_e4m3fn)
    case = replace(case, cache=coded, cache_spec=cache_spec)
    assert_meaning(host, *attend(backend_of(case), case))


def test_a_cache_with_heads_first() -> None:
    host, case = case_of(MIXED)
    other = {
        name: getattr(case.cache, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("k", "v")
    }
    moved = replace(case, cache=replace(case.cache, **other))
    assert_meaning(host, *attend(backend_of(case), moved))


def test_a_captured_graph_replays_with_other_lengths() -> None:
    """Captured with short sequences, whose keys alone would not have been split."""
    columns = 128
    _, first = case_of(([1, 1, 1, 1], [1] * 4), columns)
    backend = backend_of(first)
    plan = backend.plan(first.batch)
    out, lse = empty_results(first)
    backend.forward(first.query, first.cache, plan, out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(first.query, first.cache, plan, out, lse=lse)
    for seed, lengths in enumerate(
        ([2000, 1, 17, 256], [2048, 2048, 2048, 2048], [0, 5, 0, 600], [1, 2, 3, 4])
    ):
        host, case = case_of((lengths, [1] * 4), columns, seed)
        first.query.copy_(case.query)
        first.cache.k.copy_(case.cache.k)
        first.cache.v.copy_(case.cache.v)
        # Another step is computed in between: it shares the workspace.
        attend(backend, case_of(MIXED)[1])
        with no_synchronisation():
            backend.plan(case.batch, into=plan)
        out.fill_(UNTOUCHED)
        lse.fill_(UNTOUCHED)
        graph.replay()
        assert_meaning(host, out.cpu(), lse.cpu())


@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_a_plan_that_is_dropped_early_is_copied_all_the_same(
    lengths: tuple[list[int], list[int]],
) -> None:
    """The device is late: what the host does meanwhile with the memory of the plan must not
    count."""
    host, case = case_of(lengths)
    backend = backend_of(case)
    attend(backend, case)
    out, lse = empty_results(case)
    torch.cuda._sleep(1_000_000_000)
    plan = backend.plan(case.batch)
    assert plan.held is not None
    size = plan.held.pinned.numel()
    backend.forward(case.query, case.cache, plan, out, lse=lse)
    del plan, backend
    # They live until the device is done, so that they cannot all have the same memory.
    others = [torch.full((size,), 255, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    results = out.cpu(), lse.cpu()
    del others
    assert_meaning(host, *results)


def test_many_sequences_and_a_long_prompt() -> None:
    """More tiles than the device has processors, and a split of keys."""
    many = ([1 + 7 * index % 90 for index in range(500)], [1] * 500)
    batch = make_batch(*many, BLOCK, 3200)
    host = make_case(layer(), batch, BLOCK, 3200)
    assert_meaning(host, *attend(backend_of(host), placed(host)))
    host, case = case_of(([4000], [9]))
    assert_meaning(host, *attend(backend_of(case), case))
