"""Shares work among processes, and outlives those that a backend kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType

import torch

from ...core.attention import dtype_name
from ..results import PropertyResult, Status
from .laws import Law
from .search import keep_out_of_the_working_directory
from .subject import Subject
from .suite import SuiteObserver, SuiteOptions, SuiteRun

Counts = dict[str, dict[str, int]]
#: How long a process may take to end by itself.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class _Answer:
    """What a process says about its task.

    Attributes:
        result: of the property that it was given; None if there is none.
        failure: why there is no result.
        counts: what was covered.
        scale: size of the cases that the backend is fast enough for, if that was the task.
        last: whether the process is of no use any more.
    """

    result: PropertyResult | None = None
    failure: str = ""
    counts: Counts = field(default_factory=dict)
    scale: str | None = None
    last: bool = False


Task = Callable[[SuiteRun], _Answer]


def run_parallel(
    run: SuiteRun, jobs: int, observer: SuiteObserver
) -> tuple[SuiteRun, list[PropertyResult]]:
    """Try all properties of a run in ``jobs`` processes; nothing of the backend runs in this one.

    A process has one property at a time, so that it is known which one killed it: that one fails,
    and another process goes on with the rest.

    Returns:
        The run, with the scale that the backend is fast enough for; and the results in the order of
        the laws, whatever the order in which they were found.
    """
    with ExitStack() as started:
        idle = [started.enter_context(_Worker()) for _ in range(jobs)]
        # Measured while nothing else runs: processes that share the cores would look slow.
        worker = idle.pop()
        worker.ask(run.subject, run.options, _probe)
        answer = worker.answer()
        if not answer.last:
            idle.append(worker)
        scale = answer.scale or run.profile.scale
        run = run.at_scale(scale)
        options = replace(run.options, jobs=1, scale=scale)
        properties = list(run.properties())
        waiting = deque(range(len(properties)))
        results: dict[int, PropertyResult] = {}
        busy: dict[_Worker, int] = {}
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = _living(idle) or started.enter_context(_Worker())
                index = waiting.popleft()
                law, dtype = properties[index]
                worker.ask(
                    run.subject, replace(options, laws=(law.name,)), partial(_property, dtype=dtype)
                )
                busy[worker] = index
            ready = wait([worker.connection for worker in busy])
            for worker in [one for one in busy if one.connection in ready]:
                index, answer = busy.pop(worker), worker.answer()
                if not answer.last:
                    idle.append(worker)
                result = answer.result or _failed(*properties[index], answer.failure)
                run.coverage.merge(answer.counts)
                results[index] = result
                observer.finished(result)
    return run, [results[index] for index in range(len(properties))]


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


class _Worker:
    """A process that tries one property after the other.

    Attributes:
        connection: ready for reading when there is an answer, or the process has ended.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        # With the only other end in the process, its death is the end of the connection.
        theirs.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.connection.close()
        if error is not None:
            self._process.terminate()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.is_alive()

    def ask(self, subject: Subject, options: SuiteOptions, task: Task) -> None:
        """Begin with a task."""
        # ``answer`` will say that the process has died.
        with suppress(BrokenPipeError):
            self.connection.send((subject, options, task))

    def answer(self) -> _Answer:
        """What came of the task; waits for it."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_END_SECONDS)
            manner = _manner(self._process.exitcode)
            return _Answer(failure=f"the process died {manner}", last=True)
        assert isinstance(answer, _Answer)
        return answer


def _living(idle: list[_Worker]) -> _Worker | None:
    """A worker that waits for work; those that died meanwhile are forgotten."""
    while idle:
        worker = idle.pop()
        if worker.alive:
            return worker
    return None


def _manner(exitcode: int | None) -> str:
    """How a process ended, in words."""
    if exitcode is None:
        return "without telling how"
    if exitcode >= 0:
        return f"with exit status {exitcode}"
    try:
        return f"of signal {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"of signal {-exitcode}"


def _failed(law: Law, dtype: torch.dtype, reason: str) -> PropertyResult:
    return PropertyResult(law.name, law.title(), dtype_name(dtype), Status.FAILED, reason=reason)


def _start() -> None:
    # Ctrl-C ends a child at once; the parent tells what was found.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_out_of_the_working_directory()


def _serve(connection: Connection) -> None:
    """Answer until nobody asks any more: all that a worker's process does."""
    _start()
    while True:
        try:
            subject, options, task = connection.recv()
            answer = task(SuiteRun.unprobed(subject, options))
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            answer = _Answer(failure=f"{type(error).__name__}: {error}", last=True)
        connection.send(answer)
        if answer.last:
            # Destructors would use the device, which may abort or hang.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _probe(run: SuiteRun) -> _Answer:
    """The scale that the backend is fast enough for."""
    return _Answer(scale=run.probed().profile.scale, last=not _usable(run.subject.device))


def _property(run: SuiteRun, dtype: torch.dtype) -> _Answer:
    """The only law of a run with a dtype: its result and what it covered."""
    result = run.property(run.laws[0], dtype, SuiteObserver())
    usable = result.status is not Status.FAILED or _usable(run.subject.device)
    return _Answer(result, counts=run.coverage.table(), last=not usable)


def _usable(device: torch.device) -> bool:
    """Whether this process can still compute on the device.

    After an illegal memory access, say, every later call on a CUDA device fails.
    """
    try:
        return int(torch.ones(1, device=device).add_(1).item()) == 2
    except Exception:
        return False
