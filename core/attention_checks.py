"""What ``AttentionBackend.forward`` refuses, whatever the backend."""

from __future__ import annotations

from torch import Tensor

from .attention import AttentionSpec


def check_sinks(spec: AttentionSpec, sinks: Tensor | None) -> None:
    """Refuse sinks of a layer without them, and missing ones.

    Raises:
        ValueError: as said.
    """
    if (sinks is not None) != spec.sinks:
        raise ValueError(f"sinks must be given exactly if spec.sinks, which is {spec.sinks}")


def check_call(
    spec: AttentionSpec, num_tokens: int, query: Tensor, out: Tensor, sinks: Tensor | None
) -> None:
    """Refuse arguments of ``forward`` that do not fit the spec or the plan.

    Raises:
        ValueError: as ``check_sinks``; or there are fewer than ``num_tokens`` rows.
    """
    check_sinks(spec, sinks)
    if min(len(query), len(out)) < num_tokens:
        raise ValueError(
            f"{num_tokens} query rows were planned, but query has {len(query)} rows and out "
            f"{len(out)}"
        )
