"""``jackfield plugins`` and ``jackfield explain``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..conformance.published import Published, lines_about, package_of, published
from ..core.attention import AttentionSpec
from ..core.errors import JackfieldError, PluginError
from ..core.model import ModelConfig
from ..models.attention_fields import attention_from_fields
from ..models.loader import read_model_config
from ..models.locate import locate
from ..plugins.discovery import PluginHost, discover
from ..plugins.explain import Explanation, explain
from ..plugins.explain_plugins import PluginReport, plugin_report
from ..plugins.registry import PartKind
from ..plugins.report import renderable, to_json
from .console import show
from .resolve import absence_of, attention_specs_of, parse_device, resolve_dtype
from .settings import load_settings

#: The kinds of parts that there is a conformance suite for, and what it calls itself.
SUITES = {
    PartKind.ATTENTION_BACKEND: "attention",
    PartKind.SCHEDULER: "scheduler",
    PartKind.BLOCK_MANAGER: "block-manager",
}

FROM_FIELDS = (
    "read off config.json: there is no definition of this model, so it cannot run, but backends "
    "can be judged"
)


def run_plugins(json_output: bool) -> int:
    """List the plugins; the exit status is 1 if any is broken or two claim one name."""
    report = plugin_report(discover())
    _show(report, json_output)
    return 0 if report.ok else 1


def run_explain(flags: Mapping[str, Any], config: Path | None, json_output: bool) -> int:
    """Judge every part for a model; the exit status is 1 if the settings cannot be honoured."""
    settings = load_settings(flags, os.environ, config)
    options = settings.options
    host = discover()
    device, absent = _device(options.device)
    # Whether there are weights is not asked: they are not fetched for this.
    load_format = "dummy" if options.load_format == "auto" else options.load_format
    model_config = read_model_config(locate(options.model, load_format, options.revision))
    dtype = resolve_dtype(options.dtype, model_config, device)
    specs, note = _specs(host, model_config, dtype)
    cuda_dtype = resolve_dtype(options.dtype, model_config, torch.device("cuda"))
    explanation = explain(
        host,
        model_config,
        specs,
        options,
        settings.origins,
        device,
        _conformance(host),
        note,
        cuda_specs=[replace(spec, dtype=cuda_dtype) for spec in specs],
        absent=absent,
    )
    _show(explanation, json_output)
    return 0 if explanation.ok else 1


def _device(setting: str) -> tuple[torch.device, str]:
    """The device, and, for a CUDA device that is not here, the sentence that says so.

    Backends can be judged for it all the same.

    Raises:
        ConfigError: there is no such kind of device.
    """
    device = parse_device(setting)
    absent = absence_of(device)
    return (torch.device("cuda") if absent else device), absent


def _specs(
    host: PluginHost, config: ModelConfig, dtype: torch.dtype
) -> tuple[list[AttentionSpec], str]:
    """The specs of the layers, and where they are from, if not from the model's definition.

    There are none if they cannot be had.
    """
    try:
        entry = host.registry.get(PartKind.MODEL, config.architecture)
        if entry is not None:
            return attention_specs_of(entry.load(), config, dtype), ""
    except PluginError:
        return [], ""
    try:
        return attention_from_fields(config, dtype), FROM_FIELDS
    except JackfieldError as error:
        return [], str(error)


def _conformance(host: PluginHost) -> dict[tuple[PartKind, str], tuple[str, ...]]:
    """What is published about each part that there is a conformance suite for."""
    carried: dict[str, tuple[Published, ...]] = {}
    told = {}
    for kind, suite in SUITES.items():
        for entry in host.registry.entries(kind):
            package = package_of(entry.path)
            if package not in carried:
                carried[package] = published(package)
            told[kind, entry.name] = lines_about(carried[package], suite, entry.name)
    return told


def _show(report: Explanation | PluginReport, json_output: bool) -> None:
    if json_output:
        print(to_json(report))
    else:
        show(renderable(report))
