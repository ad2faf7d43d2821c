"""The tables of the page on the KV cache are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import (
    assert_files_of_links,
    assert_has,
    assert_headings_of_links,
    assert_paths,
    local_links,
    one_line,
    results,
    table,
)

PAGE = "kv-cache.md"


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / PAGE).read_text(encoding="utf-8")


def percent(share: float) -> str:
    """Two digits that count where there are few."""
    return f"{100 * share:.{2 if share < 0.1 else 1}f} %"


def assert_table(page: str, columns: str, rows: list[list[str]]) -> None:
    """The first column is text."""
    assert_has(page, table(columns.split(" | "), rows, numbers=True))


@pytest.mark.parametrize("name", ["kv_waste", "fork_blocks", "chat_turns", "scheduling_cost"])
def test_results_say_how_they_were_made(page: str, repository: Path, name: str) -> None:
    report = results(repository, name)
    assert re.match(rf"python benchmarks/{name}\.py\b", report["command"])
    assert f"`{report['command']}`" in page, report["command"]
    assert set(report["versions"]) == {"python", "torch", "jackfield"}
    assert report["machine"]["cores"] > 0


def test_waste(page: str, repository: Path) -> None:
    report = results(repository, "kv_waste")
    columns = (
        "block manager | block size | `max_model_len` | left out | empty | later | never "
        "| pool in use | running | steps | preemptions"
    )
    rows = [
        [
            f"`{row['manager']}`",
            f"{row['block_size']}",
            f"{row['max_model_len']}",
            f"{row['refused']:,}",
            percent(row["empty"]),
            percent(row["empty_later"]),
            percent(row["empty_never"]),
            percent(row["pool_held"]),
            f"{row['mean_running']:.1f}",
            f"{row['steps']:,}",
            f"{row['preemptions']:,}",
        ]
        for row in report["rows"]
    ]
    assert len(rows) == 9
    assert_table(page, columns, rows)
    limits = report["limits"]
    text = one_line(page)
    assert (
        f"{report['requests']:,} requests with {report['prompt_tokens']:,} prompt tokens and "
        f"{report['generated_tokens']:,} generated ones; the longest has "
        f"{report['longest_request']:,} tokens" in text
    )
    assert f"{limits['pool_slots']:,} slots" in text
    assert f"`max_num_batched_tokens={limits['max_num_batched_tokens']}`" in text
    assert f"`max_num_seqs={limits['max_num_seqs']}`" in text


def test_waste_is_below_that_of_the_paper_and_of_reservations(repository: Path) -> None:
    rows = results(repository, "kv_waste")["rows"]
    paged = [row for row in rows if row["manager"] in ("paged", "radix")]
    assert all(row["empty"] < 0.04 for row in paged)
    for row in rows:
        assert row["served"] + row["refused"] == results(repository, "kv_waste")["requests"]
        if row["manager"] == "contiguous":
            (same,) = [
                other
                for other in rows
                if other["manager"] == "paged"
                and (other["block_size"], other["max_model_len"])
                == (row["block_size"], row["max_model_len"])
            ]
            assert same["refused"] == row["refused"]
            assert same["empty"] * 50 < row["empty"]
            assert same["steps"] < row["steps"]


def test_groups(page: str, repository: Path) -> None:
    report = results(repository, "fork_blocks")
    columns = (
        "block manager | prompt tokens | peak blocks, shared | peak blocks, independent | copies"
    )
    rows = [
        [
            f"`{row['block_manager']}`",
            f"{row['prompt_tokens']}",
            f"{row['peak_blocks']}",
            f"{row['peak_blocks_independent']}",
            f"{row['copies']}",
        ]
        for row in report["groups"]
    ]
    assert_table(page, columns, rows)


def test_groups_use_the_blocks_that_arithmetic_says(repository: Path) -> None:
    report = results(repository, "fork_blocks")
    size = report["block_size"]
    assert {(row["block_manager"], row["prompt_tokens"]) for row in report["groups"]} == {
        (manager, length) for manager in ("paged", "radix") for length in (512, 520)
    }
    for row in report["groups"]:
        written = row["prompt_tokens"] + row["new_tokens"] - 1
        shared, each = row["prompt_tokens"] // size, -(-written // size)
        assert row["peak_blocks"] == shared + 4 * (each - shared)
        assert row["peak_blocks_independent"] == 4 * each
        assert row["copies"] == (3 if row["prompt_tokens"] % size else 0)
        assert row["copies_independent"] == row["blocks_left"] == 0
        assert row["different_completions"] == row["n"] == 4


def test_beams(page: str, repository: Path) -> None:
    report = results(repository, "fork_blocks")
    size = report["block_size"]
    columns = (
        "block manager | round | tokens at the fork | tokens at the end | peak blocks | copies"
    )
    rows = []
    for row in report["beams"]:
        shared, each = row["computed_at_fork"] // size, -(-row["computed_at_end"] // size)
        assert row["peak_blocks"] == shared + 4 * (each - shared)
        assert row["copies"] == (3 if row["computed_at_fork"] % size else 0)
        assert row["branches"] == row["different_branches"] == 4
        names = ("round", "computed_at_fork", "computed_at_end", "peak_blocks", "copies")
        rows.append([f"`{row['block_manager']}`", *(f"{row[name]}" for name in names)])
    assert {row["copies"] for row in report["beams"]} == {0, 3}
    assert report["blocks_left_after_beams"] == 0
    assert_table(page, columns, rows)
    largest = max(row["largest_difference"] for row in report["beams"])
    assert f"differ by at most {largest:.1g}" in one_line(page)


def test_chat(page: str, repository: Path) -> None:
    report = results(repository, "chat_turns")
    num_chats = len(report["chats"])
    by_turn: dict[int, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        by_turn.setdefault(row["turn"], {})[row["engine"]] = row
    rows = []
    for turn, engines in by_turn.items():
        off, paged, radix = engines["off"], engines["paged"], engines["radix"]
        counts = ("prompt_tokens", "cached_tokens", "reused_blocks", "computed_tokens")
        assert [paged[name] for name in counts] == [radix[name] for name in counts]
        assert off["computed_tokens"] == off["prompt_tokens"] == paged["prompt_tokens"]
        assert paged["reused_blocks"] * report["block_size"] == paged["cached_tokens"]
        numbers = (*(paged[name] for name in counts), off["first_token_ms"])
        times = (paged["first_token_ms"], radix["first_token_ms"])
        rows.append([f"{turn}", *(f"{number:.0f}" for number in (*numbers, *times))])
    assert len(rows) == 8
    assert report["turns_with_equal_answers"] == report["turns_compared"] == 8 * num_chats
    columns = (
        "turn | prompt tokens | cached | blocks reused | computed | first token, off, ms "
        "| `paged`, ms | `radix`, ms"
    )
    assert_table(page, columns, rows)
    conversations = "1 conversation" if num_chats == 1 else f"{num_chats} conversations"
    assert f"{conversations} of eight turns" in one_line(page)
    assert f"at most {report['max_tokens']} tokens" in page


def test_scheduling_cost(page: str, repository: Path) -> None:
    report = results(repository, "scheduling_cost")
    rows = [
        [
            f"{row['running']:,}",
            f"{row['waiting']:,}",
            *(f"{row[name]:.0f}" for name in ("schedule", "update", "step", "step_fastest")),
        ]
        for row in report["rows"]
    ]
    assert {(row["running"], row["waiting"]) for row in report["rows"]} == {
        (running, waiting) for running in (16, 256, 1024) for waiting in (0, 10_000, 100_000)
    }
    columns = "running | waiting | schedule, us | update, us | step, us | fastest step, us"
    assert_table(page, columns, rows)
    assert f"median of {report['steps']} steps" in one_line(page)


def test_links_lead_somewhere(repository: Path) -> None:
    path = repository / "docs" / PAGE
    assert len(local_links(path)) >= 8
    assert_files_of_links(path, folders=False)
    assert_headings_of_links(path)
    assert_paths(path, repository)
