"""Whether the error bounds let a correct backend pass: random cases on the suite's own backend.

    python benchmarks/calibration.py --examples 100000 --jobs 2

The plain backend of the conformance package computes in the dtype of the query, as simply as can
be. Cases are shared among processes, by law, dtype and seed; the largest errors are printed as a
share of the bound.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from jackfield.conformance.attention.plain_backend import PlainBackend
from jackfield.conformance.attention.search import search
from jackfield.conformance.attention.subject import Subject
from jackfield.conformance.attention.suite import ALL_LAWS, SuiteOptions, SuiteRun
from jackfield.core.attention import dtype_name

LAWS = ("meaning", "lse")
SEEDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Share:
    """Some cases of a law in a dtype."""

    law: str
    dtype: torch.dtype
    seed: int
    examples: int


@dataclass(frozen=True)
class Result:
    """What came of a share; ``max_error`` as a share of the bound."""

    share: Share
    examples: int
    max_error: float
    violation: str


def prepare() -> SuiteRun:
    """The suite on the plain backend."""
    subject = Subject(PlainBackend, torch.device("cpu"))
    return SuiteRun.prepare(subject, SuiteOptions(scale="small"))


def shares(examples: int) -> Iterator[Share]:
    """All shares; together they have at least so many examples."""
    dtypes = prepare().axes.dtype
    count = -(-examples // (len(LAWS) * len(dtypes) * len(SEEDS)))
    for law in LAWS:
        for dtype in dtypes:
            for seed in SEEDS:
                yield Share(law, dtype, seed, count)


def run(share: Share) -> Result:
    """Look for a violation in a share."""
    torch.set_num_threads(1)
    suite = prepare()
    law = next(law for law in ALL_LAWS if law.name == share.law)
    axes = replace(suite.axes, dtype=(share.dtype,))
    found = search(law, suite.subject, axes, examples=share.examples, seconds=1e9, seed=share.seed)
    return Result(share, found.examples, found.max_error, str(found.violation or ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    started = time.monotonic()
    largest: dict[tuple[str, str], float] = defaultdict(float)
    total = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(run, shares(arguments.examples)):
            total += result.examples
            key = (result.share.law, dtype_name(result.share.dtype))
            largest[key] = max(largest[key], result.max_error)
            seconds = time.monotonic() - started
            print(f"{total} examples, {seconds:.0f} s: {' '.join(key)} {result.max_error:.1%}")
            if result.violation:
                raise SystemExit(f"a correct backend fails: {result.share}: {result.violation}")
    for (law, dtype), error in largest.items():
        print(f"{law:10} {dtype:10} {error:6.1%}")


if __name__ == "__main__":
    main()
