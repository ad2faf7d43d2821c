"""Reproducers of wrong backends, run where Jackfield cannot be imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.reproducer_examples import CASE, CPU, EXAMPLES, violation_of
from support.wrong_backends import Nudged

from jackfield.conformance.attention.cases import build
from jackfield.conformance.attention.laws_memory import WriteKv
from jackfield.conformance.attention.reproducer import reproducer_name, write_reproducer
from jackfield.conformance.attention.reproducer_record import record_violation
from jackfield.conformance.attention.subject import LawViolation, Subject, same_bits

#: Runs every file of a folder in one process that refuses to import anything but torch's needs.
RUN_ALL = """
import contextlib, io, json, pathlib, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jackfield":
            raise ImportError("jackfield is not here")

sys.meta_path.insert(0, Refuse())
results = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        results[path.stem] = [end.code, output.getvalue()]
assert not [name for name in sys.modules if name.split(".")[0] == "jackfield"]
print(json.dumps(results))
"""

RIGHT_FORWARD = """
    lse = torch.full(out.shape[:2], 7.0)
    starts = query_start_loc.tolist()
    for s, n in enumerate(seq_lens.tolist()):
        first, end = starts[s], starts[s + 1]
        slots = [
            int(block_table[s, j // block_size]) * block_size + j % block_size for j in range(n)
        ]
        group = num_heads // num_kv_heads
        keys = k_cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1) * k_scale
        values = v_cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1) * v_scale
        for row in range(first, end):
            p = n - end + row
            seen = [j for j in range(n) if j <= p or not causal]
            seen = [j for j in seen if sliding_window is None or j > p - sliding_window]
            scores = scale * (query[row].double() * keys[seen]).sum(dim=2)
            if logits_soft_cap is not None:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            if alibi_slopes is not None:
                distances = p - torch.tensor(seen, dtype=torch.float64)
                scores = scores - torch.tensor(alibi_slopes).double() * distances[:, None]
            lse[row] = torch.logsumexp(scores, dim=0) if seen else -math.inf
            total = torch.exp(scores).sum(dim=0)
            if sinks is not None:
                total = total + torch.exp(sinks.double())
            weights = torch.exp(scores) / total
            out[row] = (weights[..., None] * values[seen]).sum(dim=0)
    return out, lse
