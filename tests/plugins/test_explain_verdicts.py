"""What ``jackfield explain`` says of five models: on a GPU, recorded, and on a CPU, asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.published_configs import CONFIGS
from support.verdict_tables import cpu_table, gpu_table, of_explanation
from typer.testing import CliRunner

from jackfield.backends._library import Library
from jackfield.entrypoints.cli import app

Ask = Callable[..., dict[str, Any]]

#: For each model the reasons against each backend on CUDA; those that are not named are usable.
REFUSED_ON_CUDA: dict[str, dict[str, tuple[str, ...]]] = {
    "Qwen2.5-7B": {},
    "Gemma-2-9B": {
        "flash_attn_4": ("logits_soft_cap=50.0 is not supported",),
        "torch_varlen": ("logits_soft_cap=50.0 is not supported",),
        "xformers": (
            "sliding_window=4096 is not supported",
            "logits_soft_cap=50.0 is not supported",
        ),
        "xformers_cutlass": ("logits_soft_cap=50.0 is not supported",),
    },
    "Llama-3-8B": {},
    "Phi-3-mini": {
        "flashinfer": ("head_size=96 is not supported (supported: 64, 128, 256)",),
        "xformers": (
            "sliding_window=2047 is not supported",
            "head_size=96 is not supported (supported: 16, 32, 64, 128, 256)",
        ),
    },
    "head size 72": {
        "flash_attn_4": (
            "head_size=72 is not supported (supported: 64, 80, 96, 112, 128, 192, 256)",
        ),
        "flashinfer": ("head_size=72 is not supported (supported: 64, 128, 256)",),
        "xformers": ("head_size=72 is not supported (supported: 16, 32, 64, 128, 256)",),
    },
}
NEEDED = {
    "flash_attn": "8.0",
    "flash_attn_4": "9.0",
    "flashinfer": "8.0",
    "torch_varlen": "8.0",
    "triton": "8.0",
    "xformers": "8.0",
    "xformers_cutlass": "8.0",
}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs the command for a model, on a machine that has no GPU and none of the libraries."""

    def load(library: Library) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {library.module!r}")

    monkeypatch.setattr(Library, "version", lambda self: None)
    monkeypatch.setattr(Library, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("JACKFIELD_PLUGINS", "")

    def run(model: str, *flags: str) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
        command = ["explain", str(tmp_path), "--json", *flags]
        result = CliRunner().invoke(app, command)
        told: dict[str, Any] = json.loads(result.stdout)
        assert result.exit_code == (0 if told["ok"] else 1)
        return told

    return run


@pytest.fixture
def recorded(repository: Path) -> dict[str, Any]:
    """What was said on the GPU."""
    text = (repository / "docs" / "explain-h200.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("model", CONFIGS)
def test_on_a_cpu(model: str, ask: Ask) -> None:
    told = ask(model, "--device", "cpu")
    assert told["dtypes"] == ["float32"]
    backends = of_explanation(told)
    verdicts = {name: part["verdict"] for name, part in backends.items()}
    assert verdicts == {
        **dict.fromkeys(NEEDED, "refused"),
        "flex": "usable",
        "torch_sdpa": "chosen",
    }
    for name, needed in NEEDED.items():
        part, against = backends[name], REFUSED_ON_CUDA[model].get(name, ())
        reasons = "; ".join(part["reasons"])
        assert ("TRITON_INTERPRET" if name == "triton" else "device=cpu is not") in reasons
        found = part["elsewhere"]
        assert found["dtypes"] == ["bfloat16"]
        assert (found["usable"], tuple(found["reasons"])) == (not against, against)
        assert found["compute_capability"] == needed
        # Whether its kernels are there, flashinfer asks its library.
        own_check = "judged by its capabilities alone: its own check needs what is missing "
        own_check += "(ModuleNotFoundError: No module named 'flashinfer')"
        assert found["note"] == (own_check if name == "flashinfer" and not against else "")
    assert [backends[name]["elsewhere"] for name in ("flex", "torch_sdpa")] == [None, None]


@pytest.mark.parametrize("model", CONFIGS)
def test_for_a_gpu_that_is_not_here(model: str, ask: Ask) -> None:
    told = ask(model, "--device", "cuda")
    assert not told["ok"]
    assert told["problems"][0] == "device='cuda' is not there: 0 CUDA devices were found"
    assert (told["device"], told["dtypes"]) == ("cuda", ["bfloat16"])
    for name, part in of_explanation(told).items():
        assert part["verdict"] == "refused"
        assert part["reasons"][0] == told["problems"][0]
        against = REFUSED_ON_CUDA[model].get(name, ())
        assert tuple(part["elsewhere"]["reasons"]) == against
        assert part["elsewhere"]["usable"] is not bool(against)
    assert "flash-attn is not installed" in of_explanation(told)["flash_attn"]["reasons"][1]


@pytest.mark.parametrize("model", CONFIGS)
def test_what_a_cpu_says_of_cuda_is_what_the_gpu_said(
    model: str, ask: Ask, recorded: dict[str, Any]
) -> None:
    there = recorded["models"][model]
    here = ask(model, "--device", "cuda")
    assert here["attention"] == there["attention"]
    assert here["note"] == there["note"]
    for name, part in of_explanation(here).items():
        said = there["backends"][name]
        if any("is not installed" in reason for reason in said["reasons"]):
            continue
        found = part["elsewhere"]
        assert found["usable"] is (said["verdict"] != "refused")
        assert found["reasons"] == (said["reasons"] if said["verdict"] == "refused" else [])


def test_the_page_shows_what_was_said(ask: Ask, recorded: dict[str, Any], repository: Path) -> None:
    page = (repository / "docs" / "explain-verdicts.md").read_text(encoding="utf-8")
    assert list(recorded["models"]) == list(CONFIGS)
    gpu = {model: told["backends"] for model, told in recorded["models"].items()}
    assert gpu_table(gpu) in page
    cpu = {model: of_explanation(ask(model, "--device", "cpu")) for model in CONFIGS}
    assert cpu_table(cpu) in page
    for library, version in recorded["versions"].items():
        assert f"{library} {version}" in page
    for model, told in recorded["models"].items():
        for line in told["attention"]:
            assert f"| {model} | {line} |" in page


def test_what_is_asked_for_counts_on_cuda(ask: Ask) -> None:
    flags = ("--device", "cpu", "--dtype", "float32", "--block-size", "16")
    backends = of_explanation(ask("Llama-3-8B", *flags))
    found = backends["flash_attn"]["elsewhere"]
    assert found["reasons"] == [
        "block_size=16 is not supported (supported: 256 and up, multiples of 256)",
        "dtype=float32 is not supported (supported: bfloat16, float16)",
        "kv_cache_dtype=float32 is not supported (supported: bfloat16, float16)",
    ]
    assert backends["xformers_cutlass"]["elsewhere"]["usable"]


def test_options_and_names_are_checked_without_the_device(ask: Ask) -> None:
    told = ask("Llama-3-8B", "--device", "cuda", "--attention-backend", "flash_atn")
    assert "did you mean 'flash_attn'" in told["problems"][1]


def test_text(ask: Ask, tmp_path: Path) -> None:
    ask("head size 72")
    command = ["explain", str(tmp_path), "--device", "cpu"]
    text = CliRunner(env={"COLUMNS": "240"}).invoke(app, command).stdout
    for line in (
        "on CUDA: head_size=72 is not supported (supported: 64, 128, 256)",
        "on CUDA: usable in bfloat16 from compute capability 8.0, with block_size=256, once "
        "nothing is missing",
        "on CUDA: usable in bfloat16 from compute capability 8.0, with block_size=16",
    ):
        assert line in text
