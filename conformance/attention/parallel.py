"""Shares work among processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..results import PropertyResult
from .search import keep_out_of_the_working_directory
from .subject import Subject
from .suite import SuiteObserver, SuiteOptions, SuiteRun

Counts = dict[str, dict[str, int]]


def run_parallel(run: SuiteRun, jobs: int, observer: SuiteObserver) -> list[PropertyResult]:
    """Try all properties of a run in ``jobs`` processes.

    Results come in the order of the laws, whatever the order in which they were found.
    """
    # The parent has measured how fast the backend is; a child that shares the cores would not.
    options = replace(run.options, jobs=1, scale=run.profile.scale)
    properties = [(law.name, dtype) for law, dtype in run.properties()]
    results: dict[int, PropertyResult] = {}
    with workers(jobs) as pool:
        pending: dict[Future[tuple[PropertyResult, Counts]], int] = {
            pool.submit(_run_property, run.subject, options, law, dtype): index
            for index, (law, dtype) in enumerate(properties)
        }
        for done in as_completed(pending):
            result, counts = done.result()
            run.coverage.merge(counts)
            results[pending[done]] = result
            observer.finished(result)
    return [results[index] for index in range(len(properties))]


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that does not wait for what has not begun when it is left by an exception."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _start() -> None:
    # Ctrl-C ends a child at once; the parent tells what was found.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_out_of_the_working_directory()


def _run_property(
    subject: Subject, options: SuiteOptions, law: str, dtype: torch.dtype
) -> tuple[PropertyResult, Counts]:
    """One property, in a process of its own: its result and what it covered."""
    run = SuiteRun.prepare(subject, replace(options, laws=(law,)))
    chosen = run.laws[0]
    result = run.property(chosen, dtype, SuiteObserver())
    return result, run.coverage.table()
