"""Attention of one sequence in float64 from its definition, and what rounding may do to it.

Needs torch and nothing of Jackfield: every reproducer carries the text of this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """Attention of ``R`` query rows over ``n`` keys, and what it was computed from.

    All tensors are float64.

    Attributes:
        out: ``[R, N, Hv]``; 0 in a row that sees no key.
        lse: natural logarithm of the sum of exponentials, without the sink: ``[R, N]``; ``-inf`` in
            a row that sees no key.
        scores: what is exponentiated: ``[R, N, n]``; ``-inf`` where a row does not see a key.
        magnitudes: ``|scale| * sum_i |query_i * key_i|``, against which rounding errors of a dot
            product are measured: ``[R, N, n]``.
        biases: absolute value of the ALiBi term: ``[N, R, n]`` made ``[R, N, n]``; 0 without ALiBi.
        weights: softmax weights, the sink in the denominator: ``[R, N, n]``.
        values: value of each key for each query head: ``[n, N, Hv]``.
        sink_weights: weight of the sink: ``[R, N]``; 0 without sinks.
        sinks: ``[N]``; None without sinks.
    """

    out: Tensor
    lse: Tensor
    scores: Tensor
    magnitudes: Tensor
    biases: Tensor
    weights: Tensor
    values: Tensor
    sink_weights: Tensor
    sinks: Tensor | None


def visible_keys(
    positions: Tensor, num_keys: int, causal: bool, sliding_window: int | None
) -> Tensor:
    """Which keys rows at these positions see: ``[R, n]``, bool.

    A row at ``p`` sees ``j <= p`` if causal, and with a window ``W`` only ``j > p - W``.
    """
    rows = positions[:, None]
    keys = torch.arange(num_keys, device=positions.device)[None, :]
    seen = torch.ones(len(positions), num_keys, dtype=torch.bool, device=positions.device)
    if causal:
        seen &= keys <= rows
    if sliding_window is not None:
        seen &= keys > rows - sliding_window
    return seen


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rows_after: int = 0,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    sinks: Tensor | None = None,
) -> Truth:
    """Attention of ``R`` of the newest tokens of a sequence over its ``n`` tokens.

    Args:
        query: ``[R, N, H]``, any dtype.
        keys: ``[n, K, H]``; keys that no row sees may hold anything.
        values: ``[n, K, Hv]``; likewise.
        rows_after: tokens of the sequence behind the last row: 0 if the rows are the newest.
        scale, causal, sliding_window, logits_soft_cap, alibi_slopes: as in ``AttentionSpec``.
        sinks: ``[N]``, or None.
    """
    num_rows, num_heads = query.shape[:2]
    num_keys, num_kv_heads = keys.shape[:2]
    device = query.device
    # Row i stands at position p = n - q + i.
    first = num_keys - rows_after - num_rows
    positions = torch.arange(first, first + num_rows, device=device)
    seen = visible_keys(positions, num_keys, causal, sliding_window)
    # Zero times NaN is NaN: what nobody sees is left out before anything is multiplied.
    somebody_sees = seen.any(dim=0)[:, None, None]
    group_size = num_heads // num_kv_heads
    q = query.double()
    k = torch.where(somebody_sees, keys, 0).double().repeat_interleave(group_size, dim=1)
    v = torch.where(somebody_sees, values, 0).double().repeat_interleave(group_size, dim=1)

    scores = scale * torch.einsum("rnh,jnh->rnj", q, k)
    magnitudes = abs(scale) * torch.einsum("rnh,jnh->rnj", q.abs(), k.abs())
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    biases = torch.zeros_like(scores)
    if alibi_slopes is not None:
        distances = (positions[:, None] - torch.arange(num_keys, device=device)).double()
        slopes = torch.tensor(alibi_slopes, dtype=torch.float64, device=device)
        biases = slopes[None, :, None] * distances[:, None, :]
    scores = torch.where(seen[:, None, :], scores - biases, -math.inf)

    lse = torch.full(scores.shape[:2], -math.inf, dtype=torch.float64, device=device)
    if num_keys:
        lse = torch.logsumexp(scores, dim=-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double().expand_as(lse))
    # A row that sees nothing has weights exp(-inf) = 0, whatever they are divided by.
    finite_total = torch.where(total == -math.inf, 0.0, total)
    weights = torch.exp(scores - finite_total[..., None])
    sink_weights = torch.zeros_like(lse)
    if sinks is not None:
        sink_weights = torch.exp(sinks.double() - finite_total)
    out = torch.einsum("rnj,jnh->rnh", weights, v)
    return Truth(
        out=out,
        lse=lse,
        scores=scores,
        magnitudes=magnitudes,
        biases=biases.abs(),
        weights=weights,
        values=v,
        sink_weights=sink_weights,
        sinks=None if sinks is None else sinks.double(),
    )


def error_bounds(
    truth: Truth,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_size: int,
    logits_soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """How far a result may be from the truth if only rounding is to blame.

    The derivation is in ``docs/conformance.md``; in short: scores and sums are kept in float32
    (float64 for float64), 16-bit weights may be rounded to 16 bits before they meet the values, and
    the result is rounded once, and once more for each factor that it may be multiplied by
    afterwards. Errors of a sum of ``n`` terms count as ``min(n, 6 sqrt(n))`` units
    (https://doi.org/10.1137/18M1226312), those of matrix units that truncate as ``n / 8`` more.

    Args:
        truth: of one sequence.
        dtype: of query and output.
        kv_dtype: of the cache.
        head_size: ``H``.
        logits_soft_cap: as in ``AttentionSpec``.

    Returns:
        Bounds for ``out`` (``[R, N, Hv]``) and ``lse`` (``[R, N]``), float64. Both are 0 in a row
        that sees no key: its result is exact.
    """
    # Numbers of 8 bits fit every dtype of a query, so that the arithmetic is that of its own dtype.
    # They are multiplied by a scale that is rounded itself, or scores and results are.
    scaling = 2 if kv_dtype.itemsize == 1 else 0
    kv_dtype = dtype if kv_dtype.itemsize == 1 else kv_dtype
    halves = (torch.float16, torch.bfloat16)
    has_halves = dtype in halves or kv_dtype in halves
    # In float64 the truth is no more precise than the result.
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-24
    # Sinks and the scale of 8-bit values may be a factor of a result that has been rounded.
    roundings = 1 + (truth.sinks is not None) + (scaling > 0)
    own_unit = roundings * torch.finfo(dtype).eps / 2
    weight_unit = max(torch.finfo(one).eps / 2 for one in (dtype, kv_dtype)) if has_halves else 0.0
    if has_halves and dtype != kv_dtype:
        weight_unit *= 2

    def summation(num_terms: int) -> float:
        truncation = num_terms / 8 if has_halves else 0.0
        return min(num_terms, 6 * math.sqrt(num_terms)) + truncation

    seen = truth.scores > -math.inf
    num_keys = truth.scores.shape[-1]
    scores = torch.where(seen, truth.scores, 0.0)
    blind = ~seen.any(dim=-1)
    if not num_keys or bool(blind.all()):
        return torch.zeros_like(truth.out), torch.zeros_like(truth.lse)
    largest = torch.where(blind, 0.0, truth.scores.amax(dim=-1))
    if truth.sinks is not None:
        largest = torch.maximum(largest, truth.sinks.expand_as(largest))

    score_errors = (summation(head_size) + 4 + scaling) * truth.magnitudes
    if logits_soft_cap is not None:
        score_errors = score_errors + 16 * logits_soft_cap
    score_errors = score_errors + 4 * (truth.biases + scores.abs() + largest.abs()[..., None])
    score_errors = torch.where(seen, unit * score_errors, 0.0)
    growth = torch.expm1(score_errors)
    relative = growth + (8 + scaling) * unit + weight_unit
    summed = summation(num_keys) * unit

    weighted = truth.weights * relative
    plain = truth.values.abs()
    from_values = torch.einsum("rnj,jnh->rnh", weighted + truth.weights * summed, plain)
    sink_error = torch.zeros_like(truth.lse)
    if truth.sinks is not None:
        sink_error = truth.sink_weights * unit * (4 * (truth.sinks.abs() + largest.abs()) + 8)
    from_total = weighted.sum(dim=-1) + summed + sink_error
    out_bound = from_values + truth.out.abs() * from_total[..., None]
    # The denominator is off by a factor of 1 - from_total at worst. Whatever the weights are, the
    # result is a mean of the values.
    mean_bound = 2 * plain.amax(dim=0) * (1 + summed + (8 + scaling) * unit + weight_unit)
    denominator = (1 - from_total)[..., None]
    out_bound = torch.where(denominator > 0.5, out_bound / denominator, mean_bound)
    out_bound = torch.minimum(out_bound, mean_bound)
    out_bound = out_bound + own_unit * (truth.out.abs() + out_bound)

    # Numbers too small for their dtype: weights in 16 bits, everything else in float32.
    smallest = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny
    smallest_weight = 2.0**-25 if torch.float16 in (dtype, kv_dtype) else smallest
    total = torch.exp(torch.where(blind, 0.0, truth.lse) - largest)
    if truth.sinks is not None:
        total = total + torch.exp(truth.sinks - largest)
    seen_values = torch.einsum("rnj,jnh->rnh", seen.double(), plain)
    out_bound = out_bound + smallest_weight * seen_values / total[..., None]
    out_bound = out_bound + num_keys * smallest
    out_bound = out_bound + (roundings * 2.0**-24 if dtype == torch.float16 else smallest)

    shares = torch.exp(truth.scores - torch.where(blind, 0.0, truth.lse)[..., None])
    lse_unit = 2.0**-24
    lse_bound = (shares * growth).sum(dim=-1) + summed + 8 * unit + weight_unit
    lse_bound = lse_bound + 4 * lse_unit * (truth.lse.abs() + largest.abs() + 1)
    hidden = blind[..., None]
    return torch.where(hidden, 0.0, out_bound), torch.where(blind, 0.0, lse_bound)
