"""Laws about what is computed."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...core.attention import AttentionSpec, Capabilities, KVCache, KVCacheSpec, allocate_kv_cache
from .cases import AttentionCase, SequenceShape, batch_of, expect
from .generate import quantised, slots_of
from .laws import Kind, Law, NotTried
from .oracle import attention_with_bounds
from .subject import (
    UNTOUCHED,
    LawViolation,
    Subject,
    attend,
    check_meaning,
    describe,
    same_bits,
    share_of_bound,
)


class Meaning(Law):
    """The output is that of the formulas.

    Row ``i`` of a sequence with ``n`` tokens, ``q`` of them new, stands at ``p = n - q + i`` and
    sees the keys ``j <= p``, with a window ``W`` only ``j > p - W``. The error to a float64
    computation is at most what rounding explains. Slots that nobody sees hold other numbers.
    """

    name = "meaning"
    weight = 4
    directed = True

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        return check_meaning(attend(subject.instance(data), data), data)


class Lse(Law):
    """The LSE is the natural logarithm of the sum of exponentials, without the sink.

    It is float32, ``[rows, heads]``, and asking for it leaves the output right.
    """

    name = "lse"
    directed = True

    def not_claimed(self, capabilities: Capabilities, dtype: torch.dtype) -> str | None:
        return None if capabilities.lse else "lse is not declared"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        return check_meaning(attend(subject.instance(data), data, with_lse=True), data)


class NothingVisible(Law):
    """A row that sees no key is exactly 0, and its LSE is minus infinity.

    Such rows are what a batch is padded with for a captured graph: one query row, no token.
    """

    name = "nothing_visible"

    def kind_for(self, mixed_batches: bool) -> Kind:
        """Such a row decodes; where it may not stand beside a prefill, it is put into decode."""
        return "any" if mixed_batches else "decode"

    def fit(self, case: AttentionCase) -> AttentionCase:
        at = case.seed % (len(case.sequences) + 1)
        # The first sequence may be the one whose blocks others share.
        at = max(at, min(1, len(case.sequences)))
        empty = SequenceShape(0, 1)
        return replace(case, sequences=(*case.sequences[:at], empty, *case.sequences[at:]))

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        result = attend(subject.instance(data), data, with_lse=subject.capabilities.lse)
        return check_meaning(result, data)


class LargeAddresses(Law):
    """Addresses are 64-bit: a block behind 2**31 elements is read and written like any other."""

    name = "large_addresses"
    kind = "one"
    once = True
    attends = False

    #: Elements of a block: 16 tokens of 8 heads of 128.
    _SPEC = (8, 128, 16)

    def not_claimed(self, capabilities: Capabilities, dtype: torch.dtype) -> str | None:
        if dtype.itemsize > 2:
            return "tried with 16-bit caches only, which take half the memory"
        return None

    def check(self, subject: Subject, case: AttentionCase) -> float:
        num_kv_heads, head_size, _ = self._SPEC
        capabilities = subject.capabilities
        if head_size not in capabilities.head_sizes:
            head_size = case.spec.head_size
        spec = AttentionSpec(
            num_kv_heads * case.spec.group_size,
            num_kv_heads,
            head_size,
            head_size,
            head_size**-0.5,
            case.spec.dtype,
        )
        block_size = case.block_size
        per_block = block_size * num_kv_heads * head_size
        far = 2**31 // per_block + 8
        cache_spec = KVCacheSpec(
            far + 8, block_size, num_kv_heads, head_size, head_size, case.kv_dtype
        )
        try:
            cache = _untouched_memory(cache_spec, capabilities.kv_layout, subject.device)
        except (MemoryError, RuntimeError) as error:
            size = cache_spec.num_blocks * cache_spec.bytes_per_block
            raise NotTried(f"no memory for a cache of {size / 1e9:.1f} GB: {error}") from None
        instance = subject.construct(spec, cache_spec)
        num_tokens = min(2 * block_size + 3, 40)
        num_blocks = -(-num_tokens // block_size)
        generator = torch.Generator().manual_seed(case.seed)

        def draw(heads: int) -> torch.Tensor:
            numbers = torch.randn((num_tokens, heads, head_size), generator=generator)
            return numbers.to(spec.dtype).to(subject.device)

        query, key, value = draw(spec.num_heads)[:1], draw(num_kv_heads), draw(num_kv_heads)
        outputs = []
        for first_block in (0, far):
            table = torch.arange(first_block, first_block + num_blocks, dtype=torch.int32)[None]
            slots = slots_of(table[0], num_tokens, block_size)
            instance.write_kv(key, value, cache, slots.to(subject.device))
            batch = batch_of((SequenceShape(num_tokens, 1),), table, slots[-1:], subject.device)
            out = torch.full_like(query, UNTOUCHED)
            instance.forward(query, cache, instance.plan(batch), out)
            outputs.append(out)
            if first_block == 0:
                exact, _, bound, _ = attention_with_bounds(spec, query, cache, batch)
                if not share_of_bound(out, exact, bound) <= 1:
                    raise LawViolation(describe("the output", out, exact, bound))
            near = cache.k[table[0].long().to(subject.device)].reshape(-1, num_kv_heads, head_size)
            if not same_bits(near[:num_tokens], quantised(key, case.kv_dtype, 1.0)):
                raise LawViolation(
                    f"keys written to blocks {first_block} to {first_block + num_blocks - 1} of "
                    f"{per_block} elements each are not there"
                )
        if not same_bits(*outputs):
            raise LawViolation(
                f"the same tokens give another output in blocks {far} to {far + num_blocks - 1} of "
                f"{per_block} elements than in blocks 0 to {num_blocks - 1}"
            )
        return 0.0


def _untouched_memory(spec: KVCacheSpec, layout: str, device: torch.device) -> KVCache:
    """A large cache that is not filled: on a CPU, memory that nobody touches is not taken."""
    if device.type != "cpu":
        return allocate_kv_cache(spec, "NHD" if layout == "NHD" else "HND", device)

    def one(head_size: int) -> torch.Tensor:
        shape = [spec.num_blocks, spec.block_size, spec.num_kv_heads, head_size]
        if layout == "HND":
            shape[1], shape[2] = shape[2], shape[1]
        tensor = torch.empty(shape, dtype=spec.dtype, device=device)
        return tensor if layout == "NHD" else tensor.transpose(1, 2)

    return KVCache(k=one(spec.head_size), v=one(spec.v_head_size))


class AloneOrTogether(Law):
    """A sequence's result does not depend on the others of its batch.

    Bit for bit where ``Capabilities.batch_invariant`` is declared, else within the bound.
    """

    name = "alone_or_together"

    def check(self, subject: Subject, case: AttentionCase) -> float:
        data = subject.build(case)
        together = attend(subject.instance(data), data)
        share = check_meaning(together, data)
        if not subject.capabilities.batch_invariant:
            return share
        starts = data.batch.query_start_loc_cpu.tolist()
        for index, shape in enumerate(case.sequences):
            if not shape.query_len or (len(case.sequences) > 8 and index % 16):
                continue
            rows = slice(starts[index], starts[index + 1])
            single = batch_of(
                (shape,),
                data.table[index : index + 1],
                data.batch.slot_mapping_cpu[rows],
                subject.device,
            )
            own = attend(subject.instance(data), data, query=data.query[rows], batch=single)
            if not same_bits(own.out, together.out[rows]):
                raise LawViolation(
                    f"batch_invariant is declared, but sequence {index} gives other bits alone "
                    "than in its batch",
                    data,
                    together,
                    expect(data),
                )
        return share


MEANING_LAWS: tuple[Law, ...] = (
    Meaning(),
    Lse(),
    NothingVisible(),
    AloneOrTogether(),
    LargeAddresses(),
)
