"""What a reproducer has to hold: the inputs of a fault, and what the backend made of them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.attention import dtype_name
from .cases import AttentionCase, CaseData, SequenceShape, batch_of, seen_slots
from .generate import slots_of
from .laws import Law
from .reproducer_forms import ALONE, DEFINITION, SAME_BITS, UNTOUCHED, WRITTEN, Form
from .reproducer_parts import Check, Inputs, Output, compare, run, spans, whole, worst_first
from .reproducer_text import Source, load, packed_lines
from .subject import LawViolation, Result, Subject, attend, same_bits

#: Bytes of one recorded tensor, before compression, above which its worst rows are kept only.
_MAX_RECORDED = 8_000


@dataclass(frozen=True)
class Record:
    """What a file holds besides its texts.

    Attributes:
        form: what sort of fault it shows.
        source: of its inputs.
        actual: what the backend computed; empty if there is nothing to compare.
        first: what it computed in the first of two runs; empty if there is only one.
    """

    form: Form
    source: Source
    actual: Mapping[str, Output]
    first: Mapping[str, Output]

    def assignments(self) -> list[str]:
        """The recorded tensors as Python text."""
        texts = [_mapping_text("ACTUAL", self.actual)]
        if self.form in (SAME_BITS, ALONE):
            texts.append(_mapping_text("FIRST_RUN", self.first))
        return texts

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What the file itself defines.

        Inputs and expectations are taken from there and from nowhere else: so the file cannot say
        anything other than what was recorded for it.
        """
        return load(self.source, self.form)


def record_violation(
    law: Law, subject: Subject, case: AttentionCase, violation: LawViolation
) -> Record:
    """Work out what a file has to hold; arguments as for ``write_reproducer``."""
    layout = subject.capabilities.kv_layout
    if violation.data is None:
        return Record(DEFINITION, Source(case, layout), {}, {})
    data = violation.data
    if violation.result is not None:
        return _record_forward(law, subject, data, violation.result)
    source = Source(data.case, layout)
    if law.name == "write_kv":
        return _record_written(subject, Record(WRITTEN, source, {}, {}))
    if law.name == "nothing_else":
        return _record_untouched(subject, Record(UNTOUCHED, source, {}, {}))
    return Record(DEFINITION, source, {}, {})


def _record_forward(law: Law, subject: Subject, data: CaseData, result: Result) -> Record:
    """An output that is not what the formulas or another run give."""
    in_bits = law.bitwise and law.name not in subject.capabilities.not_bitwise
    source = _source_of(data, subject, whole_cache=law.bitwise)
    record = Record(SAME_BITS if in_bits else DEFINITION, source, {}, {})
    found = _outputs(result)
    functions = record.functions()
    inputs = functions["changed"](functions["make_inputs"]())
    checks = compare(found, functions["expected"](inputs), "definition")
    first: dict[str, Output] = {}
    if in_bits:
        if data.case.fused and not source.edits:
            # With equal inputs, strides are what is left to differ.
            edits = ("inputs = fused_rows(inputs)",)
            source = replace(source, case=replace(source.case, fused=False), edits=edits)
            record = replace(record, source=source)
        with suppress(Exception):  # a file with less in it is better than none
            first = _first_run(subject, source.case, result)
    elif not any(bool(check.wrong.any()) for check in checks):
        record = replace(record, form=ALONE)
        with suppress(Exception):  # a file with less in it is better than none
            first = _each_alone(subject, data)
    against_first = compare(found, first, "first run")
    if not any(bool(check.wrong.any()) for check in against_first):
        # The fault did not come again: there is nothing to show next to the recorded output.
        first, against_first = {}, []
    actual = {name: _kept(output, checks + against_first, name) for name, output in found.items()}
    kept = {
        name: Output(actual[name].rows, output.values[actual[name].rows])
        for name, output in first.items()
    }
    return replace(record, actual=actual, first=kept)


def _first_run(subject: Subject, case: AttentionCase, like: Result) -> dict[str, Output]:
    """What a new instance makes of a case."""
    data = subject.build(case)
    return _outputs(attend(subject.instance(data), data, with_lse=like.lse is not None))


def _each_alone(subject: Subject, data: CaseData) -> dict[str, Output]:
    """What the backend makes of each sequence of a case in a batch of its own."""
    starts = data.batch.query_start_loc_cpu.tolist()
    outs = []
    for index, shape in enumerate(data.case.sequences):
        rows = slice(starts[index], starts[index + 1])
        slots = data.batch.slot_mapping_cpu[rows]
        batch = batch_of((shape,), data.table[index : index + 1], slots, subject.device)
        if shape.query_len:
            own = attend(subject.instance(data), data, query=data.query[rows], batch=batch)
            outs.append(own.out.cpu())
    return {"out": whole(torch.cat(outs))}


