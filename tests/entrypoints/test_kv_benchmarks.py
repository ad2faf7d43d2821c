"""What the scripts that measure the KV cache count is what they say."""

from __future__ import annotations

import gzip
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tiny_models import make_tiny_llama

from jackfield.core.block_manager import BlockManagerConfig
from jackfield.core.block_managers.paged import PagedBlockManager
from jackfield.core.model_runner import ModelRunner


@pytest.fixture(scope="module", autouse=True)
def _scripts_path(repository: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield


@pytest.fixture
def kv_waste() -> ModuleType:
    return importlib.import_module("kv_waste")


@pytest.fixture
def fork_blocks() -> ModuleType:
    return importlib.import_module("fork_blocks")


@pytest.fixture
def chat_turns() -> ModuleType:
    return importlib.import_module("chat_turns")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory, max_position_embeddings=1024)
    return str(directory)


def test_slots_that_are_filled_later_and_never(kv_waste: ModuleType) -> None:
    """Blocks of 4: one request has 5 of its 7 tokens, another 2 of its 9."""
    manager = PagedBlockManager(BlockManagerConfig(16, 4, 32))
    manager.allocate("a", range(5), 5)
    manager.allocate("b", range(2), 2)
    slots = kv_waste.count_slots({"a": 5, "b": 2}, {"a": 7, "b": 9}, manager)
    assert (slots.reserved, slots.held, slots.never) == (12, 7, 1)
    assert slots.empty == pytest.approx(5 / 12)


def test_blocks_that_nobody_accounts_for_are_seen(kv_waste: ModuleType) -> None:
    manager = PagedBlockManager(BlockManagerConfig(16, 4, 32))
    manager.allocate("a", range(5), 5)
    manager.allocate("b", range(2), 2)
    with pytest.raises(RuntimeError, match="have 8 slots, and 12 are in use"):
        kv_waste.count_slots({"a": 5}, {"a": 7}, manager)


def test_averages_count_each_step_once(kv_waste: ModuleType) -> None:
    steps = [(1, kv_waste.Slots(10, 5, 4)), (3, kv_waste.Slots(100, 90, 0))]
    row = kv_waste.summarise(steps, 200)
    assert row["steps"] == 2
    assert row["mean_running"] == 2
    assert row["empty"] == pytest.approx(0.3)
    assert row["empty_never"] == pytest.approx(0.2)
    assert row["empty_later"] == pytest.approx(0.1)
    assert row["pool_reserved"] == pytest.approx(0.275)
    assert row["pool_held"] == pytest.approx(0.2375)


def replay(kv_waste: ModuleType, manager: str, lengths: list[tuple[int, int]]) -> Any:
    case = kv_waste.Case(manager, 4, 16)
    return kv_waste.run(case, lengths, kv_waste.Limits(64, 32, 8))


