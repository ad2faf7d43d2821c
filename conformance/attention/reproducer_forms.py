"""What reproducers compare, and the text of the functions that do it, for each sort of fault.

The text uses the parameters that a file has at its top, and the functions of ``reproducer_parts``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """What sort of fault a reproducer shows.

    Attributes:
        kernel: text of the function that an author fills in.
        main: text of the functions behind it: what is expected and how it is compared.
    """

    kernel: str
    main: str


_FORWARD_KERNEL = '''
def kernel(query, k_cache, v_cache, block_table, seq_lens, query_start_loc, sinks, out) -> Any:
    """Call your own kernel here: what it returns is then used instead of the recorded output.

    Return ``out``, or ``out, lse``, each with a row for every row of ``query``. ``out`` is given
    filled with 7; rows behind the last query have to keep that. The caches are ``[num_blocks,
    block_size, num_kv_heads, head_size]``; the mask and all else are in the parameters above.
    """
    return None
'''

_EXPECTED = '''
def expected(inputs: Inputs) -> dict[str, Output]:
    """What the formulas give, in float64, and how far rounding may take a kernel from it."""
    return definition(
        inputs,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def computed(inputs: Inputs) -> dict[str, Output] | None:
    """What the kernel makes of the inputs."""
    shape = (len(inputs.query), num_heads, v_head_size)
    return run(kernel, inputs, torch.full(shape, 7.0, dtype=dtype))
'''

#: The output is not what the formulas give.
DEFINITION = Form(
    _FORWARD_KERNEL,
    _EXPECTED
    + '''

def main() -> int:
    """Compare the output with the formulas."""
    inputs = changed(make_inputs())
    found = computed(inputs)
    checks = compare(found or ACTUAL, expected(changed(make_inputs())), "definition")
    return report(TEXTS, checks, inputs, found is not None, ACTUAL)
''',
)

_TWO_RUNS = '''

def main() -> int:
    """Compare the bits of two runs, and the second one with the formulas."""
    inputs = changed(make_inputs())
    first, second = first_run(), computed(inputs)
    by_kernel = first is not None and second is not None
    if first is None or second is None:
        first, second = FIRST_RUN, ACTUAL
    wanted = {name: first[name] for name in ("out", "lse") if name in first}
    wanted = {name: behind_query_cut(output, inputs) for name, output in wanted.items()}
    checks = compare(second, wanted, "first run")
    checks += compare(second, expected(changed(make_inputs())), "definition")
    return report(TEXTS, checks, inputs, by_kernel, ACTUAL)
'''

#: Two runs that should give the same bits do not.
SAME_BITS = Form(
    _FORWARD_KERNEL,
    _EXPECTED
    + '''

def first_run() -> dict[str, Output] | None:
    """The plain run, whose bits the other one has to give as well."""
    return computed(make_inputs())
'''
    + _TWO_RUNS,
)

#: A sequence alone gives other bits than in its batch.
ALONE = Form(
    _FORWARD_KERNEL,
    _EXPECTED
    + '''

def first_run() -> dict[str, Output] | None:
    """Each sequence in a batch of its own."""
    outs = []
    for index, new in enumerate(make_inputs().query_start_loc.diff().tolist()):
        found = computed(only_sequence(make_inputs(), index)) if new else {}
        if found is None:
            return None
        outs += [found["out"].values[:new]] if new else []
    return {"out": whole(torch.cat(outs))}
'''
    + _TWO_RUNS,
)

#: Something is written that ``forward`` has to leave alone.
UNTOUCHED = Form(
    _FORWARD_KERNEL,
    _EXPECTED
    + '''

def main() -> int:
    """Compare the output with the formulas, and all else with what it was before."""
    inputs = make_inputs()
    found = computed(inputs)
    checks = compare(found or ACTUAL, expected(make_inputs()), "definition")
    checks += compare(found or ACTUAL, before(make_inputs()), "before the call")
    return report(TEXTS, checks, inputs, found is not None, ACTUAL)


def before(inputs: Inputs) -> dict[str, Output]:
    """What has to keep its bits: rows behind the last query, the caches, query and sinks."""
    behind = torch.arange(int(inputs.query_start_loc[-1]), len(inputs.query))
    sevens = torch.full((len(behind), num_heads, v_head_size), 7.0)
    kept = {"query": inputs.query, "sinks": inputs.sinks}
    kept["k_cache"], kept["v_cache"] = inputs.k_cache.flatten(0, 1), inputs.v_cache.flatten(0, 1)
    wanted = {name: whole(tensor) for name, tensor in kept.items() if tensor is not None}
    return {"out": Output(behind, sevens), "lse": Output(behind, sevens[..., 0]), **wanted}
''',
)

#: ``write_kv`` does not leave the cache as it has to.
WRITTEN = Form(
    '''
def kernel(key, value, k_cache, v_cache, slot_mapping) -> Any:
    """Call your own kernel here: what it does is then used instead of what was recorded.

    Store ``key`` and ``value`` in the caches, ``[num_blocks, block_size, num_kv_heads,
    head_size]``, in place, and return ``k_cache, v_cache``.
    """
    return None
''',
    '''
def expected(inputs: Inputs) -> dict[str, Output]:
    """Every named slot holds its token, every other byte what it was; slot -1 is no slot."""
    key = quantised(inputs.key, kv_dtype, k_scale)
    value = quantised(inputs.value, kv_dtype, v_scale)
    for token, slot in enumerate(inputs.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            inputs.k_cache[block, offset] = key[token]
            inputs.v_cache[block, offset] = value[token]
    return tensors(inputs)


def tensors(inputs: Inputs) -> dict[str, Output]:
    """All that ``write_kv`` is given, the caches slot by slot."""
    return {
        "k_cache": whole(inputs.k_cache.flatten(0, 1)),
        "v_cache": whole(inputs.v_cache.flatten(0, 1)),
        "key": whole(inputs.key),
        "value": whole(inputs.value),
    }


def main() -> int:
    """Compare the cache with what it has to be, bit for bit."""
    inputs = make_inputs()
    caches = (inputs.k_cache, inputs.v_cache)
    result = kernel(inputs.key, inputs.value, *caches, inputs.slot_mapping)
    if result is not None:
        inputs = inputs._replace(k_cache=result[0], v_cache=result[1])
    found = ACTUAL if result is None else tensors(inputs)
    checks = compare(found, expected(make_inputs()), "write_kv")
    return report(TEXTS, checks, inputs, result is not None, ACTUAL)
''',
)
