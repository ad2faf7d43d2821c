"""A plain attention backend: the whole contract, each decision in a method of its own.

It attends to one sequence after the other with a few torch calls, without padding, kernels or
tricks. It is there to be broken: the mutants override single methods of it, and the suite has to
notice each of them. A query of one row is computed in runs of keys that are merged by their LSE, as
split-KV decode kernels do it; more rows at once over all their keys.

Shapes use the symbols of ``core.attention``; besides, ``q`` are the query rows of one sequence and
``n`` the keys that are looked at. Inside, query heads come first: ``[N, q, n]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    Capabilities,
    KVCache,
)
from ...core.attention_checks import check_sinks

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence of a step.

    Attributes:
        index: its place in the batch.
        first_row, end_row: its rows of the query.
        num_tokens: context and new tokens together.
        block_ids: physical block of each logical one: ``[ceil(num_tokens / B)]``, int64, on the
            device.
    """

    index: int
    first_row: int
    end_row: int
    num_tokens: int
    block_ids: Tensor

    @property
    def query_len(self) -> int:
        """Its new tokens, ``q``."""
        return self.end_row - self.first_row

    @property
    def context_len(self) -> int:
        """Tokens before the new ones; negative if there are more query rows than tokens."""
        return self.num_tokens - self.query_len


@dataclass
class PlainPlan(AttentionPlan):
    """The sequences of a step, in the order of the batch."""

    sequences: tuple[PlannedSequence, ...]


@dataclass(frozen=True)
class Attended:
    """Result for some rows over some keys.

    Attributes:
        out: ``[N, q, Hv]``; 0 in a row that sees none of the keys.
        lse: natural logarithm of the sum of exponentials: ``[N, q]``; ``-inf`` in such a row.
    """

    out: Tensor
    lse: Tensor


