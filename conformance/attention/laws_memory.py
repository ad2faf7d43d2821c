"""Laws about what is written, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from .cases import GARBAGE, AttentionCase, CaseData, expect, spoil
from .generate import EDGES
from .laws import Law
from .oracle import write_kv_oracle
from .subject import UNTOUCHED, LawViolation, Subject, attend, same_bits


class WriteKv(Law):
    """``write_kv`` stores the new tokens in their slots and changes no other byte of the cache.

    Rows with slot -1 are stored nowhere. The whole cache is compared byte for byte, before and
    after. In 8 bits ``number / scale`` is stored, rounded to nearest, ties to even; larger numbers
    than the largest, infinity too, are stored as the largest, and NaN as any NaN.
    """

    name = "write_kv"
    directed = True
    attends = False

    def fit(self, case: AttentionCase) -> AttentionCase:
        every = (0, 0, 2, 3, 1)[case.seed % 5]
        case = replace(case, unstored_every=every or case.unstored_every)
        if case.kv_dtype.itemsize == 1 and case.seed % 2 == 0:
            case = replace(case, distribution=EDGES)
        return case

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = _before_writing(subject.build(case))
        expected = write_kv_oracle(data.key, data.value, data.cache, data.batch.slot_mapping_cpu)
        written = replace(data.cache, k=data.cache.k.clone(), v=data.cache.v.clone())
        key, value = data.key.clone(), data.value.clone()
        slots = data.batch.slot_mapping.clone()
        subject.instance(data).write_kv(data.key, data.value, written, data.batch.slot_mapping)
        for name, after, right in (
            ("keys", written.k, expected.k),
            ("values", written.v, expected.v),
        ):
            if bool((wrong := _other_bytes(after, right)).any()):
                raise LawViolation(_where(name, data, wrong), data)
        if not (same_bits(key, data.key) and same_bits(value, data.value)):
            raise LawViolation("write_kv changes the keys or values that it is given", data)
        if not torch.equal(slots, data.batch.slot_mapping):
            raise LawViolation("write_kv changes the slot mapping that it is given", data)
        return 0.0


def _other_bytes(after: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Which elements of two caches are not the same bytes: ``[P, B, K, H or Hv]``, bool. Of NaN in
    8 bits, which is nothing but a sign, either will do."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[after.dtype.itemsize]
    wrong = after.view(kind) != right.view(kind)
    if after.dtype.itemsize == 1:
        wrong &= ~(after.double().isnan() & right.double().isnan())
    return wrong


def _before_writing(data: CaseData) -> CaseData:
    """The case with other numbers in the slots that are going to be written."""
    named = torch.zeros(data.cache_spec.num_blocks * data.case.block_size, dtype=torch.bool)
    slots = data.batch.slot_mapping_cpu
    named[slots[slots >= 0]] = True
    cache = replace(data.cache, k=data.cache.k.clone(), v=data.cache.v.clone())
    spoil(cache, named, data.case.seed + 3, GARBAGE)
    return replace(data, cache=cache)


def _where(name: str, data: CaseData, wrong: torch.Tensor) -> str:
    """Which slots of the cache are wrong, in words."""
    block_size = data.case.block_size
    slots = wrong.flatten(2).any(dim=2).flatten().nonzero().flatten().tolist()
    named = set(data.batch.slot_mapping_cpu.tolist())
    stray = [slot for slot in slots if slot not in named]
    kind = f"slots that were not named: {_list(stray)}" if stray else "slots that were named"
    return (
        f"write_kv leaves wrong {name} in {len(slots)} slots ({_list(slots)}; block_size "
        f"{block_size}), {kind}; slot_mapping was {_list(data.batch.slot_mapping_cpu.tolist())}"
    )


def _list(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:8]))
    return text + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


_BATCH_TENSORS = (
    "query_start_loc",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "query_start_loc_cpu",
    "seq_lens_cpu",
    "block_table_cpu",
    "slot_mapping_cpu",
)


class NothingElse(Law):
    """``forward`` writes the rows of its queries and nothing else.

    Not the rows behind the last query (of ``out`` and of the LSE), not the cache, not the query,
    not the sinks, not the batch; it writes all rows of its queries, and returns ``out``.
    """

    name = "nothing_else"

    def fit(self, case: AttentionCase) -> AttentionCase:
        return replace(case, padding_rows=max(case.padding_rows, 1 + case.seed % 3))

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        inputs = {
            "the keys of the cache": data.cache.k,
            "the values of the cache": data.cache.v,
            "the query": data.query,
        }
        if data.sinks is not None:
            inputs["the sinks"] = data.sinks
        for name in _BATCH_TENSORS:
            inputs[f"batch.{name}"] = getattr(data.batch, name)
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        result = attend(
            subject.instance(data), data, with_lse=subject.capabilities.lse, filling=UNTOUCHED
        )
        for name, tensor in inputs.items():
            if not same_bits(before[name], tensor):
                raise LawViolation(f"plan or forward changes {name}", data)
        for name, written in (("out", result.out), ("the LSE", result.lse)):
            if written is None:
                continue
            behind = written[result.num_tokens :]
            if not same_bits(behind, torch.full_like(behind, UNTOUCHED)):
                raise LawViolation(
                    f"forward writes rows of {name} behind the last query: "
                    f"{result.num_tokens} rows belong to a query, {len(behind)} do not",
                    data,
                )
        if not result.returned_out:
            raise LawViolation(
                "forward does not return the tensor it was given for its output", data
            )
        unwritten = (result.out[: result.num_tokens] == UNTOUCHED).flatten(1).all(dim=1)
        wrong = unwritten & (expect(data).out != UNTOUCHED).flatten(1).any(dim=1)
        if bool(wrong.any()):
            rows = wrong.nonzero().flatten().tolist()
            raise LawViolation(f"forward does not write the query rows {_list(rows)}", data, result)
        return 0.0


MEMORY_LAWS: tuple[Law, ...] = (WriteKv(), NothingElse())