def _outputs(result: Result) -> dict[str, Output]:
    """The rows of queries."""
    count = result.num_tokens
    found = {"out": whole(result.out[:count].cpu())}
    if result.lse is not None:
        found["lse"] = whole(result.lse[:count].cpu())
    return found


def _record_written(subject: Subject, record: Record) -> Record:
    """What ``write_kv`` makes of the cache; the fault has to come again."""
    data = subject.build(record.source.case)
    with suppress(Exception):  # a file with less in it is better than none
        subject.instance(data).write_kv(data.key, data.value, data.cache, data.batch.slot_mapping)
    functions = record.functions()
    found: dict[str, Output] = functions["tensors"](_inputs_of(data))
    wanted = functions["expected"](functions["make_inputs"]())
    return replace(record, actual=_wrong_only(found, compare(found, wanted, "write_kv")))


def _record_untouched(subject: Subject, record: Record) -> Record:
    """What ``forward`` makes of everything that it is given; the fault has to come again."""
    data = subject.build(record.source.case)
    found: dict[str, Output] = {}
    with suppress(Exception):  # a file with less in it is better than none
        result = attend(subject.instance(data), data, with_lse=subject.capabilities.lse)
        lse = None if result.lse is None else result.lse.cpu()
        found = run(lambda *_: (result.out.cpu(), lse), _inputs_of(data), result.out) or {}
    functions = record.functions()
    make_inputs = functions["make_inputs"]
    checks = compare(found, functions["expected"](make_inputs()), "definition")
    checks += compare(found, functions["before"](make_inputs()), "before the call")
    return replace(record, actual=_wrong_only(found, checks))


def _wrong_only(found: Mapping[str, Output], checks: Sequence[Check]) -> dict[str, Output]:
    """The rows in which something is wrong."""
    outputs = {}
    for name, output in found.items():
        excess = _excess(output, checks, name)
        if bool((excess > 0).any()):
            outputs[name] = _best(output, excess, int((excess > 0).sum()))
    return outputs


def _kept(output: Output, checks: Sequence[Check], name: str) -> Output:
    """All rows if they are few, else the most wrong ones."""
    return _best(output, _excess(output, checks, name), len(output.rows))


