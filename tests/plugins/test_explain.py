"""``explain`` and the plugin report: every part with verdict, reasons and origin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.published_configs import CONFIGS

from jackfield import ModelConfig, PartOptions
from jackfield.core.config import EngineOptions
from jackfield.plugins.discovery import PluginHost, discover
from jackfield.plugins.explain import Explanation, Verdict, explain
from jackfield.plugins.explain_plugins import plugin_report
from jackfield.plugins.registry import Origin
from jackfield.plugins.report import render_text, to_json

CPU = torch.device("cpu")


class Knobs(PartOptions):
    speed: int = 3


def config(architecture: str = "LlamaForCausalLM") -> ModelConfig:
    return ModelConfig(architecture, 64, 64, 128, 2, 4, 2, 16, 512)


@pytest.fixture
def host(make: SimpleNamespace) -> PluginHost:
    host = discover(environ={"JACKFIELD_PLUGINS": ""})
    backends = {
        "best": make.backend("best", 1000, sliding_window=True, options=Knobs),
        "narrow": make.backend("narrow", 2000),
        "manual": make.backend("manual", 0, sliding_window=True),
        "ghost": "no_such_module:Ghost",
    }
    host.add(
        Origin("extra", "dist-extra", "3.1"), make.plugin(jackfield_attention_backends=backends)
    )
    return host


def run(host: PluginHost, make: SimpleNamespace, **settings: Any) -> Explanation:
    specs = [make.spec(), make.spec(sliding_window=8), make.spec()]
    origins = dict.fromkeys(settings, "flag")
    return explain(host, config(), specs, EngineOptions.model_validate(settings), origins, CPU)


def verdicts(explanation: Explanation) -> dict[str, Verdict]:
    return {part.name: part.verdict for part in explanation.parts}


def test_every_part_has_a_verdict_and_a_reason(host: PluginHost, make: SimpleNamespace) -> None:
    explanation = run(host, make)
    assert explanation.ok
    assert explanation.block_size == 16
    expected = {
        "best": Verdict.CHOSEN,
        "narrow": Verdict.REFUSED,
        "manual": Verdict.USABLE,
        "ghost": Verdict.BROKEN,
        "torch_sdpa": Verdict.USABLE,
        "queue": Verdict.CHOSEN,
        "fcfs": Verdict.CHOSEN,
        "paged": Verdict.CHOSEN,
        "LlamaForCausalLM": Verdict.CHOSEN,
        "Qwen2ForCausalLM": Verdict.REFUSED,
    }
    found = verdicts(explanation)
    assert {name: found[name] for name in expected} == expected
    assert all(part.reasons for part in explanation.parts)
    narrow = next(part for part in explanation.parts if part.name == "narrow")
    assert narrow.reasons == ("sliding_window=8 is not supported",)
    assert str(narrow.origin) == "extra (dist-extra 3.1)"


def test_a_request_that_cannot_be_honoured_is_a_problem(
    host: PluginHost, make: SimpleNamespace
) -> None:
    explanation = run(
        host, make, attention_backend="narrow", scheduler="quueue", block_manager_options={"x": 1}
    )
    assert not explanation.ok
    assert explanation.block_size is None
    assert len(explanation.problems) == 3
    assert verdicts(explanation)["narrow"] is Verdict.REFUSED
    assert verdicts(explanation)["best"] is Verdict.USABLE
    assert verdicts(explanation)["paged"] is Verdict.REFUSED
    assert "did you mean 'queue'" in " ".join(explanation.problems)


def test_an_unknown_architecture_is_a_problem(host: PluginHost) -> None:
    explanation = explain(
        host, config("NoSuchModel"), [], EngineOptions.model_validate({}), {}, CPU
    )
    assert "NoSuchModel" in explanation.problems[0]
    assert Verdict.USABLE not in {
        part.verdict for part in explanation.parts if part.kind.value == "attention_backend"
    }


def test_json_has_stable_keys(host: PluginHost, make: SimpleNamespace) -> None:
    told = json.loads(to_json(run(host, make, max_model_len=100, dtype="float32")))
    assert list(told) == [
        "ok",
        "architecture",
        "device",
        "dtypes",
        "block_size",
        "attention",
        "note",
        "parts",
        "settings",
        "problems",
        "failures",
    ]
    best = next(part for part in told["parts"] if part["name"] == "best")
    assert best["kind"] == "attention_backend"
    assert best["verdict"] == "chosen"
    assert best["origin"] == {"plugin": "extra", "distribution": "dist-extra", "version": "3.1"}
    assert best["target"].endswith(":backend_of.<locals>.Backend")
    assert best["options"] == [
        {"name": "speed", "allowed": "an integer", "default": "3", "description": ""}
    ]
    by_name = {setting["name"]: setting for setting in told["settings"]}
    assert set(by_name) == set(EngineOptions.model_fields)
    assert by_name["max_model_len"] == {"name": "max_model_len", "value": 100, "origin": "flag"}
    assert by_name["seed"]["origin"] == "default"
    assert told["attention"] == [
        "2 layers, num_heads=4, num_kv_heads=2, head_size=16, float32",
        "1 layers, num_heads=4, num_kv_heads=2, head_size=16, sliding_window=8, float32",
    ]


def test_text_shows_parts_settings_and_problems(host: PluginHost, make: SimpleNamespace) -> None:
    text = render_text(run(host, make, attention_backend="narrow"), width=140)
    for word in ("LlamaForCausalLM", "narrow", "sliding_window=8 is not supported", "dist-extra"):
        assert word in text
    assert "An engine with these settings would not start" in text
    assert "attention_backend" in text


def test_markup_in_a_message_is_shown_as_it_is(make: SimpleNamespace) -> None:
    host = discover([make.entry_point("odd", error=ImportError("needs [bold]torch[/bold]"))], {})
    assert "needs [bold]torch[/bold]" in render_text(plugin_report(host), width=140)


def test_the_plugin_report_lists_everything(make: SimpleNamespace) -> None:
    good = make.plugin(
        jackfield_schedulers={"mine": "no_such_module:Mine"},
        jackfield_step_planned=lambda plan: None,
    )
    rival = make.plugin(jackfield_schedulers={"mine": "b:C"})
    points = [
        make.entry_point("good", good),
        make.entry_point("rival", rival),
        make.entry_point("sad", error=ImportError("no luck")),
        make.entry_point("unused"),
    ]
    report = plugin_report(discover(points, {"JACKFIELD_PLUGINS": "good,rival,sad"}))
    assert not report.ok
    assert [(row.origin.plugin, row.status) for row in report.plugins] == [
        ("good", "loaded"),
        ("rival", "failed"),
        ("sad", "failed"),
        ("unused", "left out"),
    ]
    told = json.loads(to_json(report))
    assert list(told) == ["ok", "plugins", "conflicts"]
    assert told["plugins"][0]["parts"] == [["scheduler", "mine", "no_such_module:Mine"]]
    assert told["plugins"][0]["observers"] == ["jackfield_step_planned"]
    assert "good (dist-good 1.0) and rival (dist-rival 1.0)" in told["conflicts"][0]
    text = render_text(report, width=140)
    for word in ("no luck", "scheduler mine", "Contested names", "Traceback"):
        assert word in text


def test_the_report_of_the_builtin_parts_is_fine() -> None:
    assert plugin_report(discover(environ={"JACKFIELD_PLUGINS": ""})).ok


def test_contested_names_are_broken(host: PluginHost, make: SimpleNamespace) -> None:
    rival = make.plugin(jackfield_scheduling_policies={"fcfs": "b:C"})
    points = [make.entry_point("builtin", rival), make.entry_point("rival", rival)]
    explanation = run(discover(points, {}), make)
    contested = [part for part in explanation.parts if part.name == "fcfs"]
    assert [part.verdict for part in contested] == [Verdict.BROKEN, Verdict.BROKEN]
    assert {part.origin.plugin for part in contested} == {"builtin", "rival"}
    assert any("claimed by several plugins" in problem for problem in explanation.problems)


def test_a_model_without_a_definition_is_judged_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Gemma-2-9B"]), encoding="utf-8")
    command = [sys.executable, "-m", "jackfield.entrypoints.cli", "explain", str(tmp_path)]
    result = subprocess.run(
        [*command, "--device", "cpu", "--json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stderr
    explanation = json.loads(result.stdout)
    assert "there is no definition of this model" in explanation["note"]
    assert any("Gemma2ForCausalLM" in problem for problem in explanation["problems"])
    assert explanation["attention"] == [
        "21 layers, num_heads=16, num_kv_heads=8, head_size=256, sliding_window=4096, "
        "logits_soft_cap=50.0, float32",
        "21 layers, num_heads=16, num_kv_heads=8, head_size=256, logits_soft_cap=50.0, float32",
    ]
    found = {part["name"]: part["verdict"] for part in explanation["parts"]}
    assert found["torch_sdpa"] == "chosen"
