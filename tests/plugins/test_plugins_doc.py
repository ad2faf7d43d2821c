"""``docs/plugins.md``: every plugin in it loads, and its messages are the real ones."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.conformance.attention.contract import assert_conforms
from jackfield.core.errors import PluginError
from jackfield.entrypoints.settings import load_settings
from jackfield.plugins.discovery import PluginHost, discover
from jackfield.plugins.observers import OBSERVER_HOOKS
from jackfield.plugins.registry import Origin, PartKind

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginHost]:
    monkeypatch.syspath_prepend(tmp_path)
    host = PluginHost()
    for name, code in PYTHON:
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        host.add(Origin(name), importlib.import_module(name))
    yield host
    for name, _ in PYTHON:
        sys.modules.pop(name)


def test_every_plugin_on_the_page_loads(host: PluginHost) -> None:
    assert len(PYTHON) == PAGE.count("```python") == 7
    parts = [part for plugin in host.plugins.values() for part in plugin.parts]
    assert {part.kind for part in parts} == set(PartKind)
    for part in parts:
        assert issubclass(part.load(), part.kind.contract())
    assert host.plugins["watcher"].observers == OBSERVER_HOOKS


def test_every_hook_has_its_section() -> None:
    for hook in [*(kind.hook for kind in PartKind), *OBSERVER_HOOKS]:
        assert re.search(rf"^### .*`{hook}\(", PAGE, re.MULTILINE)


def test_the_attention_backend_on_the_page_is_right(host: PluginHost) -> None:
    entry = host.registry.get(PartKind.ATTENTION_BACKEND, "plain")
    assert entry is not None
    assert_conforms(entry.load(), laws=("refusals", "meaning", "nothing_visible", "write_kv"))


def test_the_toml_on_the_page_is_valid(tmp_path: Path) -> None:
    packaging, settings = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(packaging)["project"]["entry-points"]["jackfield"]
    path = tmp_path / "settings.toml"
    path.write_text(settings)
    assert load_settings({}, {}, path).options.scheduling_policy_options == {"prefill_budget": 64}


def test_the_messages_on_the_page_are_the_real_ones(make: SimpleNamespace) -> None:
    def failure(**kwargs: Any) -> str:
        point = make.entry_point("shortest", **kwargs)
        return str(discover([point], {}).failures["shortest"])

    missing = ModuleNotFoundError("No module named 'numba'")
    future = make.plugin(api="2.0", jackfield_schedulers={"s": "a:B"})
    clash = make.plugin(jackfield_scheduling_policies={"fcfs": "a:B"})
    contested = discover([make.entry_point("builtin", clash), make.entry_point("z", clash)], {})
    with pytest.raises(PluginError) as caught:
        contested.registry.get(PartKind.SCHEDULING_POLICY, "fcfs")
    told = [failure(error=missing), failure(plugin=future), str(caught.value)]
    for name, shown in [
        ("shortest (dist-shortest 1.0)", "shortest (jackfield-shortest 0.1.0)"),
        ("z (dist-z 1.0)", "shortest (jackfield-shortest 0.1.0)"),
        ("builtin (dist-builtin 1.0)", "builtin (jackfield 0.1.0)"),
    ]:
        told = [message.replace(name, shown) for message in told]
    for message in told:
        assert f"```\n{message}\n```" in PAGE
