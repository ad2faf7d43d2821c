"""Registered parts: loaded late, and checked against their contract when loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield import SchedulingPolicy
from jackfield.core.errors import PluginError
from jackfield.plugins.registry import Origin, PartEntry, PartKind, Registry


class Nameless(SchedulingPolicy):
    """Says no name of its own."""


class Other(SchedulingPolicy):
    name = "other"


class WrongOptions(SchedulingPolicy):
    name = "wrong"
    Options = dict  # type: ignore[assignment]


def entry(name: str, target: Any, kind: PartKind = PartKind.SCHEDULING_POLICY) -> PartEntry:
    return PartEntry(kind, name, target, Origin("p", "dist-p", "1.0"))


def test_registering_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_part_module.py").write_text("class Part: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry()
    registry.add_all([entry("lazy", "lazy_part_module:Part")])
    assert "lazy_part_module" not in sys.modules
    with pytest.raises(PluginError, match=r"no subclass of jackfield\.core\.scheduling_policy"):
        registry.entries(PartKind.SCHEDULING_POLICY)[0].load()
    assert "lazy_part_module" in sys.modules


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("x", "no_such_module:X", ["ModuleNotFoundError", "no_such_module"]),
        ("x", "json:NoSuchClass", ["AttributeError", "NoSuchClass"]),
        ("x", "json:dumps", ["no subclass of"]),
        ("x", Nameless, ["name is None, not 'x'"]),
        ("x", Other, ["name is 'other', not 'x'"]),
        ("wrong", WrongOptions, ["no subclass of PartOptions"]),
    ],
)
def test_what_is_not_the_part_it_claims_to_be_is_refused(
    name: str, target: Any, words: list[str]
) -> None:
    with pytest.raises(PluginError) as caught:
        entry(name, target).load()
    for word in [*words, "p (dist-p 1.0)", f"scheduling policy {name!r}"]:
        assert word in str(caught.value)


def test_an_unfinished_class_is_refused_with_what_is_missing() -> None:
    from jackfield import BlockManager

    class Unfinished(BlockManager):
        name = "unfinished"

    with pytest.raises(PluginError, match="does not implement allocate, append"):
        entry("unfinished", Unfinished, PartKind.BLOCK_MANAGER).load()


def test_the_cause_of_a_failed_import_is_kept() -> None:
    with pytest.raises(PluginError) as caught:
        entry("x", "no_such_module:X").load()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_class_may_be_registered_itself() -> None:
    assert entry("other", Other).load() is Other
    assert entry("other", Other).path.endswith(":Other")


def test_every_kind_names_an_existing_hook() -> None:
    from jackfield.plugins import hookspecs

    assert all(callable(getattr(hookspecs, kind.hook)) for kind in PartKind)


NAMES = st.sampled_from(["a", "b", "c"])
PLUGINS = st.lists(st.lists(st.tuples(st.sampled_from(PartKind), NAMES), max_size=4), max_size=5)


@given(PLUGINS)
@settings(deadline=None)
def test_a_plugin_enters_whole_or_not_at_all(plugins: list[list[tuple[PartKind, str]]]) -> None:
    registry = Registry()
    taken: dict[tuple[PartKind, str], str] = {}
    contested: set[tuple[PartKind, str]] = set()
    for index, parts in enumerate(plugins):
        origin = Origin(f"plugin{index}")
        entries = [PartEntry(kind, name, "m:C", origin) for kind, name in parts]
        clash = {part for part in parts if part in taken}
        doubled = len(set(parts)) < len(parts)
        if doubled or clash:
            contested |= set() if doubled else clash
            with pytest.raises(PluginError):
                registry.add_all(entries)
        else:
            registry.add_all(entries)
            taken |= dict.fromkeys(parts, origin.plugin)
    for kind in PartKind:
        found = {(kind, one.name): one.origin.plugin for one in registry.entries(kind)}
        assert found == {
            key: plugin for key, plugin in taken.items() if key[0] is kind and key not in contested
        }
    assert set(registry.conflicts()) == contested
    for kind, name in contested:
        with pytest.raises(PluginError, match=taken[(kind, name)]):
            registry.get(kind, name)


def test_names_are_sorted() -> None:
    registry = Registry()
    registry.add_all([entry("b", "m:C"), entry("a", "m:C")])
    assert registry.names(PartKind.SCHEDULING_POLICY) == ("a", "b")
    assert registry.get(PartKind.SCHEDULING_POLICY, "c") is None
