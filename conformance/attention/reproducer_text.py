"""The text of a reproducer: its parameters, its functions, and those that it carries."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from ...core.attention import KVLayout
from . import generate, reproducer_parts, truth
from .cases import GARBAGE, AttentionCase
from .reproducer_forms import Form

#: Modules whose functions a reproducer may carry, in the order in which it does.
_CARRIED: tuple[ModuleType, ...] = (generate, truth, reproducer_parts)

_IMPORTS = (
    "import base64",
    "import math",
    "import sys",
    "import textwrap",
    "import zlib",
    "from collections.abc import Callable, Iterable, Mapping, Sequence",
    "from dataclasses import dataclass",
    "from typing import Any, NamedTuple",
    "",
    "import torch",
    "from torch import Tensor",
)


_MAKE_INPUTS = '''
def make_inputs() -> Inputs:
    """The inputs, from the parameters above; slots that no row sees hold garbage."""
    lengths = [tokens for tokens, _, _ in sequences]
    shared_blocks = [shared for _, _, shared in sequences]
    block_table, num_blocks = block_tables(
        lengths, shared_blocks, block_size, spare_blocks, shuffle, extra_columns, table_garbage
    )
    slots = [
        slots_of(row, length, block_size) for row, length in zip(block_table, lengths, strict=True)
    ]
    query_lens = torch.tensor([0] + [new for _, new, _ in sequences])
    query, keys, values, sinks = draw(
        distribution,
        seed,
        dtype,
        kv_dtype,
        int(query_lens.sum()) + padding_rows,
        num_heads,
        num_blocks * block_size,
        num_kv_heads,
        head_size,
        v_head_size,
        slots,
        k_scale,
        v_scale,
    )
    k_stored, v_stored = quantised(keys, kv_dtype, k_scale), quantised(values, kv_dtype, v_scale)
    new_slots = [
        newest_slots(some, new) for some, (_, new, _) in zip(slots, sequences, strict=True)
    ]
    slot_mapping = torch.cat([torch.zeros(0, dtype=torch.int64), *new_slots])
    inputs = Inputs(
        query=query,
        k_cache=k_stored.reshape(num_blocks, block_size, num_kv_heads, head_size),
        v_cache=v_stored.reshape(num_blocks, block_size, num_kv_heads, v_head_size),
        block_table=block_table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=query_lens.cumsum(0).to(torch.int32),
        slot_mapping=slot_mapping,
        key=keys[slot_mapping.clamp(min=0)].to(dtype),
        value=values[slot_mapping.clamp(min=0)].to(dtype),
        sinks=sinks if has_sinks else None,
    )
'''


@dataclass(frozen=True)
class Source:
    """Where the inputs of a reproducer come from.

    Attributes:
        case: the parameters.
        layout: physical order of the cache.
        edits: statements of ``changed`` that turn the case's inputs into those of the fault.
        packed: assignments that ``edits`` use.
    """

    case: AttentionCase
    layout: KVLayout
    edits: tuple[str, ...] = ()
    packed: str = ""

    def parameters(self) -> str:
        """The assignments at the top of the file."""
        case, spec = self.case, self.case.spec
        sequences = [(one.seq_len, one.query_len, one.shared_blocks) for one in case.sequences]
        note = (
            "# For each sequence: its tokens, how many of them are new (query rows), and how many"
        )
        return "\n".join(
            [
                *[
                    assignment(name, getattr(spec, name))
                    for name in ("num_heads", "num_kv_heads", "head_size", "v_head_size")
                ],
                assignment("scale", spec.scale),
                assignment("dtype", spec.dtype),
                assignment("kv_dtype", case.kv_dtype),
                "# In a cache of 8 bits a number x stands for x * scale; else these are 1.",
                assignment("k_scale", case.k_scale),
                assignment("v_scale", case.v_scale),
                assignment("causal", spec.causal),
                assignment("sliding_window", spec.sliding_window),
                assignment("logits_soft_cap", spec.logits_soft_cap),
                assignment("alibi_slopes", spec.alibi_slopes),
                assignment("has_sinks", spec.sinks),
                assignment("block_size", case.block_size),
                note,
                "# leading blocks it has in common with the first sequence.",
                assignment("sequences", sequences),
                "# Blocks of nobody, seed of the order of blocks, the block table's unused part.",
                *[
                    assignment(name, getattr(case, name))
                    for name in ("spare_blocks", "shuffle", "extra_columns", "table_garbage")
                ],
                "# Rows of the query behind the last one; every so many-th new token has slot -1.",
                assignment("padding_rows", case.padding_rows),
                assignment("unstored_every", case.unstored_every),
                f'distribution = "{case.distribution}"',
                assignment("seed", case.seed),
            ]
        )

    def functions(self) -> str:
        """``make_inputs`` and ``changed``."""
        lines = []
        if self.case.fused:
            lines.append("inputs = fused_rows(inputs)")
        if self.layout == "HND":
            lines.append(
                "k_cache, v_cache = heads_first(inputs.k_cache), heads_first(inputs.v_cache)"
            )
            lines.append("inputs = inputs._replace(k_cache=k_cache, v_cache=v_cache)")
        if self.case.unstored_every:
            lines.append("slot_mapping[::unstored_every] = -1")
        lines.append(f"return spoil(inputs, sliding_window, seed, {GARBAGE})")
        what = "The inputs with which the fault shows" if self.edits else "Nothing is changed"
        edits = [*self.edits, "return inputs"]
        if self.edits and self.edits[-1].startswith("inputs = "):
            edits[-2:] = [self.edits[-1].replace("inputs = ", "return ", 1)]
        return (
            _MAKE_INPUTS
            + textwrap.indent("\n".join(lines), "    ")
            + f'\n\n\ndef changed(inputs: Inputs) -> Inputs:\n    """{what}."""\n'
            + textwrap.indent("\n".join(edits), "    ")
            + "\n"
        )


def assemble(
    head: str, source: Source, form: Form, data: Iterable[str], texts: Mapping[str, str]
) -> str:
    """The whole file.

    Args:
        head: its docstring.
        source: of the inputs.
        form: what is compared.
        data: assignments of recorded tensors.
        texts: what is printed in front of the comparison.
    """
    own = [form.kernel.strip(), source.functions().strip(), form.main.strip()]
    constants = [one for one in (source.packed, *data, _texts(texts)) if one]
    carried = _carried("\n".join([*own, *constants]))
    body = [
        *own,
        "# From here on: how inputs are drawn, the formulas, and the comparison.\n\n\n" + carried,
        "# What the backend was seen to do.\n" + "\n".join(constants),
        'if __name__ == "__main__":\n    sys.exit(main())',
    ]
    text = source.parameters() + "\n\n\n" + "\n\n\n".join(body) + "\n"
    docstring = '"""' + head.replace("\\", "\\\\").replace('"""', "'''").strip() + '\n"""'
    imports = "from __future__ import annotations\n\n" + _imports(text)
    return f"{docstring}\n\n{imports}\n\n{text}"