class PlainBackend(AttentionBackend):
    """Right for every layer and batch that the contract allows; arithmetic in float32, or in
    float64 if query or cache is in float64."""

    name = "plain"
    #: Keys that decode looks at in one go.
    keys_per_run: ClassVar[int] = 16

    @classmethod
    def capabilities(cls, device: torch.device) -> Capabilities:
        """Everything but CUDA graphs."""
        return Capabilities(
            device_types=frozenset({"cpu", "cuda"}),
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES | {torch.float8_e4m3fn},
            different_kv_dtype=True,
            different_v_head_size=True,
            non_causal=True,
            sliding_window=True,
            logits_soft_cap=True,
            alibi=True,
            sinks=True,
            lse=True,
            nonfinite_safe=True,
            batch_invariant=True,
        )

    def plan(self, batch: AttentionBatch, into: AttentionPlan | None = None) -> AttentionPlan:
        """Read lengths and blocks of every sequence; ``into`` is given them and returned."""
        sequences = tuple(self.planned(batch, index) for index in range(batch.num_seqs))
        if into is None:
            return PlainPlan(sequences)
        plan = own_plan(into)
        plan.sequences = sequences
        return plan

    def planned(self, batch: AttentionBatch, index: int) -> PlannedSequence:
        """One sequence of the batch."""
        first_row, end_row = self.row_range(batch, index)
        num_tokens = self.num_tokens(batch, index)
        block_ids = self.block_ids(batch, index, num_tokens)
        return PlannedSequence(index, first_row, end_row, num_tokens, block_ids)

    def row_range(self, batch: AttentionBatch, index: int) -> tuple[int, int]:
        """First query row of a sequence and the row behind its last."""
        return int(batch.query_start_loc_cpu[index]), int(batch.query_start_loc_cpu[index + 1])

    def num_tokens(self, batch: AttentionBatch, index: int) -> int:
        """Tokens of a sequence."""
        return int(batch.seq_lens_cpu[index])

    def block_ids(self, batch: AttentionBatch, index: int, num_tokens: int) -> Tensor:
        """Physical blocks of a sequence, ``[ceil(num_tokens / B)]``, int64, on the device; entries
        past them are not read."""
        count = -(-num_tokens // self.cache_spec.block_size)
        return batch.block_table_cpu[index, :count].to(self.device, torch.int64)

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """See the contract."""
        rows = self.stored_rows(slot_mapping)
        slots = slot_mapping[rows]
        self.store_tokens(cache.k, slots, self.to_store(key[rows], cache.k.dtype, cache.k_scale))
        self.store_tokens(cache.v, slots, self.to_store(value[rows], cache.v.dtype, cache.v_scale))

    def stored_rows(self, slot_mapping: Tensor) -> Tensor:
        """The rows of key and value that are stored: int64."""
        return torch.nonzero(slot_mapping != -1).squeeze(1)

    def store_tokens(self, stored: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Put ``tokens``, ``[s, K, H or Hv]``, into ``slots``, ``[s]``, of keys or values."""
        blocks, offsets = self.place(slots)
        stored[blocks, offsets] = tokens.to(stored.dtype)

    def to_store(self, tokens: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        """``tokens`` as what is left is to round them to a cache of this dtype: for 8 bits in
        float32, divided by the scale and limited to what the dtype holds."""
        if dtype.itemsize > 1:
            return tokens
        return self.limited(self.divided(tokens.to(torch.float32), scale), dtype)

    def divided(self, tokens: Tensor, scale: float) -> Tensor:
        """float32 tokens over the scale of a cache."""
        return tokens / torch.full((), scale, dtype=torch.float32, device=tokens.device)

    def limited(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 tokens within what a dtype of 8 bits holds; NaN stays NaN."""
        largest = torch.finfo(dtype).max
        return tokens.clamp(-largest, largest)

    def place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset of each slot."""
        return slots // self.cache_spec.block_size, slots % self.cache_spec.block_size

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
        """See the contract.

        Raises:
            ValueError: sinks are given to a layer without them, or missing.
            TypeError: the plan is another backend's.
        """
        check_sinks(self.spec, sinks)
        for sequence in own_plan(plan).sequences:
            if sequence.query_len:
                self.attend_sequence(query, cache, sequence, out, sinks, lse)
        return out

    def attend_sequence(
        self,
        query: Tensor,
        cache: KVCache,
        sequence: PlannedSequence,
        out: Tensor,
        sinks: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        """All of ``forward`` for one sequence with at least one query row."""
        rows = self.query_rows(query, sequence)
        attend = self.attend_decode if sequence.query_len == 1 else self.attend_rows
        attended = attend(rows, cache, sequence)
        if sinks is not None:
            attended = self.with_sinks(attended, sinks, sequence)
        self.store_out(attended, sequence, out)
        if lse is not None:
            self.store_lse(attended, sequence, lse)

    def query_rows(self, query: Tensor, sequence: PlannedSequence) -> Tensor:
        """A sequence's query rows, ``[N, q, H]``, contiguous, in the dtype of the arithmetic."""
        rows = query[sequence.first_row : sequence.end_row].to(self.arithmetic_dtype())
        # A copy, always: matrix products may round differently for other strides or addresses.
        return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def arithmetic_dtype(self) -> torch.dtype:
        """float32, or float64 if query or cache is in float64."""
        wide = torch.float64 in (self.spec.dtype, self.cache_spec.dtype)
        return torch.float64 if wide else torch.float32

    def attend_decode(self, rows: Tensor, cache: KVCache, sequence: PlannedSequence) -> Attended:
        """A single row, in runs of keys whose results are merged."""
        layer = self.layer_of(sequence)
        runs = self.runs(self.key_range(layer, sequence))
        parts = [self.attend_keys(layer, rows, cache, sequence, run) for run in runs]
        return self.merge(parts)

    def attend_rows(self, rows: Tensor, cache: KVCache, sequence: PlannedSequence) -> Attended:
        """Several rows, over all their keys at once."""
        layer = self.layer_of(sequence)
        return self.attend_keys(layer, rows, cache, sequence, self.key_range(layer, sequence))

    def layer_of(self, sequence: PlannedSequence) -> AttentionSpec:
        """The constants that hold for a sequence: the layer's, whatever the sequence."""
        return self.spec

    def key_range(self, layer: AttentionSpec, sequence: PlannedSequence) -> range:
        """Positions of the keys that some row of a sequence sees; nothing else is gathered."""
        first = 0
        if layer.sliding_window is not None:
            first = sequence.context_len - layer.sliding_window + 1
        return range(max(0, first), sequence.num_tokens)

    def runs(self, seen: range) -> list[range]:
        """The keys of a decode in runs; a single empty one if there are none."""
        starts = range(seen.start, max(seen.stop, seen.start + 1), self.keys_per_run)
        return [range(start, min(start + self.keys_per_run, seen.stop)) for start in starts]

    def attend_keys(
        self,
        layer: AttentionSpec,
        rows: Tensor,
        cache: KVCache,
        sequence: PlannedSequence,
        seen: range,
    ) -> Attended:
        """Some rows, ``[N, q, H]``, over the keys at positions ``seen``, sinks apart."""
        keys_at = self.key_positions(sequence, seen)
        if not len(keys_at):
            return self.nothing_seen(rows)
        rows_at = self.row_positions(layer, sequence)
        k_scale, v_scale = self.cache_scales(cache, sequence)
        keys = self.gather(cache.k, sequence, keys_at) * k_scale
        values = self.gather(cache.v, sequence, keys_at) * v_scale
        scores = self.scores(layer, rows, keys)
        scores = self.soft_cap(layer, scores)
        scores = self.alibi(layer, scores, rows_at, keys_at)
        scores = self.mask(scores, self.visible(layer, rows_at, keys_at))
        return self.weigh(scores, values)

    def key_positions(self, sequence: PlannedSequence, seen: range) -> Tensor:
        """Positions of the keys, in the order in which they are summed up: ``[n]``, int64."""
        return torch.arange(seen.start, seen.stop, device=self.device)

    def row_positions(self, layer: AttentionSpec, sequence: PlannedSequence) -> Tensor:
        """Position of each query row: ``[q, 1]``, int64."""
        return torch.arange(sequence.context_len, sequence.num_tokens, device=self.device)[:, None]

    def nothing_seen(self, rows: Tensor) -> Attended:
        """The result of rows that no key is there for."""
        num_heads, num_rows = rows.shape[:2]
        return Attended(
            out=rows.new_zeros(num_heads, num_rows, self.spec.v_head_size),
            lse=rows.new_full((num_heads, num_rows), -math.inf),
        )

    def cache_scales(self, cache: KVCache, sequence: PlannedSequence) -> tuple[float, float]:
        """What the numbers of the cache are multiplied by: keys, values."""
        return cache.k_scale, cache.v_scale

    def gather(self, stored: Tensor, sequence: PlannedSequence, keys_at: Tensor) -> Tensor:
        """Keys or values at some positions, for each query head: ``[n, N, H or Hv]``."""
        blocks, offsets = self.key_places(sequence, keys_at)
        tokens = self.read_tokens(stored, blocks, offsets)
        return tokens.index_select(1, self.kv_heads())

    def key_places(self, sequence: PlannedSequence, keys_at: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset of the keys at some positions."""
        block_size = self.cache_spec.block_size
        return sequence.block_ids[keys_at // block_size], keys_at % block_size

    def read_tokens(self, stored: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        """What one half of the cache holds at some places, in the dtype of the arithmetic:
        ``[n, K, H or Hv]``."""
        return stored[blocks, offsets].to(self.arithmetic_dtype())

    def kv_heads(self) -> Tensor:
        """The key/value head that each query head reads: ``[N]``, int64."""
        return torch.arange(self.spec.num_heads, device=self.device) // self.spec.group_size

    def scores(self, layer: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
        """Scaled dot products: ``[N, q, n]``."""
        return layer.scale * self.dot_products(rows, keys)

    def dot_products(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Of ``rows``, ``[N, q, H]``, and ``keys``, ``[n, N, H]``: ``[N, q, n]``."""
        return torch.matmul(rows, keys.permute(1, 2, 0))

    def soft_cap(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        """The scores below the soft cap, if there is one."""
        cap = layer.logits_soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def alibi(
        self, layer: AttentionSpec, scores: Tensor, rows_at: Tensor, keys_at: Tensor
    ) -> Tensor:
        """The scores with the ALiBi bias, if there is one."""
        if layer.alibi_slopes is None:
            return scores
        return scores - self.slopes(layer, scores) * self.alibi_distances(rows_at, keys_at)

    def slopes(self, layer: AttentionSpec, scores: Tensor) -> Tensor:
        """ALiBi slope of each query head: ``[N, 1, 1]``, in the dtype of the scores."""
        return scores.new_tensor(layer.alibi_slopes)[:, None, None]

    def alibi_distances(self, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        """How far each key stands before each row: ``[q, n]``; negative behind it."""
        return rows_at - keys_at

    def visible(self, layer: AttentionSpec, rows_at: Tensor, keys_at: Tensor) -> Tensor:
        """Which row sees which key: ``[q, n]``, bool."""
        distances = rows_at - keys_at
        seen = torch.ones_like(distances, dtype=torch.bool)
        if layer.causal:
            seen &= distances >= 0
        if layer.sliding_window is not None:
            seen &= distances < layer.sliding_window
        return seen

    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        """The scores, ``-inf`` where a row does not see the key."""
        return scores.masked_fill(~visible, -math.inf)

    def weigh(self, scores: Tensor, values: Tensor) -> Attended:
        """Softmax of the scores, ``[N, q, n]``, over the values, ``[n, N, Hv]``."""
        largest = self.largest(scores)
        weights = torch.exp(scores - largest)
        total = weights.sum(dim=-1, keepdim=True)
        out = self.normalise(self.weighted_sum(weights, values), total)
        return Attended(out, self.log_sum_exp(total, largest).squeeze(-1))

    def largest(self, scores: Tensor) -> Tensor:
        """What is subtracted from each row's scores before ``exp``: ``[N, q, 1]``."""
        largest = scores.amax(dim=-1, keepdim=True)
        # Nothing is subtracted where all is -inf: -inf - -inf would be NaN.
        return largest.masked_fill(largest == -math.inf, 0)

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sum of the values, each times its weight: ``[N, q, Hv]``."""
        return torch.matmul(weights, values.transpose(0, 1))

    def normalise(self, out: Tensor, total: Tensor) -> Tensor:
        """``out`` over the sum of its weights; 0 where no key was seen."""
        return out / total.masked_fill(total == 0, 1)

    def log_sum_exp(self, total: Tensor, largest: Tensor) -> Tensor:
        """LSE from the sum of ``exp(score - largest)``."""
        return torch.log(total) + largest

    def merge(self, parts: Sequence[Attended]) -> Attended:
        """One result from those of separate runs of keys."""
        if len(parts) == 1:
            return parts[0]
        lses = torch.stack([part.lse for part in parts])
        outs = torch.stack([part.out for part in parts])
        largest = lses.amax(dim=0)
        weights = self.part_weights(lses, largest)
        total = weights.sum(dim=0)
        out = self.normalise((weights[..., None] * outs).sum(dim=0), total[..., None])
        return Attended(out, torch.log(total) + largest)

    def part_weights(self, lses: Tensor, largest: Tensor) -> Tensor:
        """Weight of each run, from their LSE ``[r, N, q]`` and the largest one ``[N, q]``."""
        return torch.exp(lses - largest.masked_fill(largest == -math.inf, 0))

    def with_sinks(self, attended: Attended, sinks: Tensor, sequence: PlannedSequence) -> Attended:
        """The result with each head's sink in the denominator; the LSE stays without it."""
        share = torch.sigmoid(attended.lse - sinks.to(attended.lse.dtype)[:, None])
        return Attended(attended.out * share[..., None], attended.lse)

    def store_out(self, attended: Attended, sequence: PlannedSequence, out: Tensor) -> None:
        """Write a sequence's rows of the output."""
        rows = slice(sequence.first_row, sequence.end_row)
        out[rows] = attended.out.transpose(0, 1).to(out.dtype)

    def store_lse(self, attended: Attended, sequence: PlannedSequence, lse: Tensor) -> None:
        """Write a sequence's rows of the LSE."""
        rows = slice(sequence.first_row, sequence.end_row)
        lse[rows] = attended.lse.transpose(0, 1).to(lse.dtype)


def own_plan(plan: AttentionPlan) -> PlainPlan:
    """The plan, if it is one of ``PlainBackend``.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(plan, PlainPlan):
        raise TypeError(f"the plan is a {type(plan).__name__}, not one that PlainBackend.plan made")
    return plan
