"""What attention backends refuse of their arguments, whatever the backend."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from .attention import AttentionBackend, AttentionPlan, AttentionSpec
from .options import PartOptions

PlanT = TypeVar("PlanT", bound=AttentionPlan)
OptionsT = TypeVar("OptionsT", bound=PartOptions)


def own_options(backend: AttentionBackend, kind: type[OptionsT]) -> OptionsT:
    """The options that a backend was constructed with, if they are of its kind.

    Raises:
        TypeError: they are another part's.
    """
    options = backend.options
    if not isinstance(options, kind):
        raise TypeError(
            f"options of {backend.name!r} must be {kind.__name__}, not {type(options).__name__}"
        )
    return options


def own_plan(backend: AttentionBackend, plan: AttentionPlan, kind: type[PlanT]) -> PlanT:
    """A plan that a backend is given, if it is of its kind.

    Raises:
        TypeError: it is another backend's.
    """
    if not isinstance(plan, kind):
        raise TypeError(f"{backend.name!r} cannot use a plan of type {type(plan).__name__}")
    return plan


def refuse_update(backend: AttentionBackend, into: AttentionPlan | None) -> None:
    """Refuse to update a plan in place, for backends without CUDA graphs.

    Raises:
        ValueError: ``into`` is given.
    """
    if into is not None:
        raise ValueError(
            f"attention backend {backend.name!r} has no CUDA graphs: into must be None"
        )


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
