"""Shares a search among processes: each tells stories of its own seed."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir

from ...core.errors import JackfieldError
from .search import Budget, Found, LawMachine, search

_POLL_SECONDS = 0.2
_told: Synchronized[int] | None = None


def pool(jobs: int, counter: Synchronized[int] | None = None) -> ProcessPoolExecutor:
    """Processes that start fresh; ``counter`` is where ``count`` adds up in all of them."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(counter,))


def new_counter() -> Synchronized[int]:
    """A number that processes can share."""
    counter: Synchronized[int] = multiprocessing.get_context("spawn").Value("q", 0)
    return counter


def shared_search(
    machine: Callable[[], type[LawMachine]],
    budget: Budget,
    seed: int,
    jobs: int,
    told: Callable[[int], None],
) -> Found:
    """``search`` in ``jobs`` processes, each with its share of the stories and the same seconds.

    Args:
        machine: makes the machine; can be pickled.
        budget: of all processes together.
        seed: of the first process; the others count on from it.
        jobs: processes.
        told: called now and then with the number of stories so far.

    Raises:
        JackfieldError: a process died.
    """
    if jobs == 1:
        return search(machine(), budget, seed, told=told)
    share = Budget(-(-budget.stories // jobs), budget.steps, budget.seconds)
    counter = new_counter()
    total = Found()
    with pool(jobs, counter) as processes:
        pending: set[Future[Found]] = {
            processes.submit(_search, machine, share, seed + 1_000_003 * number)
            for number in range(jobs)
        }
        try:
            while pending:
                done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                told(counter.value)
                for future in done:
                    total.add(future.result())
        except BrokenProcessPool:
            raise JackfieldError(
                "a process of the conformance run died; --jobs 1 tries the part in this process"
            ) from None
        finally:
            for future in pending:
                future.cancel()
            if pending:
                processes.shutdown(wait=False, cancel_futures=True)
    return total


def keep_out_of_the_working_directory() -> None:
    """Let Hypothesis keep what it learns of the code in a temporary folder.

    For processes of our own only: in a test suite its folder is the suite's business.
    """
    set_hypothesis_home_dir(str(Path(tempfile.gettempdir()) / "jackfield-hypothesis"))


def _start(counter: Synchronized[int] | None) -> None:
    global _told
    # Ctrl-C ends a child at once and without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_out_of_the_working_directory()
    _told = counter


def _search(machine: Callable[[], type[LawMachine]], budget: Budget, seed: int) -> Found:
    last = 0

    def told(stories: int) -> None:
        nonlocal last
        if _told is not None:
            with _told.get_lock():
                _told.value += stories - last
        last = stories

    return search(machine(), budget, seed, told=told)
