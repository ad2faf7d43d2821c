"""For each law a wrong backend and a case where it breaks the law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from support.wrong_backends import (
    AcceptsAll,
    CacheWritten,
    CompanyMatters,
    Fails,
    HeadsFirst,
    HistoryMatters,
    LargestMatters,
    LastTokenOfBlockLost,
    LseInBaseTwo,
    NeighbourWritten,
    NotSaturated,
    PaddingMatters,
    PaddingWritten,
    PlacesMatter,
    RowMissesItself,
    RowOfNothingIsOne,
    StridesMatter,
    TableWidthMatters,
    UnseenMatters,
    Unwritten,
)

from jackfield.conformance.attention.cases import AttentionCase, SequenceShape
from jackfield.conformance.attention.laws import Law
from jackfield.conformance.attention.laws_bitwise import (
    BlockPermutation,
    Layers,
    NonfiniteSlots,
    PaddingRows,
    PlanInto,
    Repeat,
    Steps,
    StridedRows,
    TableTail,
    UnseenSlots,
)
from jackfield.conformance.attention.laws_composition import Chunks, Fork, SharedPrefix
from jackfield.conformance.attention.laws_meaning import (
    AloneOrTogether,
    LargeAddresses,
    Lse,
    Meaning,
    NothingVisible,
)
from jackfield.conformance.attention.laws_memory import NothingElse, WriteKv
from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.conformance.attention.refusals import Refusals
from jackfield.conformance.attention.subject import LawViolation, Subject
from jackfield.core.attention import AttentionSpec

CPU = torch.device("cpu")

SPEC = AttentionSpec(4, 2, 16, 16, 0.25, torch.float32)
CASE = AttentionCase(
    spec=SPEC,
    kv_dtype=torch.float32,
    block_size=4,
    sequences=(SequenceShape(9, 3), SequenceShape(6, 1), SequenceShape(11, 4, 1)),
    shuffle=4,
    extra_columns=1,
    table_garbage=2**31 - 1,
    seed=3,
)
ODD = replace(
    CASE,
    spec=replace(
        SPEC,
        v_head_size=24,
        sliding_window=5,
        logits_soft_cap=5.0,
        alibi_slopes=(0.5, 0.25, 0.125, 0.0625),
        sinks=True,
    ),
    padding_rows=2,
    unstored_every=3,
    fused=True,
)
HALF = replace(ODD, spec=replace(SPEC, dtype=torch.float16), kv_dtype=torch.bfloat16)
EIGHT = replace(ODD, kv_dtype=torch.float8_e4m3fn, k_scale=0.37, v_scale=3.1, seed=6)
EIGHT_OF_HALF = replace(EIGHT, spec=replace(SPEC, dtype=torch.bfloat16))
DECODE = replace(CASE, sequences=(SequenceShape(9, 1), SequenceShape(6, 1)))
LONG = replace(CASE, sequences=(SequenceShape(300, 150), SequenceShape(20, 20)))
NON_CAUSAL = replace(CASE, spec=replace(SPEC, causal=False, sliding_window=6))


@dataclass(frozen=True)
class Example:
    """A law, a backend that breaks it, and a case where it does; whether an output is recorded."""

    law: Law
    backend: type[PlainBackend]
    case: AttentionCase = CASE
    recorded: bool = True


EXAMPLES: Mapping[str, Example] = {
    "meaning": Example(Meaning(), RowMissesItself),
    "meaning_odd": Example(Meaning(), RowMissesItself, ODD),
    "meaning_half": Example(Meaning(), RowMissesItself, HALF),
    "meaning_eight_bits": Example(Meaning(), RowMissesItself, EIGHT),
    "meaning_eight_bits_of_half": Example(Meaning(), RowMissesItself, EIGHT_OF_HALF),
    "meaning_heads_first": Example(Meaning(), HeadsFirst),
    "meaning_long": Example(Meaning(), LastTokenOfBlockLost, LONG),
    "meaning_non_causal": Example(Meaning(), LastTokenOfBlockLost, NON_CAUSAL),
    "lse": Example(Lse(), LseInBaseTwo, ODD),
    "nothing_visible": Example(NothingVisible(), RowOfNothingIsOne),
    "alone_or_together": Example(AloneOrTogether(), CompanyMatters),
    "block_permutation": Example(BlockPermutation(), PlacesMatter),
    "unseen_slots": Example(UnseenSlots(), UnseenMatters, ODD),
    "nonfinite_slots": Example(NonfiniteSlots(), UnseenMatters),
    "unseen_slots_eight_bits": Example(UnseenSlots(), LargestMatters, EIGHT),
    "nonfinite_slots_eight_bits": Example(NonfiniteSlots(), LargestMatters, EIGHT),
    "block_permutation_eight_bits": Example(
        BlockPermutation(), PlacesMatter, replace(EIGHT, seed=3)
    ),
    "layers_eight_bits": Example(Layers(), HistoryMatters, EIGHT),
    "table_tail": Example(TableTail(), TableWidthMatters),
    "padding_rows": Example(PaddingRows(), PaddingMatters),
    "strided_rows": Example(StridedRows(), StridesMatter),
    "repeat": Example(Repeat(), HistoryMatters),
    "steps": Example(Steps(), HistoryMatters),
    "layers": Example(Layers(), HistoryMatters),
    "plan_into": Example(PlanInto(), HistoryMatters, DECODE),
    "chunks": Example(Chunks(), LastTokenOfBlockLost),
    "shared_prefix": Example(SharedPrefix(), LastTokenOfBlockLost, ODD),
    "fork": Example(Fork(), LastTokenOfBlockLost),
    "write_kv": Example(WriteKv(), NeighbourWritten),
    "write_kv_odd": Example(WriteKv(), NeighbourWritten, ODD),
    "write_kv_eight_bits": Example(WriteKv(), NotSaturated, EIGHT),
    "nothing_else_padding": Example(NothingElse(), PaddingWritten),
    "nothing_else_cache": Example(NothingElse(), CacheWritten, ODD),
    "nothing_else_unwritten": Example(NothingElse(), Unwritten),
    "refusals": Example(Refusals(), AcceptsAll, recorded=False),
    "exception": Example(Meaning(), Fails, recorded=False),
    "large_addresses": Example(LargeAddresses(), Fails, recorded=False),
}


def violation_of(example: Example) -> tuple[AttentionCase, LawViolation]:
    """What the law raises, as the suite hands it on."""
    subject = Subject(example.backend, CPU)
    case = example.law.fit(example.case)
    try:
        if isinstance(example.law, LargeAddresses):
            raise LawViolation("keys written to blocks 131080 to 131082 are not there")
        example.law.check(subject, case)
    except LawViolation as violation:
        return case, violation
    except RuntimeError as error:
        return case, LawViolation(f"RuntimeError: {error}", subject.build(case))
    raise AssertionError(f"{example.backend.name} keeps {example.law.name}")
