"""Mutants of capabilities and refusals: what is declared is not what is done."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.attention import (
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
    KVCacheSpec,
    SizeSet,
)
from ....core.errors import UnsupportedError
from ....core.options import PartOptions
from ..plain_backend import Attended, PlainBackend, PlainPlan, PlannedSequence, own_plan
from .registry import mutant


class _Declaring(PlainBackend):
    """Declares less than it can, and refuses properly."""

    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        """What is declared, from all that ``PlainBackend`` can do."""
        return everything

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """As declared."""
        return cls.declared(super().capabilities(device))


class _Accepting(_Declaring):
    """Accepts every layer, declared or not."""

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        self.spec = spec
        self.cache_spec = cache
        self.device = device
        self.options = options if options is not None else self.Options()


@mutant(
    "undeclared_non_causal_accepted",
    "Layers without causal are undeclared, accepted and computed as causal.",
)
class _UndeclaredNonCausalAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, non_causal=False)

    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, causal=True)


@mutant("undeclared_window_accepted", "A window is undeclared, accepted and dropped.")
class _UndeclaredWindowAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, sliding_window=False)

    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, sliding_window=None)


@mutant(
    "undeclared_soft_cap_accepted",
    "A soft cap is undeclared, accepted and dropped.",
    ("sglang#33915",),
)
class _UndeclaredSoftCapAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, logits_soft_cap=False)

    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, logits_soft_cap=None)


@mutant("undeclared_alibi_accepted", "ALiBi is undeclared, accepted and dropped.")
class _UndeclaredAlibiAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, alibi=False)

    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        return replace(self.spec, alibi_slopes=None)


@mutant("undeclared_sinks_accepted", "Sinks are undeclared and accepted.")
class _UndeclaredSinksAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, sinks=False)


@mutant("undeclared_v_head_size_accepted", "Another v_head_size is undeclared and accepted.")
class _UndeclaredVHeadSizeAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, different_v_head_size=False)


@mutant("undeclared_head_size_accepted", "Undeclared head sizes are accepted.")
class _UndeclaredHeadSizeAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, head_sizes=SizeSet(multiple_of=16, minimum=16, maximum=256))


@mutant(
    "undeclared_group_size_accepted",
    "Undeclared group sizes are accepted and refused by forward.",
    ("flashinfer#996",),
)
class _UndeclaredGroupSizeAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, group_sizes=SizeSet.of(1, 2, 4, 8))

    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        if self.spec.group_size not in (1, 2, 4, 8):
            raise UnsupportedError("decode", [f"group size={self.spec.group_size}"])
        return self.spec


@mutant("undeclared_block_size_accepted", "Undeclared block sizes are accepted.")
class _UndeclaredBlockSizeAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, block_sizes=SizeSet(multiple_of=16, minimum=16))


@mutant("undeclared_dtype_accepted", "Layers in float64 are undeclared and accepted.")
class _UndeclaredDtypeAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, dtypes=everything.dtypes - {torch.float64})


@mutant("undeclared_cache_dtype_accepted", "A cache in float64 is undeclared and accepted.")
class _UndeclaredCacheDtypeAccepted(_Accepting):
    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        return replace(everything, kv_dtypes=everything.kv_dtypes - {torch.float64})


@mutant("undeclared_device_accepted", "Any device is accepted.")
class _UndeclaredDeviceAccepted(_Accepting):
    pass


@mutant(
    "declared_head_size_refused",
    "Head size 96 is declared and refused by the constructor.",
)
class _DeclaredHeadSizeRefused(PlainBackend):
    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        super().__init__(spec, cache, device, options)
        if spec.head_size == 96:
            raise UnsupportedError("attention backend", ["head_size=96 is not supported"])


class _FailingLate(PlainBackend):
    """Fails in ``forward`` for a layer that it declares."""

    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        """Whether forward fails."""
        return False

    def forward(
        self,
        query: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """As in ``PlainBackend``, or a failure."""
        if self.fails(query, own_plan(plan), lse):
            raise RuntimeError("no kernel for these sizes")
        return super().forward(query, cache, plan, out, sinks=sinks, lse=lse)


@mutant(
    "many_heads_in_groups_of_eight_fail",
    "64 query heads in groups of 8 are declared and fail in forward.",
    ("flashinfer#1353",),
)
class _ManyHeadsInGroupsOfEightFail(_FailingLate):
    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        return (self.spec.num_heads, self.spec.num_kv_heads) == (64, 8)


@mutant(
    "short_query_of_grouped_heads_fails",
    "Two or three rows of a sequence with grouped heads fail in forward.",
    ("pytorch#185349",),
)
class _ShortQueryOfGroupedHeadsFails(_FailingLate):
    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        short = any(sequence.query_len in (2, 3) for sequence in plan.sequences)
        return short and self.spec.group_size > 1


@mutant("mixed_batch_fails", "Batches that mix one row and several rows are declared and fail.")
class _MixedBatchFails(_FailingLate):
    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        return len({sequence.query_len > 1 for sequence in plan.sequences}) > 1


@mutant("strided_query_fails", "A query whose rows are not packed fails in forward.")
class _StridedQueryFails(_FailingLate):
    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        return not query.is_contiguous()


@mutant("head_size_above_128_fails", "Head sizes above 128 are declared and fail in forward.")
class _HeadSizeAbove128Fails(_FailingLate):
    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        return self.spec.head_size > 128


@mutant("lse_with_soft_cap_fails", "The LSE of a layer with a soft cap is declared and fails.")
class _LSEWithSoftCapFails(_FailingLate):
    def fails(self, query: Tensor, plan: PlainPlan, lse: Tensor | None) -> bool:
        return lse is not None and self.spec.logits_soft_cap is not None


@mutant("declared_lse_not_written", "The LSE is declared and never written.")
class _DeclaredLSENotWritten(PlainBackend):
    def store_lse(self, attended: Attended, sequence: PlannedSequence, lse: Tensor) -> None:
        pass


class _Refusing(_Declaring):
    """Refuses undeclared layers in a way of its own; head sizes above 256 are undeclared."""

    @classmethod
    def declared(cls, everything: Capabilities) -> Capabilities:
        """All but large heads, and ALiBi, so that there is something to refuse."""
        return replace(everything, head_sizes=SizeSet(maximum=256), alibi=False)

    def refusal(self, reasons: list[str]) -> Exception:
        """What is raised."""
        return UnsupportedError("attention backend", reasons)

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device,
        options: PartOptions | None = None,
    ) -> None:
        reasons = self.unsupported(spec, cache, device)
        if reasons:
            raise self.refusal(reasons)
        super().__init__(spec, cache, device, options)


@mutant("refusal_without_value", "A refusal does not name the offending value.")
class _RefusalWithoutValue(_Refusing):
    def refusal(self, reasons: list[str]) -> Exception:
        return UnsupportedError("attention backend", ["the layer is not supported"])


@mutant("refusal_names_first_reason_only", "Of several reasons a refusal names one.")
class _RefusalNamesFirstReasonOnly(_Refusing):
    def refusal(self, reasons: list[str]) -> Exception:
        return UnsupportedError("attention backend", reasons[:1])


@mutant("refusal_of_another_type", "A refusal is a RuntimeError, which nobody takes for one.")
class _RefusalOfAnotherType(_Refusing):
    def refusal(self, reasons: list[str]) -> Exception:
        return RuntimeError("; ".join(reasons))


@mutant("capabilities_raise", "Asking for the capabilities on a device that is absent fails.")
class _CapabilitiesRaise(PlainBackend):
    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"no such device: {device}")
        return super().capabilities(device)
