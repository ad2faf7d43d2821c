"""Batch assembly against a token-by-token model of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.batch import BatchAssembler
from jackfield.core.block_manager import (
    Allocation,
    AllocationStatus,
    BlockCopy,
    BlockManager,
    BlockManagerConfig,
    BlockTable,
    BlockUsage,
)
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import KVMove, MoveKind, ScheduledRequest, StepPlan

MAX_LEN = 24
CPU = torch.device("cpu")


class ScriptedManager(BlockManager):
    """Gives the tables that the test wrote down."""

    name = "scripted"

    def __init__(self, tables: dict[str, list[int]], block_size: int) -> None:
        super().__init__(BlockManagerConfig(1000, block_size, MAX_LEN))
        self.tables = tables
        self.num_reads = 0

    def block_table(self, request_id: str) -> BlockTable:
        self.num_reads += 1
        return np.array(self.tables[request_id], np.int32)

    def can_allocate(
        self, token_ids: object, num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        raise NotImplementedError

    def allocate(
        self, request_id: str, token_ids: object, num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        raise NotImplementedError

    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        raise NotImplementedError

    def free(self, request_id: str) -> None:
        raise NotImplementedError

    def usage(self) -> BlockUsage:
        raise NotImplementedError

    def largest_request(self) -> int:
        raise NotImplementedError


@dataclass
class World:
    block_size: int
    requests: dict[str, Request]
    manager: ScriptedManager
    plan: StepPlan


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    ids = draw(st.permutations(range(400)))
    requests, tables, scheduled = {}, {}, []
    for index in range(draw(st.integers(1, 5))):
        num_tokens = draw(st.integers(1, MAX_LEN))
        tokens = draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))
        num_prompt = draw(st.integers(1, num_tokens))
        request = Request(
            f"r{index}", tokens[:num_prompt], SamplingParams(), 0.0, index, MAX_LEN, seed=index
        )
        request.output_token_ids.extend(tokens[num_prompt:])
        computed = draw(st.integers(0, num_tokens - 1))
        new = draw(st.integers(1, num_tokens - computed))
        requests[request.request_id] = request
        blocks, ids = ids[:MAX_LEN], ids[MAX_LEN:]
        tables[request.request_id] = list(blocks[: -(-num_tokens // block_size)])
        scheduled.append(
            ScheduledRequest(request.request_id, computed, new, computed + new == num_tokens)
        )
    manager = ScriptedManager(tables, block_size)
    return World(block_size, requests, manager, StepPlan(0, tuple(scheduled)))


@settings(deadline=None, max_examples=200)
@given(worlds(), st.integers(0, 3))
def test_assembly(world: World, padding: int) -> None:
    assembler = BatchAssembler(8, MAX_LEN, world.block_size, CPU)
    inputs = assembler.assemble(
        world.plan, world.requests.get, world.manager, lambda num_seqs: num_seqs + padding
    )
    ids, positions, slots, starts, ends = [], [], [], [0], []
    for item in world.plan.scheduled:
        request = world.requests[item.request_id]
        for position in range(
            item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens
        ):
            ids.append(request.token_ids[position])
            positions.append(position)
            block = world.manager.tables[item.request_id][position // world.block_size]
            slots.append(block * world.block_size + position % world.block_size)
        starts.append(len(ids))
        ends.append(item.num_computed_tokens + item.num_new_tokens)
    batch = inputs.attention
    if batch.max_query_len == 1:
        idle = range(len(ids), len(ids) + padding)
        starts += [row + 1 for row in idle]
        for expected, value in ((ids, 0), (positions, 0), (slots, -1), (ends, 0)):
            expected += [value] * padding
        assert batch.block_table[len(world.plan.scheduled) :].tolist() == [
            [0] * batch.block_table.shape[1] for _ in idle
        ]
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_start_loc.tolist() == starts
    assert batch.seq_lens.tolist() == ends
    assert batch.max_query_len == max(b - a for a, b in pairwise(starts))
    assert batch.max_seq_len == max(ends)
    for row, item in enumerate(world.plan.scheduled):
        table = world.manager.tables[item.request_id][: -(-ends[row] // world.block_size)]
        assert batch.block_table[row, : len(table)].tolist() == table
    sampling = [row for row, item in enumerate(world.plan.scheduled) if item.samples]
    assert inputs.sample_indices.tolist() == [starts[row + 1] - 1 for row in sampling]
    assert inputs.sampled_ids == tuple(world.plan.scheduled[row].request_id for row in sampling)
    assert (inputs.sampling is None) == (not sampling)


def _decode(step: int, computed: int, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    moves = (KVMove(MoveKind.COPY, copies),) if copies else ()
    return StepPlan(step, (ScheduledRequest("a", computed, 1, True),), moves=moves)


def test_tables_are_read_when_they_grow_or_move() -> None:
    request = Request("a", [5, 6, 7], SamplingParams(), 0.0, 0, MAX_LEN)
    manager = ScriptedManager({"a": [9, 4]}, block_size=2)
    assembler = BatchAssembler(2, MAX_LEN, 2, CPU)
    find = {"a": request}.get
    prefill = StepPlan(0, (ScheduledRequest("a", 0, 3, True),))
    assembler.record(assembler.assemble(prefill, find, manager), [41])
    inputs = assembler.assemble(_decode(1, 3), find, manager)
    assert inputs.input_ids.tolist() == [41]
    assert inputs.attention.slot_mapping.tolist() == [4 * 2 + 1]
    assert manager.num_reads == 1, "the table has not grown"
    manager.tables["a"] = [9, 8, 1]
    moved = _decode(2, 4, copies=(BlockCopy(4, 8),))
    assert assembler.assemble(moved, find, manager).attention.block_table.tolist() == [[9, 8, 1]]


def test_a_preempted_request_starts_over() -> None:
    """Its row is given up, and made anew from prompt and completion."""
    request = Request("a", [5, 6], SamplingParams(), 0.0, 0, MAX_LEN)
    manager = ScriptedManager({"a": [3], "b": [7, 2]}, block_size=2)
    assembler = BatchAssembler(1, MAX_LEN, 2, CPU)
    first = StepPlan(0, (ScheduledRequest("a", 0, 2, True),))
    assembler.assemble(first, {"a": request}.get, manager)
    request.append_token(8)
    other = Request("b", [1, 2], SamplingParams(), 0.0, 1, MAX_LEN)
    second = StepPlan(1, (ScheduledRequest("b", 0, 2, True),), preempted=("a",))
    for request_id in second.preempted:
        assembler.release(request_id)
    assembler.assemble(second, {"a": request, "b": other}.get, manager)
    assembler.release("b")
    manager.tables["a"] = [6, 1]
    resumed = StepPlan(2, (ScheduledRequest("a", 0, 3, True),))
    inputs = assembler.assemble(resumed, {"a": request}.get, manager)
    assert inputs.input_ids.tolist() == [5, 6, 8]
    assert inputs.attention.slot_mapping.tolist() == [12, 13, 2]


def test_faults_of_other_parts_are_named() -> None:
    request = Request("a", [5, 6, 7], SamplingParams(), 0.0, 0, MAX_LEN)
    manager = ScriptedManager({"a": [9]}, block_size=2)
    assembler = BatchAssembler(1, MAX_LEN, 2, CPU)
    plan = StepPlan(0, (ScheduledRequest("a", 0, 3, True),))
    with pytest.raises(RuntimeError, match="'scripted' gave 1 blocks for 3 tokens; 2 are needed"):
        assembler.assemble(plan, {"a": request}.get, manager)
    unknown = StepPlan(0, (ScheduledRequest("x", 0, 3, True),))
    with pytest.raises(RuntimeError, match="planned 'x', which is no live request"):
        assembler.assemble(unknown, {"a": request}.get, manager)


def test_tokens_that_are_in_the_cache_already_get_no_slot() -> None:
    requests = {
        name: Request(name, [5, 6, 7], SamplingParams(), 0.0, 0, MAX_LEN) for name in ("a", "b")
    }
    manager = ScriptedManager({"a": [9, 4], "b": [9, 4]}, block_size=2)
    assembler = BatchAssembler(2, MAX_LEN, 2, CPU)
    items = (ScheduledRequest("a", 2, 1, True, writes=False), ScheduledRequest("b", 1, 2, True))
    inputs = assembler.assemble(StepPlan(0, items), requests.get, manager)
    assert inputs.attention.slot_mapping.tolist() == [-1, 9 * 2 + 1, 4 * 2]
    assert inputs.input_ids.tolist() == [7, 6, 7]
    assert inputs.attention.seq_lens.tolist() == [3, 3]
