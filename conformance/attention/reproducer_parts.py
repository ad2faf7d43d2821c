"""Functions that reproducers are put together from.

Needs torch and nothing of Jackfield: a reproducer carries the text of those it uses.
"""

from __future__ import annotations

import base64
import math
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .generate import as_bytes, dequantised, garbage_like, slots_of
from .truth import attend, error_bounds


class Inputs(NamedTuple):
    """What a kernel is given.

    ``S`` sequences with ``T`` new tokens; ``N`` query and ``K`` key/value heads; ``P`` blocks of
    ``B`` tokens.

    Attributes:
        query: ``[T or more, N, H]``; rows behind the last query are padding.
        k_cache, v_cache: ``[P, B, K, H]`` and ``[P, B, K, Hv]``.
        block_table: ``[S, max_blocks]``, int32; undefined past a sequence's last block.
        seq_lens: tokens of each sequence, new ones included: ``[S]``, int32.
        query_start_loc: first query row of each sequence, then their total: ``[S + 1]``, int32.
        slot_mapping: where each new token is stored, or -1: ``[T]``, int64.
        key, value: the new tokens: ``[T, K, H]`` and ``[T, K, Hv]``.
        sinks: ``[N]``, float32, or None.
    """

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None


def newest_slots(slots: Tensor, count: int) -> Tensor:
    """The last ``count`` slots of a sequence; -1 for tokens that it does not have."""
    missing = max(0, count - len(slots))
    return torch.cat([torch.full((missing,), -1), slots[len(slots) - count + missing :]])


