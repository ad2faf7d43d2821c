"""The backend under test, and how the laws run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCacheSpec,
)
from ...core.options import PartOptions
from .cases import AttentionCase, CaseData, Expected, build, expect

#: Stands in every element that must not be written.
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Subject:
    """An attention backend on a device.

    Attributes:
        backend: the class.
        device: where it runs.
        options: passed to the constructor.
    """

    backend: type[AttentionBackend]
    device: torch.device
    options: PartOptions | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What the backend declares for the device."""
        return self.backend.capabilities(self.device)

    def build(self, case: AttentionCase) -> CaseData:
        """The tensors of a case, in the backend's layout, on its device."""
        return build(case, self.capabilities.kv_layout, self.device)

    def construct(self, spec: AttentionSpec, cache_spec: KVCacheSpec) -> AttentionBackend:
        """A new instance."""
        return self.backend(spec, cache_spec, self.device, self.options)

    def refuses(self, case: AttentionCase) -> bool:
        """Whether the backend says that it cannot serve the layer of a case.

        What the axes allow is declared; but a backend may refuse some of it together.
        """
        spec, blocks = case.spec, 4
        cache = KVCacheSpec(
            blocks,
            case.block_size,
            spec.num_kv_heads,
            spec.head_size,
            spec.v_head_size,
            case.kv_dtype,
        )
        return bool(self.backend.unsupported(spec, cache, self.device))

    def instance(self, data: CaseData) -> AttentionBackend:
        """A new instance for a case."""
        return self.construct(data.spec, data.cache_spec)


@dataclass(frozen=True)
class Result:
    """What ``forward`` wrote.

    Attributes:
        out: all rows, those behind the last query included: ``[T + padding, N, Hv]``.
        lse: ``[T + padding, N]`` float32; None if not asked for.
        num_tokens: rows that belong to a query.
        returned_out: whether ``forward`` returned the tensor that it was given for its output.
    """

    out: Tensor
    lse: Tensor | None
    num_tokens: int
    returned_out: bool = True


def attend(
    instance: AttentionBackend,
    data: CaseData,
    *,
    query: Tensor | None = None,
    batch: AttentionBatch | None = None,
    plan: AttentionPlan | None = None,
    with_lse: bool = False,
    filling: float = UNTOUCHED,
) -> Result:
    """``plan`` (unless given) and ``forward``, into tensors that are filled with ``filling``."""
    query = data.query if query is None else query
    batch = data.batch if batch is None else batch
    spec = data.spec
    out = torch.full(
        (len(query), spec.num_heads, spec.v_head_size),
        filling,
        dtype=spec.dtype,
        device=query.device,
    )
    lse = None
    if with_lse:
        lse = torch.full(
            (len(query), spec.num_heads), filling, dtype=torch.float32, device=query.device
        )
    returned = instance.forward(
        query,
        data.cache,
        instance.plan(batch) if plan is None else plan,
        out,
        sinks=data.sinks,
        lse=lse,
    )
    return Result(out, lse, batch.num_tokens, returned is out)


class LawViolation(AssertionError):  # noqa: N818 - a violation is what it is called
    """A backend does not do what the contract says.

    Attributes:
        data: the tensors with which it was seen; None if no forward call is to blame.
        result: what the backend computed; None likewise.
        expected: what it should have; None likewise.
    """

    def __init__(
        self,
        message: str,
        data: CaseData | None = None,
        result: Result | None = None,
        expected: Expected | None = None,
    ) -> None:
        super().__init__(message)
        self.data = data
        self.result = result
        self.expected = expected


def check_meaning(result: Result, data: CaseData, what: str = "the output") -> float:
    """Compare with the oracle.

    Returns:
        The largest error, as a share of its bound.

    Raises:
        LawViolation: an error is above its bound.
    """
    expected, count = expect(data), result.num_tokens
    parts = [(what, result.out, expected.out, expected.out_bound)]
    if result.lse is not None:
        parts.append(("the LSE", result.lse, expected.lse, expected.lse_bound))
    largest = 0.0
    for name, actual, right, bound in parts:
        share = share_of_bound(actual[:count], right, bound)
        if not share <= 1:
            text = describe(name, actual[:count], right, bound)
            raise LawViolation(text, data, result, expected)
        largest = max(largest, share)
    return largest


def share_of_bound(actual: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Largest error over its bound; infinite if anything is NaN that should not be."""
    if not actual.numel():
        return 0.0
    errors = _errors(actual, expected)
    # Exact results have a bound of 0: 0 / 0 is no error, anything else is infinitely large.
    return float(torch.where((bound == 0) & (errors == 0), 0.0, errors / bound).max())


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences; 0 where both are the same infinity, infinite where either is NaN."""
    actual = actual.double()
    errors = (actual - expected).abs()
    return torch.where(actual == expected, 0.0, torch.nan_to_num(errors, nan=torch.inf))


def describe(what: str, actual: Tensor, expected: Tensor, bound: Tensor) -> str:
    """Where two results differ most, in words."""
    errors = _errors(actual, expected)
    excess = torch.where(errors == 0, 0.0, errors / bound)
    worst = int(excess.argmax())
    place = [int(one) for one in torch.unravel_index(torch.tensor(worst), excess.shape)]
    names = ("row", "head", "element")
    where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
    index = tuple(place)
    wrong = int((excess > 1).sum())
    return (
        f"{what} is wrong in {wrong} of {excess.numel()} elements; worst at {where}: "
        f"{float(actual[index]):.8g} instead of {float(expected[index]):.8g}, an error of "
        f"{float(errors[index]):.3g} where rounding explains {float(bound[index]):.3g}"
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = views[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
