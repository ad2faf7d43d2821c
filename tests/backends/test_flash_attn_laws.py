"""flash_attn over the double of its library: every law of the conformance suite."""

from __future__ import annotations

from typing import ClassVar

from support.flash_attn_cpu import FlashAttnOnCpu, NonCausalFlashAttnOnCpu, double

from jackfield.conformance.attention.contract import AttentionContract

__all__ = ["double"]

#: Few sizes: the double computes all that it is given.
ONLY = {
    "dtype": ["bfloat16"],
    "block_size": ["256"],
    "head_size": ["16"],
    "group_size": ["1", "3"],
}


class TestCausal(AttentionContract):
    """Non-causal ALiBi is refused, so that the features are tried in two groups."""

    backend = FlashAttnOnCpu
    scale = "tiny"
    only: ClassVar = {**ONLY, "causal": ["on"]}


class TestNonCausal(AttentionContract):
    backend = NonCausalFlashAttnOnCpu
    scale = "tiny"
    only: ClassVar = {**ONLY, "causal": ["off"]}
    laws = ("meaning", "refusals", "plan_into")
