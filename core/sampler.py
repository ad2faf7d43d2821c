"""From logits to the next token of each row: greedy, or drawn from the filtered distribution.

For a row that is not greedy, in this order, which is that of vLLM 0.7.3:

1. temperature: ``x = (logits - max(logits)) / temperature`` in float32, ``weight = exp(x)``;
2. top-k: the k tokens with the largest ``x``;
3. top-p: of those, the shortest list of likeliest tokens whose share of their weight is at least
   ``top_p`` (never empty);
4. min-p: of those, the tokens whose weight is at least ``min_p`` times the largest weight;
5. one draw by inversion of the cumulative weight, in the order of the token ids.

Where a limit falls between tokens with equal ``x``, the smaller ids are kept, so top-k keeps k
tokens, and ``top_p`` towards 0 ends in the same token as greedy.

**Rows are independent, bit for bit.** Weights are turned into integers (fixed point, at least 40
bits for any vocabulary below four million) before anything is summed. Integer sums are exact in
any order, so the number of rows, the kernel that is chosen for it and the filters that other rows
ask for leave a row's token as it is. A token whose weight is 0 is never drawn, and no rounding can
lead past the last token. Filters only yield a mask over token ids; the draw is the same code for a
row that asks for filters and one that does not.

**Rows without a distribution** (a NaN, a ``+inf``, or nothing but ``-inf``) give what greedy gives:
the first NaN or else the first maximum. The sampler does not report them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .random_stream import uniforms
from .sampling_params import GREEDY_TEMPERATURE

#: Logits that are filtered and drawn from at a time; each takes some 40 bytes meanwhile.
_MAX_ELEMENTS = 1 << 25
#: Tokens whose weights are added up before it is known whether the draw is among them.
_PIECE = 512
#: Fixed-point totals stay below 2**62, well inside int64.
_TOTAL_BITS = 62


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """The sampling settings of the rows of one step, on the device; see ``from_host``.

    Attributes:
        num_rows: rows, ``R``.
        all_greedy: every row takes the likeliest token.
        any_top_k, any_top_p, any_min_p: whether a row that is not greedy asks for the filter.
        sort_depth: how many of a row's largest values the filters need; None is all of them.
        packed: ``[6, R]``, int64, on the device, one copy for all settings; ``[6, 0]`` if
            ``all_greedy``, for then nobody reads it.
    """

    num_rows: int
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    sort_depth: int | None
    packed: Tensor

    @staticmethod
    def from_host(
        *,
        temperature: NDArray[np.floating],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.floating],
        min_p: NDArray[np.floating],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int64],
        device: torch.device | str,
    ) -> SamplingBatch:
        """Draw the rows' random numbers, choose the fast paths, and copy all to the device once.

        Nothing here waits for the device.

        Args:
            temperature: ``[R]``, float32 or float64, at least 0; below 1e-5 is greedy.
            top_k: ``[R]``, int64; 0 or less, and more than the vocabulary, keep all; 1 is greedy.
            top_p: ``[R]``, float32 or float64, in [0, 1]; 0, which a tiny number becomes in
                float32, keeps the likeliest token. In float64 a share such as 0.3 is met exactly.
            min_p: ``[R]``, float32 or float64, in [0, 1].
            seeds: of the rows' random streams, ``[R]``, uint64.
            positions: which number of its stream a row draws, ``[R]``, int64, at least 0: the
                number of tokens generated so far.
            device: where the logits will be.

        Raises:
            ValueError: the arrays differ in length, or a value is out of range.
        """
        _check(temperature, top_k, top_p, min_p, seeds, positions)
        device = torch.device(device)
        num_rows = len(temperature)
        greedy = (temperature < GREEDY_TEMPERATURE) | (top_k == 1)
        random = ~greedy
        has_top_k = random & (top_k > 0)
        has_top_p = random & (top_p < 1)
        all_greedy = not random.any()
        packed = np.empty((6, 0 if all_greedy else num_rows), np.int64)
        if not all_greedy:
            numbers = packed.view(np.float64)
            packed[0] = greedy
            numbers[1] = np.where(greedy, 1.0, temperature)
            packed[2] = np.where(has_top_k, top_k, 0)
            numbers[3] = np.where(has_top_p, top_p, 1.0)
            numbers[4] = np.where(greedy, 0.0, min_p)
            numbers[5] = uniforms(seeds, positions)
        host = torch.from_numpy(packed)
        if device.type == "cuda" and not all_greedy:
            host = host.pin_memory()
        needs_all = bool((has_top_p & ~has_top_k).any())
        return SamplingBatch(
            num_rows=num_rows,
            all_greedy=all_greedy,
            any_top_k=bool(has_top_k.any()),
            any_top_p=bool(has_top_p.any()),
            any_min_p=bool((random & (min_p > 0)).any()),
            sort_depth=None if needs_all else int(top_k[has_top_k].max(initial=0)),
            packed=host.to(device, non_blocking=True),
        )

    def part(self, start: int, end: int) -> SamplingBatch:
        """Rows ``start`` to ``end - 1``, with the same fast paths."""
        packed = self.packed[:, start:end]
        return replace(self, num_rows=packed.shape[1], packed=packed)

    @property
    def greedy(self) -> Tensor:
        """Rows that take the likeliest token: ``[R, 1]``, bool."""
        return self.packed[0].bool()[:, None]

    @property
    def temperature(self) -> Tensor:
        """1 for greedy rows: ``[R, 1]``, float32."""
        return self._number(1).float()

    @property
    def top_k(self) -> Tensor:
        """0 is off: ``[R, 1]``, int64."""
        return self.packed[2][:, None]

    @property
    def top_p(self) -> Tensor:
        """1 is off: ``[R, 1]``, float64."""
        return self._number(3)

    @property
    def min_p(self) -> Tensor:
        """0 is off: ``[R, 1]``, float32."""
        return self._number(4).float()

    @property
    def uniform(self) -> Tensor:
        """The row's random number, in [0, 1): ``[R, 1]``, float64."""
        return self._number(5)

    def _number(self, field: int) -> Tensor:
        return self.packed[field].view(torch.float64)[:, None]


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The next token of each row; see the head of this module for the rules.

    Args:
        logits: ``[R, V]``, any floating dtype, on the batch's device; not changed.
        batch: settings of the rows.

    Returns:
        ``[R]``, int64, on the same device. The device is not waited for.

    Raises:
        ValueError: ``logits`` and ``batch`` differ in the number of rows.
    """
    if logits.shape[0] != batch.num_rows:
        raise ValueError(f"logits have {logits.shape[0]} rows, the batch has {batch.num_rows}")
    if batch.all_greedy:
        return logits.argmax(dim=-1)
    # Rows are independent, so a part of them at a time bounds the memory and changes nothing.
    step = max(1, _MAX_ELEMENTS // logits.shape[1])
    if batch.num_rows <= step:
        return _sample_rows(logits, batch)
    starts = range(0, batch.num_rows, step)
    return torch.cat([_sample_rows(logits[i : i + step], batch.part(i, i + step)) for i in starts])


def _sample_rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
    likeliest = logits.argmax(dim=-1, keepdim=True)
    largest = logits.gather(1, likeliest).float()
    scaled = (logits.float() - largest).div_(batch.temperature)
    weights = scaled.exp()
    units = _to_units(weights, logits.shape[1])
    if batch.any_top_k or batch.any_top_p:
        units.masked_fill_(~_likeliest_mask(scaled, batch), 0)
    if batch.any_min_p:
        units.masked_fill_(weights < batch.min_p, 0)
    take_likeliest = batch.greedy | ~largest.isfinite()
    return torch.where(take_likeliest, likeliest, _draw(units, batch.uniform)).squeeze(1)


def _to_units(weights: Tensor, vocab_size: int) -> Tensor:
    """Weights in [0, 1] as int64 in fixed point, so fine that ``vocab_size`` of them still fit."""
    bits = _TOTAL_BITS - math.ceil(math.log2(vocab_size))
    return (weights * 2.0**bits).to(torch.int64)  # exact but for the fraction that is cut off


def _draw(units: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative weight: ``[R, V]`` int64 and ``[R, 1]`` in, ``[R, 1]`` out.

    The result is the first token with more than ``target`` units up to it, itself counted; its own
    units are above 0, and ``target < total`` makes sure that there is one. First the piece of the
    vocabulary is found, then the token within it: the sums are whole numbers, so the result is that
    of one long cumulative sum, of which most would never be looked at.
    """
    vocab_size = units.shape[1]
    whole = vocab_size // _PIECE * _PIECE
    sums = units[:, :whole].view(len(units), whole // _PIECE, _PIECE).sum(dim=-1)
    ends = torch.cat([sums, units[:, whole:].sum(dim=-1, keepdim=True)], dim=1).cumsum(dim=-1)
    total = ends[:, -1:]
    target = torch.minimum((uniform * total).to(torch.int64), total - 1)
    piece = torch.searchsorted(ends, target, right=True)
    before = ends.gather(1, (piece - 1).clamp(min=0)).where(piece > 0, 0)
    tokens = piece * _PIECE + torch.arange(_PIECE, device=units.device)
    inside = units.gather(1, tokens.clamp(max=vocab_size - 1)).masked_fill(tokens >= vocab_size, 0)
    return piece * _PIECE + torch.searchsorted(inside.cumsum(-1), target - before, right=True)


def _likeliest_mask(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens that top-k and top-p keep, ``[R, V]`` bool; all of a row that asks for neither."""
    vocab_size = scaled.shape[1]
    depth = vocab_size if batch.sort_depth is None else min(batch.sort_depth, vocab_size)
    if depth * 4 <= vocab_size:
        ordered = scaled.topk(depth, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values[:, :depth]
    num_kept = torch.where(batch.top_k == 0, vocab_size, batch.top_k)
    if batch.any_top_p:
        num_top_p = _num_in_top_p(ordered, num_kept, batch.top_p, vocab_size)
        num_kept = torch.where(batch.top_p < 1, num_top_p, num_kept)
    # Of the tokens equal to the last one kept, so many are kept as the larger ones leave room for.
    last = ordered.gather(1, (num_kept - 1).clamp(max=depth - 1))
    room = num_kept - (ordered > last).sum(dim=-1, keepdim=True)
    equal = scaled == last
    first_equal = equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room)
    return (num_kept == vocab_size) | (scaled > last) | first_equal


def _num_in_top_p(ordered: Tensor, num_kept: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """How many of the ``num_kept`` largest tokens make up the share ``top_p``: ``[R, 1]``, int64.

    Args:
        ordered: the largest scaled logits, falling, ``[R, depth]``, float32.
        num_kept: left over by top-k, ``[R, 1]``, int64.
        top_p: ``[R, 1]``, float64.
        vocab_size: sets the fixed point, as for the draw.
    """
    units = _to_units(ordered.exp(), vocab_size)
    units.masked_fill_(torch.arange(ordered.shape[1], device=ordered.device) >= num_kept, 0)
    cumulative = units.cumsum(dim=-1)
    needed = (top_p * cumulative[:, -1:]).ceil().to(torch.int64)
    reached_before = cumulative - units >= needed
    return (~reached_before).sum(dim=-1, keepdim=True).clamp(min=1)


def _check(
    temperature: NDArray[np.floating],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.floating],
    min_p: NDArray[np.floating],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
) -> None:
    arrays = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
        "positions": positions,
    }
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1 or temperature.ndim != 1:
        raise ValueError(f"the settings must be arrays [R] of one length: {shapes}")
    in_range = {
        "temperature": (temperature >= 0) & np.isfinite(temperature),
        "top_p": (top_p >= 0) & (top_p <= 1),
        "min_p": (min_p >= 0) & (min_p <= 1),
        "positions": positions >= 0,
    }
    for name, good in in_range.items():
        if not good.all():
            raise ValueError(f"{name}={arrays[name][~good][0]} is out of range")