def test_a_replay_of_one_request(kv_waste: ModuleType) -> None:
    """6 prompt tokens and 4 new ones: steps with 6, 7, 8 and 9 tokens in the cache."""
    paged = replay(kv_waste, "paged", [(6, 4)])
    assert (paged["steps"], paged["served"], paged["refused"]) == (4, 1, 0)
    assert paged["empty"] == pytest.approx((2 / 8 + 1 / 8 + 0 + 3 / 12) / 4)
    assert paged["empty_never"] == pytest.approx((3 / 12) / 4)
    contiguous = replay(kv_waste, "contiguous", [(6, 4)])
    assert contiguous["empty"] == pytest.approx((10 + 9 + 8 + 7) / 16 / 4)
    assert contiguous["empty_never"] == pytest.approx(7 / 16)
    assert contiguous["pool_reserved"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("manager", ["paged", "radix", "contiguous"])
def test_a_replay_ends_all_that_fit(kv_waste: ModuleType, manager: str) -> None:
    lengths = [(1 + 5 * index % 11, 1 + 3 * index % 8) for index in range(40)]
    row = replay(kv_waste, manager, lengths)
    too_long = sum(prompt + completion > 16 for prompt, completion in lengths)
    assert (row["served"], row["refused"]) == (40 - too_long, too_long)
    assert too_long > 0
    assert 0 < row["mean_running"] <= (4 if manager == "contiguous" else 8)


def test_the_pool_is_what_is_left_of_a_gpu(kv_waste: ModuleType) -> None:
    assert kv_waste.pool_slots() == 56_152  # (72 GB - 26 GB) / 800 KiB
    assert len(kv_waste.read_lengths(kv_waste.TRACE)) == 19_366


def test_traces_of_any_columns_and_packing(kv_waste: ModuleType, tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023,374,44\n2023,396,109\n"
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        assert kv_waste.read_lengths(path) == [(374, 44), (396, 109)]


@pytest.mark.parametrize(("num_prompt", "peak", "copies"), [(512, 48, 0), (520, 52, 3)])
@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_four_completions_share_their_prompt(
    fork_blocks: ModuleType, model: str, manager: str, num_prompt: int, peak: int, copies: int
) -> None:
    """32 shared blocks, and tails for 63 more tokens: 4 each, or 5 with half a block before."""
    prompt = fork_blocks.make_prompt(num_prompt, 250)
    row = fork_blocks.measure_group(model, manager, prompt, 64)
    assert (row["peak_blocks"], row["copies"]) == (peak, copies)
    assert row["peak_blocks_independent"] == 4 * (32 + (peak - 32) // 4)
    assert row["copies_independent"] == row["blocks_left"] == 0
    assert row["different_completions"] == 4


@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_forks_of_a_running_request(fork_blocks: ModuleType, model: str, manager: str) -> None:
    """Forked at 68 tokens, inside a block, and at 80, at the end of one; the script compares
    tokens and contents."""
    prompt = fork_blocks.make_prompt(60, 250)
    rows, blocks_left = fork_blocks.measure_beams(model, manager, prompt, [8, 12, 9])
    assert blocks_left == 0
    seen = [(row["computed_at_fork"], row["peak_blocks"], row["copies"]) for row in rows]
    assert seen == [(68, 4 + 4 * 1, 3), (80, 5 + 4 * 1, 0)]
    assert all(row["different_branches"] == 4 for row in rows)


def test_wrong_contents_after_a_fork_are_seen(
    fork_blocks: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that are never carried out leave the writers with somebody else's tokens."""
    execute = ModelRunner.execute
    monkeypatch.setattr(
        ModelRunner, "execute", lambda runner, inputs, moves=(): execute(runner, inputs)
    )
    prompt = fork_blocks.make_prompt(60, 250)
    with pytest.raises(RuntimeError, match=r"other tokens than|differs by"):
        fork_blocks.measure_beams(model, "paged", prompt, [8, 12])


def test_turns_of_a_conversation(
    chat_turns: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tokenizer of one token per byte, all that lies in full blocks is reused."""
    monkeypatch.setattr(chat_turns, "QUESTIONS", ("What is {0}?", "Why?", "Since when?"))
    engines = {
        name: chat_turns.LLM(model, max_num_seqs=2, device="cpu", **options)
        for name, options in chat_turns.ENGINES.items()
    }
    chat = chat_turns.converse(engines, "snow", 4, 0)
    for turn in chat:
        assert turn["off"].computed_tokens == turn["off"].prompt_tokens
        for name in ("paged", "radix"):
            one = turn[name]
            assert one.computed_tokens + one.cached_tokens == one.prompt_tokens
            assert one.reused_blocks == one.cached_tokens // 16
    assert [turn["paged"].cached_tokens > 0 for turn in chat] == [False, True, True]
    rows = chat_turns.summarise([chat, chat])
    assert [(row["turn"], row["engine"]) for row in rows[:4]] == [
        (1, "off"),
        (1, "paged"),
        (1, "radix"),
        (2, "off"),
    ]
    assert rows[4]["cached_tokens"] == chat[1]["paged"].cached_tokens
