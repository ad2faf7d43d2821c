"""What ``jackfield explain`` asks of this machine and of the packages of parts."""

from __future__ import annotations

import pytest
import torch

from jackfield.core.errors import ConfigError
from jackfield.entrypoints import cli_explain
from jackfield.entrypoints.resolve import absence_of, parse_device, resolve_device
from jackfield.plugins.discovery import discover


def test_the_reports_of_a_package_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def published(package: str) -> tuple[()]:
        read.append(package)
        return ()

    monkeypatch.setattr(cli_explain, "published", published)
    told = cli_explain._conformance(discover(environ={"JACKFIELD_PLUGINS": ""}))
    assert read == ["jackfield"]
    assert len(told) > 1
    assert set(told.values()) == {("no published report",)}


def test_an_absent_gpu_is_no_unknown_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert absence_of(parse_device("cuda:0")) == ""
    assert absence_of(parse_device("cpu")) == ""
    said = "device='cuda:1' is not there: 1 CUDA devices were found"
    assert absence_of(parse_device("cuda:1")) == said
    with pytest.raises(ConfigError, match="is not there"):
        resolve_device("cuda:1")
    with pytest.raises(ConfigError, match="is unknown"):
        parse_device("cuda:x")
