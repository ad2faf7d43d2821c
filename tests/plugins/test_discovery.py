"""Discovery: one broken plugin never disturbs another, and nothing is dropped silently."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from jackfield import hookimpl
from jackfield.core.errors import PluginError
from jackfield.plugins.discovery import check_api_version, discover
from jackfield.plugins.hookspecs import API_VERSION
from jackfield.plugins.registry import PartKind
from jackfield.plugins.selection import find_part

POLICY = PartKind.SCHEDULING_POLICY
GOOD = {"mine": "some.where:Mine"}


def policies(make: SimpleNamespace, name: str, parts: Any = None, **kwargs: Any) -> Any:
    plugin = make.plugin(jackfield_scheduling_policies=GOOD if parts is None else parts)
    return make.entry_point(name, plugin, **kwargs)


def test_builtin_parts_come_through_the_entry_point() -> None:
    host = discover(environ={"JACKFIELD_PLUGINS": ""})
    assert list(host.plugins) == ["builtin"]
    assert not host.failures
    assert host.plugins["builtin"].origin.distribution == "jackfield"
    assert host.registry.names(PartKind.ATTENTION_BACKEND) == (
        "flash_attn",
        "flash_attn_4",
        "flashinfer",
        "flex",
        "torch_sdpa",
        "torch_varlen",
        "triton",
        "xformers",
        "xformers_cutlass",
    )
    assert "fcfs" in host.registry.names(POLICY)
    for kind in PartKind:
        for entry in host.registry.entries(kind):
            assert issubclass(entry.load(), kind.contract())


def test_a_plugin_that_fails_to_import_is_a_warning(
    make: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    bad = make.entry_point("bad", error=ImportError("no module named gpu_magic"))
    with caplog.at_level(logging.WARNING, "jackfield"):
        host = discover([bad, policies(make, "good")], {})
    assert list(host.plugins) == ["good"]
    assert "no module named gpu_magic" in host.failures["bad"].reason
    assert "Traceback" in host.failures["bad"].traceback
    assert "bad (dist-bad 1.0)" in caplog.text
    assert find_part(host, POLICY, "mine").origin.plugin == "good"


def test_asking_for_an_unknown_name_shows_what_failed(make: SimpleNamespace) -> None:
    bad = make.entry_point("bad", error=ImportError("no module named gpu_magic"))
    host = discover([bad, policies(make, "good")], {})
    with pytest.raises(PluginError) as caught:
        find_part(host, POLICY, "mien")
    message = str(caught.value)
    for part in ("'mien'", "did you mean 'mine'", "good (dist-good 1.0)", "bad (dist-bad 1.0)"):
        assert part in message
    assert "Traceback" in message
    assert "ImportError: no module named gpu_magic" in message


def test_a_plugin_that_exits_on_import_does_not_end_the_program(make: SimpleNamespace) -> None:
    host = discover([make.entry_point("bad", error=SystemExit(3))], {})
    assert "SystemExit" in host.failures["bad"].reason


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (None, ["declares no plugin API version", "JACKFIELD_API_VERSION"]),
        ("0.9", ["written for plugin API 0.9", "1.0: the first published API"]),
        ("2.0", ["written for plugin API 2.0", "upgrade Jackfield"]),
        ("1.7", ["written for plugin API 1.7", "upgrade Jackfield"]),
        ("one", ["'one' is malformed"]),
        (1.0, ["1.0 is malformed"]),
    ],
)
def test_wrong_api_version_is_refused_with_what_changed(
    make: SimpleNamespace, declared: Any, words: list[str]
) -> None:
    plugin = make.plugin(api=declared, jackfield_scheduling_policies=GOOD)
    host = discover([make.entry_point("old", plugin)], {})
    assert not host.plugins
    assert not host.registry.names(POLICY)
    for word in words:
        assert word in host.failures["old"].reason


def test_only_later_changes_are_told_and_older_minor_versions_work() -> None:
    changes = {"1.0": "first", "1.1": "added a field", "2.0": "renamed a hook"}
    assert check_api_version("2.0", "2.3", changes) == "2.0"
    with pytest.raises(PluginError, match=r"1\.1: added a field; 2\.0: renamed a hook") as caught:
        check_api_version("1.0", "2.0", changes)
    assert "first" not in str(caught.value)
    assert check_api_version(API_VERSION) == API_VERSION


def half_way(register: Any) -> None:
    register("one", "a.b:C")
    raise RuntimeError("lost the rest")


def twice(register: Any) -> None:
    register("one", "a.b:C")
    register("one", "a.b:D")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (half_way, "jackfield_scheduling_policies raised RuntimeError: lost the rest"),
        (twice, "registered twice"),
        ({"one": "a.b:C", "two": "no colon"}, "'no colon' of scheduling policy 'two' is malformed"),
        ({"one": "a.b:C", "two": 7}, "target 7"),
        ({"one": "a.b:C", "auto": "a.b:D"}, "'auto' is reserved"),
        ({"one": "a.b:C", "sp ace": "a.b:D"}, "'sp ace' is malformed"),
        (lambda register: {"one": "a.b:C"}, "call register(name, target) instead"),
    ],
)
def test_a_half_done_registration_leaves_nothing(
    make: SimpleNamespace, parts: Any, reason: str
) -> None:
    plugin = make.plugin(
        jackfield_schedulers={"earlier": "a.b:S"},
        jackfield_scheduling_policies=parts,
        jackfield_step_planned=lambda plan: None,
    )
    host = discover([make.entry_point("bad", plugin), policies(make, "good")], {})
    assert reason in host.failures["bad"].reason
    assert host.registry.names(PartKind.SCHEDULER) == ()
    assert host.registry.names(POLICY) == ("mine",)
    assert len(host.observers) == 0


def test_a_misspelt_hook_is_an_error_of_its_plugin(make: SimpleNamespace) -> None:
    plugin = make.plugin(jackfield_scheduling_polices=GOOD, jackfield_schedulers={"s": "a.b:S"})
    host = discover([make.entry_point("typo", plugin), policies(make, "good")], {})
    assert "jackfield_scheduling_polices" in host.failures["typo"].reason
    assert host.registry.names(PartKind.SCHEDULER) == ()
    assert list(host.plugins) == ["good"]


def test_a_hook_with_a_misspelt_argument_is_an_error(make: SimpleNamespace) -> None:
    plugin = make.plugin(jackfield_schedulers=lambda registre: None)
    host = discover([make.entry_point("typo", plugin)], {})
    assert "registre" in host.failures["typo"].reason


def test_an_unmarked_hook_is_an_error(make: SimpleNamespace) -> None:
    plugin = make.plugin(jackfield_schedulers={"s": "a.b:S"})
    plugin.jackfield_models = lambda register: register("M", "a.b:M")
    host = discover([make.entry_point("unmarked", plugin)], {})
    reason = host.failures["unmarked"].reason
    assert "jackfield_models is not marked with @jackfield.hookimpl" in reason


def test_a_plugin_without_hooks_is_an_error(make: SimpleNamespace) -> None:
    host = discover([make.entry_point("empty", make.plugin())], {})
    assert "implements no hook" in host.failures["empty"].reason


def test_a_hook_may_take_fewer_arguments_than_specified(make: SimpleNamespace) -> None:
    seen: list[Any] = []
    plugin = make.plugin(jackfield_step_finished=lambda sampled: seen.append(dict(sampled)))
    host = discover([make.entry_point("watch", plugin)], {})
    host.observers.step_finished(None, {"a": 5}, None)  # type: ignore[arg-type]
    assert seen == [{"a": 5}]


def test_two_plugins_with_one_part_name_are_an_error_that_names_both(make: SimpleNamespace) -> None:
    second = policies(make, "b", {"mine": "other:Mine", "extra": "other:Extra"}, version="2.0")
    host = discover([second, policies(make, "a"), policies(make, "c")], {})
    with pytest.raises(PluginError) as caught:
        find_part(host, POLICY, "mine")
    for origin in ("a (dist-a 1.0)", "b (dist-b 2.0)", "c (dist-c 1.0)"):
        assert origin in str(caught.value)
    assert host.registry.names(POLICY) == ()
    assert set(host.failures) == {"b", "c"}
    assert list(host.registry.conflicts()) == [(POLICY, "mine")]


def test_the_name_of_a_builtin_part_is_no_exception(make: SimpleNamespace) -> None:
    builtin = policies(make, "builtin", {"fcfs": "a.b:C"})
    host = discover([policies(make, "another", {"fcfs": "x.y:Z"}), builtin], {})
    with pytest.raises(PluginError, match=r"builtin \(.*another \("):
        find_part(host, POLICY, "fcfs")


def test_one_name_for_parts_of_two_kinds_is_no_conflict(make: SimpleNamespace) -> None:
    plugin = make.plugin(jackfield_schedulers=GOOD, jackfield_scheduling_policies=GOOD)
    host = discover([make.entry_point("good", plugin)], {})
    assert find_part(host, PartKind.SCHEDULER, "mine").kind is PartKind.SCHEDULER
    assert not host.registry.conflicts()


def test_two_entry_points_with_one_name_are_both_refused(make: SimpleNamespace) -> None:
    twin = policies(make, "twin", {"other": "a.b:C"}, version="2.0")
    host = discover([policies(make, "twin"), twin], {})
    assert not host.plugins
    assert "twin (dist-twin 1.0) and twin (dist-twin 2.0)" in host.failures["twin"].reason


@pytest.mark.parametrize(
    ("choice", "loaded", "left_out"),
    [
        (None, ["builtin", "a", "b"], ()),
        ("", ["builtin"], ("a", "b")),
        ("b", ["builtin", "b"], ("a",)),
        (" b , a,", ["builtin", "a", "b"], ()),
        ("builtin", ["builtin"], ("a", "b")),
    ],
)
def test_jackfield_plugins_chooses(
    make: SimpleNamespace, choice: str | None, loaded: list[str], left_out: tuple[str, ...]
) -> None:
    points = [policies(make, name, {f"of_{name}": "a.b:C"}) for name in ("b", "a", "builtin")]
    environ = {} if choice is None else {"JACKFIELD_PLUGINS": choice}
    host = discover(points, environ)
    assert list(host.plugins) == loaded
    assert host.left_out == left_out
    assert all(point.loads == [point.name] * (point.name in loaded) for point in points)


def test_jackfield_plugins_with_an_unknown_name_is_an_error(make: SimpleNamespace) -> None:
    with pytest.raises(PluginError, match=r"'exmaple'.*did you mean 'example'"):
        discover([policies(make, "example")], {"JACKFIELD_PLUGINS": "exmaple"})


def test_a_plugin_that_is_listed_by_name_and_broken_stops_startup(make: SimpleNamespace) -> None:
    points = [make.entry_point("bad", error=ImportError("gone")), policies(make, "good")]
    host = discover(points, {"JACKFIELD_PLUGINS": "good,bad"})
    with pytest.raises(PluginError, match="ImportError: gone"):
        find_part(host, POLICY, "mine")
    assert find_part(discover(points, {}), POLICY, "mine").name == "mine"


def test_a_left_out_plugin_is_mentioned(make: SimpleNamespace) -> None:
    host = discover([policies(make, "example")], {"JACKFIELD_PLUGINS": ""})
    with pytest.raises(PluginError, match="Left out by JACKFIELD_PLUGINS: example"):
        find_part(host, POLICY, "mine")


def test_a_broken_observer_is_logged_once_and_disturbs_nobody(
    make: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def breaks(output: Any) -> None:
        calls.append("breaks")
        raise ValueError("observer out of order")

    class Module:
        JACKFIELD_API_VERSION = "1.0"

        @staticmethod
        @hookimpl
        def jackfield_request_finished(output: Any) -> None:
            calls.append(output)

    broken = make.plugin(
        jackfield_request_finished=breaks,
        jackfield_step_planned=lambda plan: calls.append("planned"),
    )
    host = discover([make.entry_point("a", broken), make.entry_point("z", Module())], {})
    with caplog.at_level(logging.ERROR, "jackfield"):
        host.observers.request_finished("first")  # type: ignore[arg-type]
        host.observers.request_finished("second")  # type: ignore[arg-type]
        host.observers.step_planned(None)  # type: ignore[arg-type]
    assert calls == ["breaks", "first", "second"]
    assert len(caplog.records) == 1
    assert "plugin a failed in jackfield_request_finished" in caplog.text
    assert "observer out of order" in caplog.text


def test_an_observer_cannot_change_the_sampled_tokens(make: SimpleNamespace) -> None:
    plugin = make.plugin(jackfield_step_finished=lambda sampled: sampled.clear())
    host = discover([make.entry_point("rude", plugin)], {})
    sampled = {"a": 1}
    host.observers.step_finished(None, sampled, None)  # type: ignore[arg-type]
    assert sampled == {"a": 1}
