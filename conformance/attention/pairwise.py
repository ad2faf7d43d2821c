"""Several backends on one set of batches: how far they are from each other and from float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, islice
from typing import Any, NoReturn

from torch import Tensor

from ...core.attention import (
    AttentionBackend,
    Capabilities,
    KVCacheSpec,
    SizeSet,
    dtype_names,
)
from ...core.errors import ConfigError
from ..environment import device_name, origin_of, versions
from ..pairwise_report import Member, Pair, PairwiseReport, worse
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
from .cases import AttentionCase, CaseData, Expected, build, expect
from .pairwise_cases import drawn_cases, rehoused
from .parallel import workers
from .subject import Subject, attend, same_bits, share_of_bound
from .suite import why_unusable

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
            ConfigError: ``jobs`` is less than 1; at once, not at the first step.
            BrokenProcessPool: one of several processes died.
        """
        if jobs < 1:
            raise ConfigError(f"--jobs {jobs}: a comparison needs at least one process, --jobs 1")
        return self._alone() if jobs == 1 else self._shared(jobs)

    def _alone(self) -> Iterator[int]:
        for case in self._chosen():
            self.compute(case)
            yield self._batches

    def _shared(self, jobs: int) -> Iterator[int]:
        size = max(1, min(_MOST_AT_A_TIME, self._options.batches // (4 * jobs)))
        subjects = tuple(self._subjects.values())
        with workers(jobs) as pool:
            shares = []
            for share in _shares(self._chosen(), size):
                shares.append(pool.submit(_computed, subjects, self._options, tuple(share)))
                # Drawing takes a while: whoever asked may want to stop.
                yield self._batches
            # In this order, so that equal numbers name the same batch every time.
            for computed in shares:
                self._merge(computed.result())
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
        if worse(share, member.error):
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
        if worse(share, pair.difference):
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
