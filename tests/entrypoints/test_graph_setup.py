"""Which decoding steps become CUDA graphs: decided from settings, before anything is captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.backends.flex import FlexBackend
from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.core.attention import Capabilities
from jackfield.core.config import EngineOptions
from jackfield.core.decode_graphs import DecodeGraphs, default_graph_sizes
from jackfield.core.errors import ConfigError
from jackfield.core.options import NoOptions
from jackfield.entrypoints.graph_setup import choose_graph_sizes
from jackfield.plugins.registry import Origin, PartKind
from jackfield.plugins.selection import Selection

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class WithGraphs(TorchSdpaBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        return replace(super().capabilities(device), cuda_graphs=True)


def choose(cls: type[Any] = WithGraphs, device: torch.device = CUDA, **options: Any) -> Any:
    kind = PartKind.ATTENTION_BACKEND
    choice = Selection(
        kind, "swift", cls, NoOptions(), "it was asked for", Origin("swift", "swift")
    )
    return choose_graph_sizes(EngineOptions(**options), choice, device)


def test_sizes_by_default() -> None:
    assert choose(max_num_seqs=20) == (1, 2, 4, 8, 16, 20)
    assert default_graph_sizes(1) == (1,)
    assert default_graph_sizes(4) == (1, 2, 4)
    assert len(default_graph_sizes(256)) == 35


def test_sizes_that_were_asked_for() -> None:
    assert choose(max_num_seqs=20, cuda_graph_sizes=(2, 20)) == (2, 20)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"enforce_eager": True}, "enforce_eager=True forbids them"),
        ({"device": CPU}, "device=cpu has none"),
        ({"cls": FlexBackend}, "attention_backend=swift does not support them"),
    ],
)
def test_without_graphs_there_are_no_sizes_unless_they_were_asked_for(
    arguments: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "jackfield"):
        assert choose(**arguments) == ()
    assert caplog.messages == [f"no CUDA graphs: {reason}"]
    with pytest.raises(ConfigError, match=reason):
        choose(**arguments, cuda_graph_sizes=(1,))


def test_a_size_beyond_the_number_of_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cuda_graph_sizes=\[1, 9\] goes beyond max_num_seqs=8"):
        choose(max_num_seqs=8, cuda_graph_sizes=(1, 9))


def test_steps_are_padded_to_the_next_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    graphs = DecodeGraphs(None, [], (2, 8), 4, CUDA)  # type: ignore[arg-type]
    assert [graphs.padded_size(count) for count in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, 9]
