"""The example parts, each against its contract."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from jackfield_example import plugin
from jackfield_example.attention import LoopBackend
from jackfield_example.block_manager import StackBlockManager
from jackfield_example.policy import ShortestPromptOptions, ShortestPromptPolicy

from jackfield import (
    AllocationStatus,
    AttentionBatch,
    AttentionSpec,
    BlockManagerConfig,
    KVCacheSpec,
    KVLayout,
    UnsupportedError,
    allocate_kv_cache,
)
from jackfield.plugins.discovery import PluginHost
from jackfield.plugins.registry import Origin

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def test_every_registered_part_loads() -> None:
    loaded = PluginHost().add(Origin("example"), plugin)
    assert [part.name for part in loaded.parts] == [
        "example_loop",
        "example_shortest_prompt",
        "example_stack",
    ]
    for part in loaded.parts:
        assert part.load().name == part.name


def spec(**changes: Any) -> AttentionSpec:
    values: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "v_head_size": 8,
        "scale": 8**-0.5,
        "dtype": torch.float32,
    }
    return AttentionSpec(**{**values, **changes})


def cache_spec() -> KVCacheSpec:
    return KVCacheSpec(16, BLOCK_SIZE, 2, 8, 8, torch.float32)


def expected_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """One query row over keys ``first`` to ``last``, head by head, in float64."""
    heads = []
    for head in range(query.shape[0]):
        seen = slice(first, last + 1)
        scores = keys[seen, head // 2].double() @ query[head].double() / math.sqrt(8)
        heads.append(scores.softmax(0) @ values[seen, head // 2].double())
    return torch.stack(heads)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(5, 5), (9, 1), (8, 3)]])
@pytest.mark.parametrize("layout", get_args(KVLayout))
def test_attention_is_what_the_contract_says(
    window: int | None, lengths: list[tuple[int, int]], layout: KVLayout
) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = LoopBackend(spec(sliding_window=window), cache_spec(), CPU)
    cache = allocate_kv_cache(cache_spec(), layout, CPU)
    ids = torch.randperm(16, generator=generator, dtype=torch.int32).tolist()
    tables = [[ids.pop() for _ in range(3)] for _ in lengths]
    keys = [torch.randn(n, 2, 8, generator=generator) for n, _ in lengths]
    values = [torch.randn(n, 2, 8, generator=generator) for n, _ in lengths]
    slots = [
        [t[p // 4] * 4 + p % 4 for p in range(n)] for t, (n, _) in zip(tables, lengths, strict=True)
    ]
    backend.write_kv(
        torch.cat(keys), torch.cat(values), cache, torch.tensor([s for row in slots for s in row])
    )
    counts = torch.tensor([0, *(q for _, q in lengths)])
    batch = AttentionBatch.from_host(
        counts.cumsum(0).int(),
        torch.tensor([n for n, _ in lengths], dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor([s for row, (n, q) in zip(slots, lengths, strict=True) for s in row[n - q :]]),
    )
    query = torch.randn(batch.num_tokens, 4, 8, generator=generator)
    out = torch.full((batch.num_tokens + 2, 4, 8), 7.0)
    backend.forward(query, cache, backend.plan(batch), out)

    row = 0
    for s, (n, q) in enumerate(lengths):
        for position in range(n - q, n):
            first = 0 if window is None else max(0, position - window + 1)
            expected = expected_row(query[row], keys[s], values[s], first, position)
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)
            row += 1
    assert torch.equal(out[row:], torch.full((2, 4, 8), 7.0))


def test_slot_minus_one_is_not_stored() -> None:
    backend = LoopBackend(spec(), cache_spec(), CPU)
    cache = allocate_kv_cache(cache_spec(), "NHD", CPU)
    ones = torch.ones(2, 2, 8)
    backend.write_kv(ones, ones, cache, torch.tensor([-1, 5]))
    assert cache.k.sum() == cache.v.sum() == 2 * 8
    assert torch.equal(cache.k[1, 1], ones[0])


def test_what_is_not_declared_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"logits_soft_cap=30\.0"):
        LoopBackend(spec(logits_soft_cap=30.0), cache_spec(), CPU)


@dataclass
class View:
    """As much of a scheduler as the policy looks at."""

    step: int
    requests: list[SimpleNamespace] = field(default_factory=list)

    def waiting(self) -> list[SimpleNamespace]:
        return self.requests


def order(policy: ShortestPromptPolicy, view: Any) -> list[str]:
    return list(policy.propose(view).admission_order or ())


def request(name: str, length: int, index: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_prompt_tokens=length, arrival_index=index)


def test_short_prompts_first_until_somebody_has_waited_long_enough() -> None:
    policy = ShortestPromptPolicy(ShortestPromptOptions(max_wait_steps=2))
    long, short = request("long", 90, 0), request("short", 3, 1)
    assert order(policy, View(0, [long, short])) == ["short", "long"]
    assert order(policy, View(1, [long, request("next", 5, 2)])) == ["next", "long"]
    assert order(policy, View(2, [long, request("late", 1, 3)])) == ["long", "late"]


def test_a_request_that_ran_in_between_waits_anew() -> None:
    policy = ShortestPromptPolicy(ShortestPromptOptions(max_wait_steps=2))
    long, short = request("long", 90, 0), request("short", 3, 1)
    order(policy, View(0, [long]))
    order(policy, View(1, []))
    assert order(policy, View(2, [long, short])) == ["short", "long"]


def test_blocks_come_back_in_the_order_of_a_stack() -> None:
    manager = StackBlockManager(BlockManagerConfig(8, 4, 32, watermark=0.0))
    assert manager.allocate("a", range(9), 9) is not None
    assert manager.block_table("a").tolist() == [0, 1, 2]
    manager.free("a")
    assert manager.allocate("b", range(5), 5) is not None
    assert manager.block_table("b").tolist() == [0, 1]
    assert manager.append("b", 9) == ()
    assert manager.block_table("b").tolist() == [0, 1, 2]
    assert (manager.usage().used, manager.usage().free) == (3, 5)


def test_what_does_not_fit_changes_nothing() -> None:
    manager = StackBlockManager(BlockManagerConfig(4, 4, 16, watermark=0.25))
    assert manager.can_allocate(range(17), 17) is AllocationStatus.NEVER
    assert manager.allocate("a", range(8), 8) is not None
    assert manager.can_allocate(range(8), 8) is AllocationStatus.LATER
    assert manager.allocate("b", range(8), 8) is None
    assert manager.append("a", 17) is None
    assert manager.block_table("a").tolist() == [0, 1]
    assert manager.append("a", 16) == ()
    assert manager.usage().free == 0
