"""Finding a model by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.tiny_models import make_tiny_llama, write_tiny_gguf

from jackfield.core.errors import ModelError
from jackfield.models.locate import locate


def refuse(model: Any, *words: str, load_format: Any = "auto") -> None:
    with pytest.raises(ModelError) as caught:
        locate(str(model), load_format)
    for word in words:
        assert word in str(caught.value)


def test_directory_and_gguf_file(tmp_path: Path) -> None:
    theirs = make_tiny_llama(tmp_path / "dir")
    write_tiny_gguf(tmp_path / "tiny.gguf", theirs)
    files = locate(str(tmp_path / "dir"))
    assert (files.kind, files.path, files.dummy) == ("safetensors", tmp_path / "dir", False)
    files = locate(str(tmp_path / "tiny.gguf"))
    assert (files.kind, files.path, files.name) == ("gguf", tmp_path / "tiny.gguf", "tiny")
    assert locate(str(tmp_path)).path == tmp_path / "tiny.gguf"
    refuse(tmp_path / "dir", "one GGUF file", "none", load_format="gguf")


def test_load_format_is_kept(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_llama(tmp_path / "dir"))
    refuse(tmp_path / "tiny.gguf", "gguf", "load_format='safetensors'", load_format="safetensors")
    assert locate(str(tmp_path / "tiny.gguf"), "dummy").dummy


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refuse(tmp_path, "pytorch_model.bin", "safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    refuse(tmp_path, "no *.safetensors file")


def test_ambiguous_files_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "a.safetensors", "b.safetensors", "index")
    for name in ("a", "b"):
        (tmp_path / "gguf").mkdir(exist_ok=True)
        (tmp_path / "gguf" / f"{name}.gguf").touch()
    refuse(tmp_path / "gguf", "a.gguf", "b.gguf")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "config.json")


@pytest.mark.parametrize("name", ["/no/such/place", "./missing", "gone.gguf", "a b", "x/y/z"])
def test_names_that_no_hub_can_know(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked"))
    refuse(name, repr(name), "neither a directory nor a GGUF file")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    refuse(tmp_path / "model.bin", "model.bin", "no .gguf file")


def test_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("https://registry.example/api refused the connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as caught:
        locate("owner/name", revision="v2")
    message = str(caught.value)
    for word in ("'owner/name'", "revision='v2'", "neither a directory nor a GGUF file", "hub"):
        assert word in message
    assert "registry.example" not in message
    assert "\n" not in message


def test_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_llama(tmp_path)
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name", revision="abc").path == tmp_path
    assert (asked["repo"], asked["revision"]) == ("owner/name", "abc")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.bin", "*.pt", "*"} & set(asked["allow_patterns"])
    locate("owner/name", "dummy")
    assert "*.safetensors" not in asked["allow_patterns"]
