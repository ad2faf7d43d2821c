"""What ``jackfield generate`` says of settings that contradict or work badly, on standard error."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
from support.tiny_models import make_tiny_llama

from jackfield.entrypoints import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory)
    return directory


@pytest.fixture(autouse=True)
def _own_logger() -> None:
    """The command sets up the logger: begin without handlers of an earlier one."""
    logging.getLogger("jackfield").handlers.clear()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of ``jackfield generate ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["jackfield", "generate", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "400")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


WARNINGS = [
    (
        ["--long-prefill-token-threshold", 1],
        "long_prefill_token_threshold=1 computes prompts one token per step, as slowly as "
        "completions are generated; values from 128 on cost little",
    ),
    (
        ["--long-prefill-token-threshold", 300, "--max-num-batched-tokens", 256],
        "long_prefill_token_threshold=300 limits nothing, as it is not below "
        "max_num_batched_tokens=256; lower the one or raise the other",
    ),
    (
        ["--max-num-batched-tokens", 16, "--max-num-seqs", 32],
        "max_num_batched_tokens=16 is below max_num_seqs=32: so many requests cannot decode in "
        "one step; raise max_num_batched_tokens",
    ),
    (
        ["--swap-space", "1MiB"],
        "swap_space=1.00 MiB is taken from host memory and never used: preemption_mode="
        "'recompute' computes victims anew, and the scheduling policy 'fcfs' asks for no swap",
    ),
    (
        ["--preemption-mode", "auto", "--device", "cpu"],
        "preemption_mode='auto' computes every victim anew, as there is no swap space",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), WARNINGS)
def test_a_warning_is_printed_and_the_completion_too(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[object],
    sentence: str,
) -> None:
    limits = ["--model", model, "--max-tokens", 3, "--num-gpu-blocks-override", 64]
    assert run(monkeypatch, *limits, *flags, "abc") == 0
    printed = capsys.readouterr()
    assert "> abc" in printed.out
    said = re.sub(r"\s+", " ", printed.err)
    assert said.count("WARNING") == 1
    assert sentence in said


def test_a_bound_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--watermark", 2, "abc") == 1
    assert capsys.readouterr().err.strip() == (
        "error: watermark=2.0 (from flag --watermark) is wrong: it must be a number that is at "
        "least 0 and below 1"
    )
