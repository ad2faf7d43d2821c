"""Mutants of the attention sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plain_backend import Attended, PlainBackend, PlannedSequence
from .registry import mutant


@mutant("sinks_ignored", "Sinks are accepted and never applied.")
class _SinksIgnored(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return attended


@mutant("sinks_ignored_in_decode", "A single row is computed without sinks.")
class _SinksIgnoredInDecode(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        if sequence.query_len == 1:
            return attended
        return super().with_sinks(attended, sinks, sequence)


@mutant("sinks_ignored_in_prefill", "Several rows are computed without sinks.")
class _SinksIgnoredInPrefill(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        if sequence.query_len > 1:
            return attended
        return super().with_sinks(attended, sinks, sequence)


@mutant("sink_in_numerator", "The sink brings a value of ones along.")
class _SinkInNumerator(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        share = torch.sigmoid(sinks.to(attended.lse.dtype)[:, None] - attended.lse)
        out = super().with_sinks(attended, sinks, sequence).out
        return Attended(out + share[..., None], attended.lse)


@mutant("sink_once_per_run", "The sink of a decode is counted once for every run of keys.")
class _SinkOncePerRun(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        layer = self.layer_of(sequence)
        runs = len(self.runs(self.key_range(layer, sequence))) if sequence.query_len == 1 else 1
        return super().with_sinks(attended, sinks + math.log(runs), sequence)


@mutant("sink_once_per_key", "The sink is counted once for every key.")
class _SinkOncePerKey(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        more = math.log(max(1, sequence.num_tokens))
        return super().with_sinks(attended, sinks + more, sequence)


@mutant("sink_of_another_head", "A head is given the sink of the next one.")
class _SinkOfAnotherHead(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return super().with_sinks(attended, sinks.roll(1), sequence)


@mutant("sink_of_kv_head", "A query head is given the sink at the place of its key/value head.")
class _SinkOfKVHead(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return super().with_sinks(attended, sinks[self.kv_heads()], sequence)


@mutant("sink_in_lse", "The sink is part of the LSE.")
class _SinkInLSE(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        out = super().with_sinks(attended, sinks, sequence).out
        return Attended(out, torch.logaddexp(attended.lse, sinks.to(attended.lse.dtype)[:, None]))


@mutant("sink_scaled", "The sink is multiplied by the scale of the scores.")
class _SinkScaled(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return super().with_sinks(attended, self.spec.scale * sinks, sequence)


@mutant("sink_soft_capped", "The soft cap bounds the sink too.")
class _SinkSoftCapped(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return super().with_sinks(attended, self.soft_cap(self.spec, sinks), sequence)


@mutant("sink_in_bfloat16", "The sink is rounded to bfloat16.")
class _SinkInBfloat16(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return super().with_sinks(attended, sinks.to(torch.bfloat16), sequence)


@mutant("sink_in_base_two", "The sink is taken for a logarithm to the base 2.")
class _SinkInBaseTwo(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        return super().with_sinks(attended, sinks * math.log(2), sequence)


@mutant("sink_overflows", "The sink is compared by its bare exponential, which overflows.")
class _SinkOverflows(PlainBackend):
    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        total = torch.exp(attended.lse)
        share = total / (total + torch.exp(sinks.to(total.dtype))[:, None])
        return Attended(attended.out * share[..., None], attended.lse)


@mutant("sinks_of_the_first_forward", "The sinks of the first layer are used for all layers.")
class _SinksOfTheFirstForward(PlainBackend):
    _first: Tensor | None = None

    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        if self._first is None:
            self._first = sinks.clone()
        return super().with_sinks(attended, self._first, sequence)
