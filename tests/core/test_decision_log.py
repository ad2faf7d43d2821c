"""The decision log: one stable line per step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.core.block_manager import BlockCopy
from jackfield.core.decision_log import DecisionLog, decision_record
from jackfield.core.errors import ConfigError
from jackfield.core.scheduler import KVMove, MoveKind, ScheduledRequest, StepPlan


def test_a_record_says_everything_that_was_decided() -> None:
    copies = (BlockCopy(1, 2), BlockCopy(3, 4))
    plan = StepPlan(
        7,
        (ScheduledRequest("a", 30, 1, True), ScheduledRequest("b", 16, 8, False)),
        preempted=("c", "d"),
        swapped_out=("d",),
        swapped_in=("e",),
        forked=(("a", "a2"),),
        prefix_hits=(("b", 16),),
        moves=(
            KVMove(MoveKind.SWAP_OUT, copies),
            KVMove(MoveKind.SWAP_IN, copies[:1]),
            KVMove(MoveKind.COPY, copies),
            KVMove(MoveKind.COPY, copies[:1]),
        ),
        clipped=("something",),
    )
    assert decision_record(plan, {"a": "stop"}, ["x"]) == (
        '{"step":7,"scheduled":[["a",30,1],["b",16,8]],'
        '"preempted":[["c","recompute"],["d","swap"]],"swapped_in":["e"],"forked":[["a","a2"]],'
        '"prefix_hits":[["b",16]],"out":2,"in":1,"copies":3,"clipped":1,'
        '"finished":[["a","stop"]],"aborted":["x"]}'
    )
    assert decision_record(StepPlan(0, ()), {}) == '{"step":0}'


def test_a_file_is_emptied_first_and_gets_a_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("from another run\n", encoding="utf-8")
    log = DecisionLog(path)
    log.record(StepPlan(0, (ScheduledRequest("a", 0, 4, True),)), {})
    log.note_aborted(["b"])
    log.record(StepPlan(1, ()), {})
    log.record(StepPlan(2, ()), {})
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"step": 0, "scheduled": [["a", 0, 4]]},
        {"step": 1, "aborted": ["b"]},
        {"step": 2},
    ]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decision_log='.*missing.*' cannot be written"):
        DecisionLog(tmp_path / "missing" / "log.jsonl")