"""

RIGHT_WRITE = """
    if kv_dtype == torch.float8_e4m3fn:
        key = (key.float() / torch.tensor(k_scale)).clamp(-448, 448)
        value = (value.float() / torch.tensor(v_scale)).clamp(-448, 448)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            k_cache[slot // block_size, slot % block_size] = key[token].to(kv_dtype)
            v_cache[slot // block_size, slot % block_size] = value[token].to(kv_dtype)
    return k_cache, v_cache
"""


@dataclass(frozen=True)
class Run:
    """A reproducer's text, and what it printed as written and with a right kernel."""

    text: str
    violation: LawViolation
    status: int
    output: str
    right_status: int
    right_output: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("reproducers")
    violations = {}
    for name, example in EXAMPLES.items():
        case, violations[name] = violation_of(example)
        path = folder / f"{name}.py"
        subject = Subject(example.backend, CPU)
        write_reproducer(path, example.law, subject, case, violations[name])
        text = path.read_text()
        right = RIGHT_WRITE if "def kernel(key" in text else RIGHT_FORWARD
        assert text.count("\n    return None\n") >= 1
        path.with_name(f"{name}.right.py").write_text(text.replace("\n    return None\n", right, 1))
    finished = subprocess.run(
        [sys.executable, "-I", "-c", RUN_ALL, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    printed = json.loads(finished.stdout)
    return {
        name: Run(
            (folder / f"{name}.py").read_text(),
            violations[name],
            *printed[name],
            *printed[f"{name}.right"],
        )
        for name in EXAMPLES
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_fault_shows(name: str, runs: dict[str, Run]) -> None:
    run, lines = runs[name], runs[name].output.splitlines()
    assert run.status == 1
    assert lines[-1].startswith("FAULT")
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"Law: {EXAMPLES[name].law.name}: ")
    recorded = "put your kernel in" not in lines[-1]
    assert recorded == EXAMPLES[name].recorded


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_right_kernel_shows_no_fault(name: str, runs: dict[str, Run]) -> None:
    assert runs[name].right_status == 0, runs[name].right_output
    assert runs[name].right_output.splitlines()[-1].startswith("No fault: ")


def cells(output: str, after: str) -> list[list[str]]:
    """The rows of the table that follows a line which begins like that."""
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(after))
    header = lines[start + 1].split()
    assert header[3:] == ["head", "element", "expected", "actual", "error", "bound"]
    rows = []
    for line in lines[start + 2 :]:
        if not re.match(r" *\d+ ", line) or "wrong" in line:
            break
        rows.append(line.split())
    assert rows
    return rows


@pytest.mark.parametrize(
    "name",
    [name for name in EXAMPLES if name.startswith(("meaning", "lse", "chunks", "shared", "fork"))],
)
def test_expected_and_actual_are_those_of_the_violation(name: str, runs: dict[str, Run]) -> None:
    violation, what = runs[name].violation, "lse" if name == "lse" else "out"
    assert violation.data is not None
    assert violation.result is not None
    assert violation.expected is not None
    result = violation.result.lse if what == "lse" else violation.result.out
    expected = getattr(violation.expected, what)
    bounds = getattr(violation.expected, f"{what}_bound")
    assert result is not None
    starts = violation.data.batch.query_start_loc_cpu.tolist()
    for row, sequence, position, head, element, right, actual, _, bound in cells(
        runs[name].output, f"{what} against definition"
    ):
        at = (int(row), int(head), int(element))[: expected.dim()]
        assert float(right) == pytest.approx(float(expected[at]), rel=1e-6)
        assert float(actual) == pytest.approx(float(result[at]), rel=1e-6)
        assert float(bound) == pytest.approx(float(bounds[at]), rel=1e-2)
        assert starts[int(sequence)] <= int(row) < starts[int(sequence) + 1]
        length = int(violation.data.batch.seq_lens_cpu[int(sequence)])
        assert int(position) == length - starts[int(sequence) + 1] + int(row)


@pytest.mark.parametrize(
    "name", [name for name, example in EXAMPLES.items() if issubclass(example.backend, Nudged)]
)
def test_two_runs_are_recorded_bit_for_bit(name: str, runs: dict[str, Run]) -> None:
    violation = runs[name].violation
    assert violation.result is not None
    out = violation.result.out
    rows = cells(runs[name].output, "out against first run")
    assert "against definition" not in runs[name].output
    for row, _, _, head, element, first, second, _, *bound in rows:
        actual = out[int(row), int(head), int(element)]
        assert float(second) == pytest.approx(float(actual), rel=1e-6)
        assert float(first) == pytest.approx(float(actual), rel=1e-5)
        assert bound == ["same", "bits"]


def test_slots_that_were_written_are_named(runs: dict[str, Run]) -> None:
    (slot, block, offset, *_), *_ = cells(runs["write_kv"].output, "k_cache against write_kv")
    assert (slot, block, offset) == ("0", "0", "0")
    (slot, block, offset, *_, error, _, _) = cells(
        runs["nothing_else_cache"].output, "k_cache against before the call"
    )[0]
    assert (slot, block, offset) == ("6", "1", "2")
    assert float(error) > 0.9


def test_rows_that_nobody_may_write_or_nobody_wrote_are_named(runs: dict[str, Run]) -> None:
    row, sequence, *_, expected, actual, _, _, _ = cells(
        runs["nothing_else_padding"].output, "out against before the call"
    )[0]
    assert (row, sequence, expected, actual) == ("8", "-", "7", "0")
    output = runs["nothing_else_unwritten"].output
    assert all(row[6] == "7" for row in cells(output, "out against definition"))
    assert "sequence 0: wrong rows 0-2" in output


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_is_small_and_names_what_matters(name: str, runs: dict[str, Run]) -> None:
    text = runs[name].text
    assert len(text) < 60_000
    assert max(map(len, text.splitlines())) <= 100
    assert "import jackfield" not in text
    assert "from jackfield" not in text
    docstring = " ".join(text.split('"""')[1].split())
    assert EXAMPLES[name].law.title() in docstring
    assert f"torch {torch.__version__}" in docstring
    assert " ".join(str(runs[name].violation).split())[:60] in docstring


def test_laws_change_inputs_by_name_where_they_can(runs: dict[str, Run]) -> None:
    assert "return permute_blocks(inputs, seed + 1)" in runs["block_permutation"].text
    assert "return spoil(inputs, sliding_window, seed + 2, 1e30)" in runs["unseen_slots"].text
    assert "return fused_rows(inputs)" in runs["strided_rows"].text
    assert "\nseed = 4\n" in runs["layers"].text
    assert "CHANGED" not in runs["layers"].text
    assert "CHANGED_K_CACHE" in runs["nonfinite_slots"].text
    assert "query=torch.cat([inputs.query, MORE_ROWS.values])" in runs["padding_rows"].text


@pytest.mark.parametrize("name", EXAMPLES)
def test_inputs_are_those_of_the_suite(name: str) -> None:
    example = EXAMPLES[name]
    subject = Subject(example.backend, CPU)
    case, violation = violation_of(example)
    record = record_violation(example.law, subject, case, violation)
    made = record.functions()["make_inputs"]()
    data = build(record.source.case, subject.capabilities.kv_layout, CPU)
    for tensor, right in (
        (made.query, data.query),
        (made.k_cache, data.cache.k),
        (made.v_cache, data.cache.v),
        (made.block_table, data.batch.block_table),
        (made.slot_mapping, data.batch.slot_mapping),
        (made.key, data.key),
        (made.value, data.value),
    ):
        assert same_bits(tensor, right)
        assert tensor.stride() == right.stride()


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
def test_text_is_formatted(runs: dict[str, Run], tmp_path: Path) -> None:
    for name, run in runs.items():
        (tmp_path / f"{name}.py").write_text(run.text)
    for arguments in (["check", "--select", "E,F,I,N,UP,W,B"], ["format", "--diff"]):
        options = ["--isolated", "--line-length", "100", "--target-version", "py310"]
        finished = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, *options, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr


def test_names_are_stable_and_safe() -> None:
    name = reproducer_name(WriteKv(), "neighbour/written", torch.float32, CASE)
    assert re.fullmatch(r"neighbour_written_write_kv_float32_[0-9a-f]{8}\.py", name)
    assert name == reproducer_name(WriteKv(), "neighbour/written", torch.float32, replace(CASE))
    other = replace(CASE, seed=4)
    assert name != reproducer_name(WriteKv(), "neighbour/written", torch.float32, other)
