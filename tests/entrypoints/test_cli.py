"""The command line, in this process: output, exit status, and one clear line for each error."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from support.tiny_models import make_tiny_llama, write_tiny_gguf

from jackfield.core.config import EngineOptions
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
    """The exit status of ``jackfield ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["jackfield", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_generate(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "--model", model, "--max-tokens", 5, "abc", "def") == 0
    printed = capsys.readouterr()
    assert "> abc" in printed.out
    assert "> def" in printed.out
    assert "tokens/s" in printed.err
    assert "KV cache" in printed.err


def test_generate_with_one_bad_prompt(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", model, "--max-tokens", 5, "--json", "--ignore-eos"]
    assert run(monkeypatch, "generate", *flags, "abc", "", "x" * 70) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows[0]["outputs"][0]["token_ids"]) == 5
    assert "is empty" in rows[1]["error"]
    assert "70 tokens" in rows[2]["error"]


def test_chat_template_flag(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", model, "--max-tokens", 2, "--json"]
    run(monkeypatch, "generate", *flags, "hi")
    plain = json.loads(capsys.readouterr().out)
    run(monkeypatch, "generate", *flags, "--chat", "hi")
    templated = json.loads(capsys.readouterr().out)
    assert templated["num_prompt_tokens"] > plain["num_prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--attention-backend", "flash"], "attention_backend='flash'"),
        (["--dtype", "int8"], "dtype"),
        (["--temperature", "nan"], "temperature=nan must be at least 0"),
        (["--max-tokens", "0"], "max_tokens=0 must be at least 1"),
        (["--n", "0"], "n=0 must be at least 1"),
        (["--stop", ""], "a stop string needs at least 1 character"),
        (["--max-model-len", "100"], "max_model_len=100 is above the 64 tokens"),
        (["--kv-cache-memory", "lots"], "'lots'"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (["--scheduling-policy-options", "{"], "scheduling_policy_options"),
    ],
)
def test_errors_are_one_line(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    part: str,
) -> None:
    assert run(monkeypatch, "generate", "--model", model, *arguments, "abc") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert part in printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_unknown_option_and_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "--max-model-length", "5", "abc") == 2
    assert "--max-model-len" in capsys.readouterr().err
    assert run(monkeypatch, "genrate") == 2
    assert "genrate" in capsys.readouterr().err


def test_models_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = make_tiny_llama(tmp_path / "cut")
    write_tiny_gguf(tmp_path / "other.gguf", reference, arch="mamba")
    (weights,) = (tmp_path / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    for name, part in (("cut", weights.name), ("other.gguf", "mamba"), ("gone", "gone")):
        assert run(monkeypatch, "generate", "--model", tmp_path / name, "abc") == 1
        message = capsys.readouterr().err
        assert part in message
        assert "Traceback" not in message


def test_chat_reads_standard_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/reset\n/what\n" + "x" * 70 + "\n/exit\n"))
    assert run(monkeypatch, "chat", "--model", model, "--max-tokens", 4, "--temperature", 0) == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert "the conversation is forgotten" in printed.err
    assert "/exit or Ctrl-D leaves" in printed.err
    assert "max_model_len=64" in printed.err


def test_every_setting_is_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "--help") == 0
    text = capsys.readouterr().out
    for name in EngineOptions.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_debug_log_has_a_line_per_step(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JACKFIELD_LOGGING_LEVEL", "DEBUG")
    flags = ["--model", model, "--max-tokens", 3, "--ignore-eos"]
    assert run(monkeypatch, "generate", *flags, "abc", "defgh") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "step " in line]
    assert len(lines) == 3
    assert "8 tokens" in lines[0]
    assert "[1.0:3 1.1:5]" in lines[0]
    assert "[1.0:1 1.1:1]" in lines[1]
    for line in lines:
        assert "running" in line
        assert "waiting 0" in line
        assert "swapped 0" in line
        assert "blocks 2/" in line
    monkeypatch.setenv("JACKFIELD_LOGGING_LEVEL", "LOUD")
    assert run(monkeypatch, "generate", *flags, "abc") == 1
    assert "LOUD" in capsys.readouterr().err


def test_explain_and_plugins(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "explain", model) == 0
    assert "torch_sdpa" in capsys.readouterr().out
    assert run(monkeypatch, "explain", model, "--json", "--block-manager", "none-such") == 1
    assert json.loads(capsys.readouterr().out)["problems"]
    assert run(monkeypatch, "plugins") == 0
    assert "builtin" in capsys.readouterr().out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "version") == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"jackfield", "torch"}
