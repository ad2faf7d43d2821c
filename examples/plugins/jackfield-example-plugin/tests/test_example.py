"""The plugin, its scheduling policy and its block manager; see also ``test_attention``."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jackfield_example import plugin
from jackfield_example.block_manager import StackBlockManager
from jackfield_example.policy import ShortestPromptOptions, ShortestPromptPolicy

from jackfield import AllocationStatus, BlockManagerConfig
from jackfield.plugins.discovery import PluginHost
from jackfield.plugins.registry import Origin


def test_every_registered_part_loads() -> None:
    loaded = PluginHost().add(Origin("example"), plugin)
    assert [part.name for part in loaded.parts] == [
        "example_loop",
        "example_shortest_prompt",
        "example_stack",
    ]
    for part in loaded.parts:
        assert part.load().name == part.name


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