def _best(output: Output, excess: Tensor, wanted: int) -> Output:
    """At most ``wanted`` rows, the most wrong ones, as many as a file may hold."""
    if not len(output.rows):
        return output
    fitting = max(1, _MAX_RECORDED // output.values[0].nbytes)
    if fitting < len(output.rows):
        wanted = min(wanted, max(1, int((excess > 0).sum())))
    rows = excess.topk(min(wanted, fitting)).indices.sort().values
    return Output(output.rows[rows], output.values[rows])


def _excess(output: Output, checks: Sequence[Check], name: str) -> Tensor:
    """How wrong each row is; the rows of ``output`` are all of the tensor's."""
    excess = torch.zeros(len(output.rows), dtype=torch.float64)
    for check in checks:
        if check.name == name and check.wrong.numel():
            most = worst_first(check).flatten(1).amax(dim=1)
            excess[check.rows] = torch.maximum(excess[check.rows], most)
    return excess


def _inputs_of(data: CaseData) -> Inputs:
    """The tensors of a case on the CPU."""
    batch = data.batch
    return Inputs(
        query=data.query.cpu(),
        k_cache=data.cache.k.cpu(),
        v_cache=data.cache.v.cpu(),
        block_table=batch.block_table_cpu,
        seq_lens=batch.seq_lens_cpu,
        query_start_loc=batch.query_start_loc_cpu,
        slot_mapping=batch.slot_mapping_cpu,
        key=data.key.cpu(),
        value=data.value.cpu(),
        sinks=None if data.sinks is None else data.sinks.cpu(),
    )


def _source_of(data: CaseData, subject: Subject, whole_cache: bool) -> Source:
    """Inputs by the fewest recorded numbers: most laws change a case in a way that has a name."""
    wanted = _inputs_of(data)
    slots = torch.arange(data.cache_spec.num_blocks * data.case.block_size)
    if not whole_cache:
        slots = _seen(data)
    best, least = None, -1
    for case, edits in _candidates(data.case):
        source = Source(case, subject.capabilities.kv_layout, edits)
        functions = load(source, DEFINITION)
        made = functions["changed"](functions["make_inputs"]())
        differences = list(_differences(made, wanted, slots))
        cost = sum(len(one.packed) for one in differences)
        if best is None or cost < least:
            statements = tuple(one.statement for one in differences)
            packed = "\n".join(one.packed for one in differences if one.packed)
            best, least = replace(source, edits=edits + statements, packed=packed), cost
    assert best is not None
    return best


def _candidates(case: AttentionCase) -> Iterator[tuple[AttentionCase, tuple[str, ...]]]:
    """What laws do to a case: nothing, other garbage, other places, the numbers of another seed."""
    yield case, ()
    for size in ("1e30", "3e4"):
        yield case, (f"inputs = spoil(inputs, sliding_window, seed + 2, {size})",)
    yield case, ("inputs = permute_blocks(inputs, seed + 1)",)
    yield replace(case, seed=case.seed + 1), ()


def _seen(data: CaseData) -> Tensor:
    """Slots whose key some row of the batch sees."""
    batch = data.batch
    query_lens = batch.query_start_loc_cpu.diff().tolist()
    seen = [torch.zeros(0, dtype=torch.int64)]
    for row, length, new in zip(
        batch.block_table_cpu, batch.seq_lens_cpu.tolist(), query_lens, strict=True
    ):
        slots = slots_of(row, length, data.case.block_size)
        seen.append(seen_slots(data.spec, slots, SequenceShape(length, new)))
    return torch.tensor(sorted(set(torch.cat(seen).tolist())), dtype=torch.int64)


@dataclass(frozen=True)
class _Difference:
    """A statement that turns one input into what it has to be.

    Attributes:
        statement: of the function ``changed``.
        packed: assignment of the numbers that it uses; "" if there are none.
    """

    statement: str
    packed: str = ""


def _differences(made: Inputs, wanted: Inputs, slots: Tensor) -> Iterator[_Difference]:
    """What is left to change: in the caches, in these slots."""
    for name in ("block_table", "seq_lens", "query_start_loc", "slot_mapping"):
        if not _equal(getattr(made, name), getattr(wanted, name)):
            yield _other_numbers(name, getattr(wanted, name))
    if not _equal(made.query, wanted.query):
        yield _other_query(made.query, wanted.query)
    if made.sinks is not None and wanted.sinks is not None and not _equal(made.sinks, wanted.sinks):
        yield _replaced("sinks", wanted.sinks)
    for name in ("k_cache", "v_cache"):
        before = getattr(made, name).flatten(0, 1)[slots]
        after = getattr(wanted, name).flatten(0, 1)[slots]
        other = [row for row in range(len(slots)) if not same_bits(before[row], after[row])]
        if other:
            output = Output(slots[other], after[other])
            constant = f"CHANGED_{name.upper()}"
            yield _Difference(
                f"set_slots(inputs.{name}, {constant}.rows, {constant}.values)",
                f"{constant} = {_output_text(output, '')}",
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)


def _other_numbers(name: str, tensor: Tensor) -> _Difference:
    """Integers: written out if there are few."""
    literal = f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype})"
    statement = f"inputs = inputs._replace({name}={literal})"
    return (
        _Difference(statement)
        if tensor.numel() and len(statement) < 95
        else _replaced(name, tensor)
    )


def _other_query(made: Tensor, wanted: Tensor) -> _Difference:
    """Some rows of the query that is there, or rows behind it, or another one."""
    for first in range(len(made) - len(wanted) + 1):
        if _equal(made[first : first + len(wanted)], wanted):
            rows = f"{first}:{first + len(wanted)}"
            return _Difference(f"inputs = inputs._replace(query=inputs.query[{rows}])")
    if _equal(made, wanted[: len(made)]):
        return _Difference(
            "inputs = inputs._replace(query=torch.cat([inputs.query, MORE_ROWS.values]))",
            f"MORE_ROWS = {_output_text(whole(wanted[len(made) :]), '')}",
        )
    return _replaced("query", wanted)


def _replaced(name: str, tensor: Tensor) -> _Difference:
    constant = f"CHANGED_{name.upper()}"
    return _Difference(
        f"inputs = inputs._replace({name}={constant}.values)",
        f"{constant} = {_output_text(whole(tensor), '')}",
    )


def _mapping_text(name: str, outputs: Mapping[str, Output]) -> str:
    if not outputs:
        return f"{name}: dict[str, Output] = {{}}"
    items = [f'    "{key}": {_output_text(output, "    ")},' for key, output in outputs.items()]
    return "\n".join([f"{name} = {{", *items, "}"])


def _output_text(output: Output, indent: str) -> str:
    """A call of ``recorded`` that gives the output back."""
    values = output.values.contiguous()
    data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    packed = base64.b64encode(zlib.compress(data, 9)).decode()
    inner = indent + "    "
    rows = packed_lines(spans(output.rows.tolist()), inner)
    lines = packed_lines(packed, inner)
    shape = f"{inner}torch.{dtype_name(values.dtype)},\n{inner}{tuple(values.shape)},"
    return "\n".join(["recorded(", *rows, shape, *lines, f"{indent})"])
