"""Several backends on one set of batches: how far they are from each other and from float64."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, islice
from typing import Any, NoReturn

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.errors import HypothesisWarning
from torch import Tensor

from ...core.attention import (
    AttentionBackend,
    Capabilities,
    KVCacheSpec,
    KVLayout,
    SizeSet,
    allocate_kv_cache,
    dtype_names,
)
from ...core.errors import ConfigError
from ..environment import device_name, origin_of, versions
from ..pairwise_report import Member, Pair, PairwiseReport
from . import generate
from .axes import (
    BLOCK_SIZES,
    GROUP_SIZES,
    HEAD_SIZES,
    SCALES,
    Axes,
    axis_names,
    representatives,
    value_name,
)
from .cases import (
    GARBAGE,
    AttentionCase,
    CaseData,
    Expected,
    batch_of,
    build,
    expect,
    spoil,
    unseen_slots,
)
from .parallel import workers
from .strategies import cases, few_cases
from .subject import Subject, attend, same_bits, share_of_bound
from .suite import why_unusable

#: So many cases are drawn for a batch that everybody computes, before the search is given up.
_DRAWS = 10
#: Batches that a process computes before it tells what it found.
_MOST_AT_A_TIME = 8


@dataclass(frozen=True)
class PairwiseOptions:
    """What to compare on.

    Attributes:
        batches: how many.
        seed: of all random batches.
        scale: one of ``SCALES``.
        only: axis to values that it is narrowed to.
        command: what was typed, for the report.
    """

    batches: int = 500
    seed: int = 0
    scale: str = "small"
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    command: str = ""


def shared_capabilities(named: Mapping[str, Capabilities]) -> Capabilities:
    """What all backends declare.

    Sizes are those that the suite tries, as lists. Where no block size is common, each backend's
    preferred one is in the list: each has a cache of its own then.

    Args:
        named: declared capabilities by the name of the backend; at least one.

    Raises:
        ConfigError: they have no dtype, cache dtype, head size or group size in common.
    """
    declared = list(named.values())
    changes: dict[str, Any] = {}
    for one in fields(Capabilities):
        values = [getattr(each, one.name) for each in declared]
        if isinstance(values[0], bool):
            changes[one.name] = all(values)
        elif isinstance(values[0], frozenset):
            changes[one.name] = frozenset.intersection(*values)
    # Scores below any of these may count as hidden by somebody.
    changes["lowest_score"] = max(
        (one.lowest_score for one in declared if one.lowest_score is not None), default=None
    )
    for name, kinds in (("dtype", "dtypes"), ("cache dtype", "kv_dtypes")):
        if not changes[kinds]:
            _nothing_in_common(
                name, {who: dtype_names(getattr(can, kinds)) for who, can in named.items()}
            )
    for name, kinds, candidates in (
        ("head size", "head_sizes", HEAD_SIZES),
        ("group size", "group_sizes", GROUP_SIZES),
        ("block size", "block_sizes", BLOCK_SIZES),
    ):
        sets: list[SizeSet] = [getattr(each, kinds) for each in declared]
        tried = {size for one in sets for size in representatives(one, candidates)}
        common = {size for size in tried if all(size in one for one in sets)}
        if not common and kinds == "block_sizes":
            common = {each.preferred_block_size for each in declared}
        if not common:
            _nothing_in_common(name, {who: str(getattr(can, kinds)) for who, can in named.items()})
        changes[kinds] = SizeSet.of(*common)
    return replace(declared[0], **changes)


def shared_axes(
    named: Mapping[str, Capabilities], scale: str, only: Mapping[str, Sequence[str]]
) -> Axes:
    """What batches for all backends may vary in. Raises as ``shared_capabilities`` and
    ``Axes.narrowed``."""
    axes = Axes.of(shared_capabilities(named), SCALES[scale]).narrowed(only).matched()
    if not axes.dtype:
        both = {
            who: f"{dtype_names(can.dtypes)} with caches of {dtype_names(can.kv_dtypes)}"
            for who, can in named.items()
        }
        _nothing_in_common("dtype of query and cache", both)
    return axes


def _nothing_in_common(what: str, declared: Mapping[str, str]) -> NoReturn:
    listed = "; ".join(f"{name}: {values}" for name, values in declared.items())
    raise ConfigError(f"the backends have no {what} in common ({listed})")


def rehoused(data: CaseData, block_size: int, layout: KVLayout) -> CaseData:
    """The same keys and values in a cache with another block size or another physical order.

    Blocks that sequences have in common become blocks of their own, since a common prefix need not
    end where a block of the other size does.
    """
    case, device = data.case, data.query.device
    if block_size == case.block_size:
        return build(case, layout, device)
    shapes = tuple(replace(one, shared_blocks=0) for one in case.sequences)
    lengths = [one.seq_len for one in shapes]
    table, num_blocks = generate.block_tables(
        lengths,
        [0] * len(shapes),
        block_size,
        case.spare_blocks,
        case.shuffle,
        case.extra_columns,
        case.table_garbage,
    )
    old_spec: KVCacheSpec = data.cache_spec
    cache_spec = replace(old_spec, num_blocks=num_blocks, block_size=block_size)
    cache = allocate_kv_cache(cache_spec, layout, device, data.cache.k_scale, data.cache.v_scale)
    for index, length in enumerate(lengths):
        old = data.slots(index).to(device)
        new = generate.slots_of(table[index], length, block_size).to(device)
        for source, target in ((data.cache.k, cache.k), (data.cache.v, cache.v)):
            read = generate.as_bytes(source)[old // case.block_size, old % case.block_size]
            generate.as_bytes(target)[new // block_size, new % block_size] = read
    # Nothing is written in a comparison: no new token has a slot.
    nowhere = torch.full((case.num_tokens,), -1, dtype=torch.int64)
    moved = replace(
        data,
        case=replace(case, block_size=block_size, sequences=shapes),
        cache_spec=cache_spec,
        batch=batch_of(shapes, table, nowhere, device),
        cache=cache,
        table=table,
    )
    spoil(cache, unseen_slots(moved), case.seed, GARBAGE)
    return moved


class Comparison:
    """A comparison that batches are added to one by one.

    Raises:
        ConfigError: there are fewer than two backends, two of one name, one that cannot run on the
            device, or as ``shared_axes``.
    """

    def __init__(self, subjects: Sequence[Subject], options: PairwiseOptions) -> None:
        if len({subject.backend.name for subject in subjects}) < max(2, len(subjects)):
            raise ConfigError("a comparison needs at least two different backends: --backend NAME")
        for subject in subjects:
            unusable = why_unusable(subject)
            if unusable is not None:
                raise ConfigError(unusable)
        self._subjects = {subject.backend.name: subject for subject in subjects}
        self._can = {name: one.capabilities for name, one in self._subjects.items()}
        self._device = subjects[0].device
        self._options = options
        self.axes = shared_axes(self._can, options.scale, options.only)
        self._members = {
            name: Member(name, origin_of(one.backend)) for name, one in self._subjects.items()
        }
        self._pairs = {names: Pair(*names) for names in combinations(self._subjects, 2)}
        self._skipped: dict[str, int] = {}
        self._batches = self._rows = self._elements = 0

    @property
    def done(self) -> int:
        """Batches that were compared."""
        return self._batches

    def run(self, jobs: int = 1) -> Iterator[int]:
        """Compare on as many batches as were asked for; yields the number done from time to time.

        Args:
            jobs: processes that share the batches. What is compared does not depend on it.

        Raises:
            BrokenProcessPool: one of several processes died.
        """
        chosen = self._chosen()
        if jobs == 1:
            for case in chosen:
                self.compute(case)
                yield self._batches
            return
        size = max(1, min(_MOST_AT_A_TIME, self._options.batches // (4 * jobs)))
        subjects = tuple(self._subjects.values())
        with workers(jobs) as pool:
            shares = [
                pool.submit(_computed, subjects, self._options, tuple(share))
                for share in _shares(chosen, size)
            ]
            # In this order, so that equal numbers name the same batch every time.
            for share in shares:
                self._merge(share.result())
                yield self._batches

    def _chosen(self) -> Iterator[AttentionCase]:
        """Drawn cases that everybody takes: as many as were asked for, or fewer."""
        drawn = drawn_cases(self.axes, self._options.batches, self._options.seed)
        return islice(filter(self._accepts, drawn), self._options.batches)

    def _accepts(self, case: AttentionCase) -> bool:
        """Whether there is a query row, and no backend refuses the layer."""
        if not case.num_tokens:
            return False
        for name, subject in self._subjects.items():
            cache = KVCacheSpec(
                1,
                self._block_size(name, case),
                case.spec.num_kv_heads,
                case.spec.head_size,
                case.spec.v_head_size,
                case.kv_dtype,
            )
            if subject.backend.unsupported(case.spec, cache, self._device):
                self._skipped[name] = self._skipped.get(name, 0) + 1
                return False
        return True

    def compute(self, case: AttentionCase) -> None:
        """Compare on a batch that everybody takes."""
        first = next(iter(self._can.values()))
        data = build(case, first.kv_layout, self._device)
        expected = expect(data)
        outs = {name: self._output(name, data) for name in self._subjects}
        for name, out in outs.items():
            if out is not None:
                self._note_error(name, share_of_bound(out, expected.out, expected.out_bound), case)
        for one, other in self._pairs:
            first_out, second_out = outs[one], outs[other]
            if first_out is not None and second_out is not None:
                self._note_difference((one, other), first_out, second_out, expected, case)
        self._batches += 1
        self._rows += case.num_tokens
        self._elements += expected.out.numel()

    def _merge(self, other: PairwiseReport) -> None:
        """Add what another process found."""
        self._batches += other.batches
        self._rows += other.rows
        self._elements += other.elements
        for member in other.members:
            self._members[member.name] = self._members[member.name].joined(member)
        for pair in other.pairs:
            names = (pair.first, pair.second)
            self._pairs[names] = self._pairs[names].joined(pair)

    def _block_size(self, name: str, case: AttentionCase) -> int:
        """That of the case, or what the backend prefers if it does not have that."""
        can = self._can[name]
        return case.block_size if case.block_size in can.block_sizes else can.preferred_block_size

    def _output(self, name: str, data: CaseData) -> Tensor | None:
        """What a backend computes, ``[T, N, Hv]``; None if it fails."""
        subject, member = self._subjects[name], self._members[name]
        size = self._block_size(name, data.case)
        try:
            own = rehoused(data, size, self._can[name].kv_layout)
            backend: AttentionBackend = subject.instance(own)
            result = attend(backend, own)
        except Exception as error:
            text = member.failure or f"{type(error).__name__}: {error}: {data.case}"
            self._members[name] = replace(member, failures=member.failures + 1, failure=text)
            return None
        sizes = tuple(sorted({*member.block_sizes, size}))
        self._members[name] = replace(member, batches=member.batches + 1, block_sizes=sizes)
        return result.out[: result.num_tokens]

    def _note_error(self, name: str, share: float, case: AttentionCase) -> None:
        member = self._members[name]
        if not share <= member.error:
            self._members[name] = replace(member, error=share, worst_case=str(case))

    def _note_difference(
        self,
        names: tuple[str, str],
        first: Tensor,
        second: Tensor,
        expected: Expected,
        case: AttentionCase,
    ) -> None:
        pair = self._pairs[names]
        # Each is within one bound of the truth, on whichever side.
        share = share_of_bound(first, second.double(), 2 * expected.out_bound)
        pair = replace(pair, batches=pair.batches + 1, equal=pair.equal + same_bits(first, second))
        if not share <= pair.difference:
            pair = replace(pair, difference=share, worst_case=str(case))
        self._pairs[names] = pair

    def report(self, seconds: float = 0.0) -> PairwiseReport:
        """What was found so far."""
        axes = {
            name: tuple(value_name(value) for value in getattr(self.axes, name))
            or ("as head_size",)
            for name in axis_names()
        }
        return PairwiseReport(
            command=self._options.command,
            device=device_name(self._device),
            versions=versions(),
            seed=self._options.seed,
            scale=self._options.scale,
            axes=axes,
            batches=self._batches,
            rows=self._rows,
            elements=self._elements,
            members=tuple(self._members.values()),
            pairs=tuple(self._pairs.values()),
            skipped=dict(self._skipped),
            seconds=seconds,
        )


def _computed(
    subjects: Sequence[Subject], options: PairwiseOptions, share: Sequence[AttentionCase]
) -> PairwiseReport:
    """What a process finds on its share of the batches."""
    comparison = Comparison(subjects, options)
    for case in share:
        comparison.compute(case)
    return comparison.report()


def _shares(chosen: Iterator[AttentionCase], size: int) -> Iterator[list[AttentionCase]]:
    while share := list(islice(chosen, size)):
        yield share


def drawn_cases(axes: Axes, count: int, seed: int) -> Iterator[AttentionCase]:
    """A plain case for every kind of batch and dtype, then random ones, each once; enough that
    ``count`` of them remain when most are left out."""
    seen = set()
    for dtype in axes.dtype:
        for case in few_cases(replace(axes, dtype=(dtype,))):
            if case not in seen:
                seen.add(case)
                yield case
    for draw in range(_DRAWS):
        for case in _random_cases(axes, count, zlib.crc32(f"{seed} pairwise {draw}".encode())):
            if case not in seen:
                seen.add(case)
                yield case


def _random_cases(axes: Axes, count: int, seed: int) -> list[AttentionCase]:
    """Cases as the suite draws them for a law."""
    found: list[AttentionCase] = []

    def keep(case: AttentionCase) -> None:
        found.append(case)

    test = hypothesis.given(cases(axes, "any"))(keep)
    test = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(test)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)
        hypothesis.seed(seed)(test)()
    return found