def heads_first(cache: Tensor) -> Tensor:
    """The same numbers, a block's memory ordered by head, token, element."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def fused_rows(inputs: Inputs) -> Inputs:
    """The same numbers; query, key and value are slices of one fused projection."""
    parts = (inputs.query, inputs.key, inputs.value)
    widths = [math.prod(part.shape[1:]) for part in parts]
    packed = torch.zeros((len(inputs.query), sum(widths)), dtype=inputs.query.dtype)
    slices = []
    for part, columns in zip(parts, torch.split(packed, widths, dim=1), strict=True):
        rows = columns[: len(part)]
        rows.copy_(part.flatten(1))
        slices.append(rows.view(part.shape))
    return inputs._replace(query=slices[0], key=slices[1], value=slices[2])


def spoil(inputs: Inputs, sliding_window: int | None, seed: int, size: float) -> Inputs:
    """Random numbers of about ``size`` in all slots whose key no query row sees."""
    block_size = inputs.k_cache.shape[1]
    unseen = torch.ones(inputs.k_cache.shape[:2], dtype=torch.bool)
    query_lens = inputs.query_start_loc.diff().tolist()
    for row, length, new in zip(
        inputs.block_table, inputs.seq_lens.tolist(), query_lens, strict=True
    ):
        if length and new:
            context = max(0, length - new)
            first = 0 if sliding_window is None else max(0, context - sliding_window + 1)
            seen = slots_of(row, length, block_size)[first:]
            unseen[seen // block_size, seen % block_size] = False
    for number, cache in enumerate((inputs.k_cache, inputs.v_cache)):
        stored = as_bytes(cache)
        garbage = garbage_like(stored[unseen].view(cache.dtype), seed + number, size)
        stored[unseen] = as_bytes(garbage)
    return inputs


def permute_blocks(inputs: Inputs, seed: int) -> Inputs:
    """All blocks of the cache in other places; the block table follows."""
    num_blocks, block_size = inputs.k_cache.shape[:2]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    table = inputs.block_table.clone()
    for row, length in zip(table, inputs.seq_lens.tolist(), strict=True):
        used = -(-length // block_size)
        row[:used] = order[row[:used].long()].to(torch.int32)
    k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
    as_bytes(k_cache)[order] = as_bytes(inputs.k_cache)
    as_bytes(v_cache)[order] = as_bytes(inputs.v_cache)
    return inputs._replace(k_cache=k_cache, v_cache=v_cache, block_table=table)


def set_slots(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store ``values``, ``[s, K, H or Hv]``, in some slots of one half of the cache."""
    as_bytes(cache)[slots // cache.shape[1], slots % cache.shape[1]] = as_bytes(values)


def only_sequence(inputs: Inputs, index: int) -> Inputs:
    """One sequence of the batch alone."""
    start, end = inputs.query_start_loc[index : index + 2].tolist()
    return inputs._replace(
        query=inputs.query[start:end],
        block_table=inputs.block_table[index : index + 1],
        seq_lens=inputs.seq_lens[index : index + 1],
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
    )


def unpack(dtype: torch.dtype, shape: Sequence[int], text: str) -> Tensor:
    """A tensor from its bytes: compressed by zlib, then base64."""
    data = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(data, dtype=dtype).view(*shape) if data else torch.empty(*shape)


def ranges(text: str) -> Tensor:
    """The numbers of a text like ``"0-3 7"``: int64."""
    numbers: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return torch.tensor(numbers, dtype=torch.int64)


class Output(NamedTuple):
    """Some rows of a tensor that a kernel writes, or what they should be.

    Attributes:
        rows: which rows; of a cache, which slots: ``[r]``, int64.
        values: ``[r, ...]``.
        bound: largest error of each element; None if it has to be the same bits.
    """

    rows: Tensor
    values: Tensor
    bound: Tensor | None = None


def whole(values: Tensor, bound: Tensor | None = None) -> Output:
    """All rows of a tensor."""
    return Output(torch.arange(len(values)), values, bound)


def recorded(rows: str, dtype: torch.dtype, shape: Sequence[int], text: str) -> Output:
    """Rows of a tensor as the file carries them."""
    return Output(ranges(rows), unpack(dtype, shape, text))


def definition(
    inputs: Inputs,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: tuple[float, ...] | None,
    k_scale: float,
    v_scale: float,
) -> dict[str, Output]:
    """Output and LSE of all query rows in float64, and how far rounding may take a kernel."""
    head_size = inputs.query.shape[2]
    heads, v_size = inputs.query.shape[1], inputs.v_cache.shape[3]
    block_size, kv_dtype = inputs.k_cache.shape[1], inputs.k_cache.dtype
    empty = torch.zeros((0, heads), dtype=torch.float64)
    nothing = torch.zeros((0, heads, v_size), dtype=torch.float64)
    parts = [(nothing, empty, nothing, empty)]
    for index, num_keys in enumerate(inputs.seq_lens.tolist()):
        start, end = inputs.query_start_loc[index : index + 2].tolist()
        slots = slots_of(inputs.block_table[index], num_keys, block_size)
        places = (slots // block_size, slots % block_size)
        keys = dequantised(inputs.k_cache[places], k_scale)
        values = dequantised(inputs.v_cache[places], v_scale)
        # Of a long prompt a run of rows at a time; without causality every row sees the same keys.
        step = max(1, (1 << 23) // max(1, num_keys * heads)) if causal else max(1, end - start)
        for first in range(start, end, step):
            rows = inputs.query[first : min(first + step, end)]
            newest = num_keys if end - start <= step else num_keys - end + first + len(rows)
            exact = attend(
                rows,
                keys[: max(0, newest)],
                values[: max(0, newest)],
                scale=scale,
                causal=causal,
                sliding_window=sliding_window,
                logits_soft_cap=logits_soft_cap,
                alibi_slopes=alibi_slopes,
                sinks=inputs.sinks,
            )
            bounds = error_bounds(exact, rows.dtype, kv_dtype, head_size, logits_soft_cap)
            parts.append((exact.out, exact.lse, *bounds))
    out, lse, out_bound, lse_bound = (torch.cat(part) for part in zip(*parts, strict=True))
    return {"out": whole(out, out_bound), "lse": whole(lse, lse_bound)}


def run(kernel: Callable[..., Any], inputs: Inputs, out: Tensor) -> dict[str, Output] | None:
    """What the kernel makes of the inputs, and what becomes of these; None if it returns None."""
    result = kernel(*inputs[:6], inputs.sinks, out)
    if result is None:
        return None
    out, lse = result if isinstance(result, tuple) else (result, None)
    found = {"out": out, "lse": lse, "query": inputs.query, "sinks": inputs.sinks}
    found["k_cache"], found["v_cache"] = inputs.k_cache.flatten(0, 1), inputs.v_cache.flatten(0, 1)
    return {name: whole(tensor) for name, tensor in found.items() if tensor is not None}


def behind_query_cut(output: Output, inputs: Inputs) -> Output:
    """Without the rows behind the last query."""
    mine = output.rows < inputs.query_start_loc[-1]
    return output._replace(rows=output.rows[mine], values=output.values[mine])


class Check(NamedTuple):
    """A comparison of some rows, all tensors ``[r, heads, elements]``.

    Attributes:
        name: of the tensor.
        against: what it is compared with, in words.
        rows: ``[r]``.
        actual, expected, bound: the bound is None if the bits have to be the same.
        errors: absolute differences, float64.
        wrong: which elements are, bool.
    """

    name: str
    against: str
    rows: Tensor
    actual: Tensor
    expected: Tensor
    bound: Tensor | None
    errors: Tensor
    wrong: Tensor


def compare(found: Mapping[str, Output], wanted: Mapping[str, Output], against: str) -> list[Check]:
    """Compare the rows that both have, of all tensors that both have."""
    checks = []
    for name in wanted:
        if name not in found:
            continue
        where = {row: index for index, row in enumerate(wanted[name].rows.tolist())}
        mine = [index for index, row in enumerate(found[name].rows.tolist()) if row in where]
        rows = found[name].rows[mine]
        theirs = [where[row] for row in rows.tolist()]
        actual = _by_head(found[name].values[mine])
        expected = _by_head(wanted[name].values[theirs])
        bound = wanted[name].bound
        bound = None if bound is None else _by_head(bound[theirs])
        errors = (actual.double() - expected.double()).abs()
        errors = torch.where(actual == expected, 0.0, torch.nan_to_num(errors, nan=torch.inf))
        wrong = _other_bits(actual, expected) if bound is None else errors > bound
        checks.append(Check(name, against, rows, actual, expected, bound, errors, wrong))
    return checks


def _by_head(tensor: Tensor) -> Tensor:
    """As ``[r, heads, elements]``."""
    return tensor.reshape(*tensor.shape, *[1] * (3 - tensor.dim()))


def _other_bits(one: Tensor, other: Tensor) -> Tensor:
    """Which elements are not the same bits; of NaN in 8 bits, only a sign, either will do."""
    if one.element_size() == 1:
        both_nan = one.double().isnan() & other.double().isnan()
        return ~both_nan & (as_bytes(one) != as_bytes(other.to(one.dtype)))
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.contiguous().view(kind) != other.to(one.dtype).contiguous().view(kind)


def worst_first(check: Check) -> Tensor:
    """Excess of each element over its bound, 0 where it is not wrong."""
    tiny = torch.finfo(torch.float64).tiny
    bound = torch.tensor(tiny, dtype=torch.float64) if check.bound is None else check.bound
    return torch.where(check.wrong, (check.errors / bound).nan_to_num(nan=torch.inf) + tiny, 0.0)


def table(check: Check, inputs: Inputs, most: int) -> list[str]:
    """The worst elements of a check, and where wrong rows are."""
    wrong_rows = check.wrong.flatten(1).any(dim=1)
    lines = [
        f"{check.name} against {check.against}: {int(check.wrong.sum())} of {check.wrong.numel()} "
        f"elements are wrong, in {int(wrong_rows.sum())} of the {len(check.rows)} rows compared"
    ]
    where = ("row", "sequence", "position")
    if check.name in ("k_cache", "v_cache"):
        where = ("slot", "block", "offset")
    names = (*where, "head", "element", "expected", "actual", "error", "bound")
    lines.append("".join(f"{name:>{_WIDTHS[at]}}" for at, name in enumerate(names)))
    ranking = worst_first(check).flatten()
    for worst in ranking.topk(min(most, int(check.wrong.sum()))).indices.tolist():
        row, rest = divmod(worst, check.wrong[0].numel())
        head, element = divmod(rest, check.wrong.shape[2])
        at = (row, head, element)
        bound = "same bits" if check.bound is None else f"{float(check.bound[at]):.2e}"
        cells = [
            *place(check.name, int(check.rows[row]), inputs),
            head,
            element,
            f"{float(check.expected[at]):.7g}",
            f"{float(check.actual[at]):.7g}",
            f"{float(check.errors[at]):.2e}",
            bound,
        ]
        lines.append("".join(f"{cell:>{_WIDTHS[at]}}" for at, cell in enumerate(cells)))
    return lines + _wrong_places(check, check.rows[wrong_rows].tolist(), inputs, most)


#: Columns of a table.
_WIDTHS = (6, 10, 10, 6, 9, 15, 15, 10, 11)


def place(name: str, row: int, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Row, sequence and position; slot, block and offset in a cache; "-" behind the last query."""
    if name in ("k_cache", "v_cache"):
        return (row, *divmod(row, inputs.k_cache.shape[1]))
    starts = inputs.query_start_loc
    if name == "sinks" or row >= int(starts[-1]):
        return row, "-", "-"
    sequence = int((starts[1:] <= row).sum())
    end = int(starts[sequence + 1])
    return row, sequence, int(inputs.seq_lens[sequence]) - end + row


def _wrong_places(check: Check, rows: Sequence[int], inputs: Inputs, most: int) -> list[str]:
    """Which rows of each sequence are wrong, or which slots of each block."""
    places: dict[Any, list[int]] = {}
    for row in rows:
        places.setdefault(place(check.name, row, inputs)[1], []).append(row)
    unit, group = ("slots", "block") if "cache" in check.name else ("rows", "sequence")
    lines = []
    for where, some in list(places.items())[:most]:
        known = "behind the last query" if where == "-" else f"{group} {where}"
        lines.append(textwrap.shorten(f"  {known}: wrong {unit} {spans(some)}", 98))
    if len(places) > most:
        lines.append(f"  and {len(places) - most} more")
    return lines


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ``"0-3 7"``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def report(
    texts: Mapping[str, str],
    checks: Sequence[Check],
    inputs: Inputs,
    by_kernel: bool,
    recorded_names: Iterable[str],
) -> int:
    """Print the case, the law and what is wrong.

    Args:
        texts: what is printed first.
        checks: all comparisons.
        inputs: of the run that was compared.
        by_kernel: whether the output is that of the author's kernel, not the recorded one.
        recorded_names: tensors that the file holds.

    Returns:
        Exit status: 1 if the fault shows, else 0.
    """
    for name, text in texts.items():
        lines = textwrap.wrap(text, 98, initial_indent=f"{name}: ", subsequent_indent="  ")
        print("\n".join([*lines[:5], *["  ..."][: len(lines) - 5]]))
    whose = "your kernel computes" if by_kernel else "the backend computed (recorded in this file)"
    compared = ", ".join(f"{one.name} ({one.against})" for one in checks) or "nothing"
    print(textwrap.fill(f"Compared: what {whose}: {compared}", 98, subsequent_indent="  "))
    failing = [check for check in checks if bool(check.wrong.any())]
    for check in failing[:3]:
        print("\n".join(table(check, inputs, (8, 4, 2)[min(len(failing), 3) - 1])))
    absent = set(recorded_names) - {check.name for check in checks}
    if failing:
        print(f"FAULT: {' and '.join(dict.fromkeys(check.name for check in failing))} wrong.")
    elif not by_kernel:
        print("FAULT as reported; this file holds no output that shows it: put your kernel in.")
    elif absent:
        print(f"No fault in what was compared; not returned: {', '.join(sorted(absent))}.")
    else:
        print("No fault: everything that was compared is as it has to be.")
    return int(bool(failing) or not by_kernel)