def load(source: Source, form: Form) -> dict[str, Callable[..., Any]]:
    """The functions that a file defines itself, with the inputs and expectations of that file."""
    names: dict[str, Any] = {}
    for module in _CARRIED:
        names.update(vars(module))
    parts = (source.parameters(), source.packed, source.functions(), form.kernel, form.main)
    exec(compile("\n".join(parts), "reproducer", "exec"), names)
    return names


def assignment(name: str, value: Any) -> str:
    """``name = value`` in at most 100 columns."""
    line = f"{name} = {value!r}"
    if len(line) <= 100 or not isinstance(value, list | tuple):
        return line
    opening, closing = "()" if isinstance(value, tuple) else "[]"
    return "\n".join([f"{name} = {opening}", *[f"    {one!r}," for one in value], closing])


def packed_lines(text: str, indent: str) -> list[str]:
    """A string literal as the argument of a call, in pieces of at most 100 columns."""
    width = 97 - len(indent)
    pieces = [text[at : at + width] for at in range(0, len(text), width)] or [""]
    return [*[f'{indent}"{piece}"' for piece in pieces[:-1]], f'{indent}"{pieces[-1]}",']


def _texts(texts: Mapping[str, str]) -> str:
    lines = ["TEXTS = {"]
    for name, text in texts.items():
        escaped = " ".join(text.split()).replace("\\", "/").replace('"', "'")
        line = f'    "{name}": "{escaped}",'
        if len(line) <= 100:
            lines.append(line)
        else:
            lines += [f'    "{name}": (', *_sentence_lines(escaped), "    ),"]
    return "\n".join([*lines, "}"])


def _sentence_lines(text: str) -> list[str]:
    """A string literal in pieces of whole words."""
    pieces = textwrap.wrap(text, 89) if len(text) > 90 else [text]
    return [f'        "{piece} "' for piece in pieces[:-1]] + [f'        "{pieces[-1]}"']


def _imports(text: str) -> str:
    """The import lines of what the text uses."""
    lines, in_use = [], _names(text)
    for line in _IMPORTS:
        head, _, names = line.rpartition("import ")
        used = [name for name in names.split(", ") if name in in_use]
        if used or not line:
            lines.append(f"{head}import {', '.join(used)}" if line else "")
    return "\n".join(lines)


def _carried(text: str) -> str:
    """All functions, classes and constants of the carried modules that the text needs."""
    definitions = {
        name: source for module in _CARRIED for name, source in _definitions(module).items()
    }
    needed: set[str] = set()
    pending = [text]
    while pending:
        names = _names(pending.pop()) & definitions.keys() - needed
        needed |= names
        pending += [definitions[name] for name in names]
    return "\n\n\n".join(source for name, source in definitions.items() if name in needed)


@cache
def _names(text: str) -> frozenset[str]:
    """All names that a piece of code uses."""
    return frozenset(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))


@cache
def _definitions(module: ModuleType) -> dict[str, str]:
    """Source of each top-level definition of a module, with decorators and ``#:`` comments."""
    text = inspect.getsource(module)
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
            first = min([first, *(one.lineno for one in node.decorator_list)])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        while lines[first - 2].startswith("#"):
            first -= 1
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found
