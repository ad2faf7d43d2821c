"""The engine loop: requests in, steps, outputs out. It receives finished parts and makes none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .batch import BatchAssembler
from .block_manager import BlockManager, BlockUsage, PrefixStats
from .decision_log import DecisionLog
from .errors import EngineDeadError, PluginError, RequestError
from .model_runner import ModelRunner
from .output_processor import OutputProcessor
from .request import FinishReason, Request, RequestOutput, SchedulingHints
from .request_intake import EngineLimits, RequestIntake
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerStats, StepPlan
from .step_description import describe_step
from .tokenizer import Tokenizer

logger = logging.getLogger("jackfield.engine")

#: A scheduler that plans nothing this often in a row, with requests waiting, is stuck.
_MAX_EMPTY_STEPS = 100


class Observer(Protocol):
    """Told what happens; plugins implement it through the observer hooks."""

    def step_planned(self, plan: StepPlan) -> None:
        """A step is about to run."""

    def step_finished(self, plan: StepPlan, sampled: dict[str, int], stats: EngineStats) -> None:
        """A step has run."""

    def request_finished(self, output: RequestOutput) -> None:
        """A request has ended."""


@dataclass(frozen=True)
class EngineStats:
    """Where the engine stands.

    Attributes:
        scheduler: counts of requests.
        blocks: use of the KV cache.
        num_steps: steps carried out.
        num_computed_tokens: tokens computed, recomputed ones included.
        num_generated_tokens: tokens sampled.
        peak_block_usage: the largest share of the blocks in use during any step, 0 to 1.
        prefix: what prefix caching has saved.
    """

    scheduler: SchedulerStats
    blocks: BlockUsage
    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int
    peak_block_usage: float
    prefix: PrefixStats = field(default_factory=PrefixStats)


class Engine:
    """Continuous batching over one model.

    Args:
        model_runner: carries out steps.
        scheduler: plans them; already holds its policy and block manager.
        block_manager: the scheduler's, read for block tables and usage.
        assembler: makes tensors of plans.
        tokenizer: for text prompts and text outputs; None serves token ids only.
        limits: what requests are checked against.
        observers: told what happens, in order.
        clock: seconds, monotonic; the only clock that requests and policies see.
        decision_log: gets a line for every step; None writes none.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        scheduler: Scheduler,
        block_manager: BlockManager,
        assembler: BatchAssembler,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        decision_log: DecisionLog | None = None,
    ) -> None:
        self.model_runner = model_runner
        self.scheduler = scheduler
        self.block_manager = block_manager
        self._assembler = assembler
        self._intake = RequestIntake(tokenizer, limits, clock)
        self._outputs = OutputProcessor(tokenizer)
        self._observers = tuple(observers)
        self._clock = clock
        self._decision_log = decision_log
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_computed = 0
        self._num_generated = 0
        self._peak_usage = 0.0
        self._empty_steps = 0
        self._cause_of_death: BaseException | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """For text prompts and text outputs; None serves token ids only."""
        return self._intake.tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What requests are checked against."""
        return self._intake.limits

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        hints: SchedulingHints | None = None,
    ) -> None:
        """Take a request; its outputs come out of ``step``.

        Args:
            request_id: unique among live requests; free again when the request has ended.
            prompt: text, or token ids.
            params: sampling settings; default ``SamplingParams()``.
            hints: for the scheduling policy and the prefix cache.

        Raises:
            RequestError: the request cannot be served; nothing has changed.
            EngineDeadError: a step failed earlier.
        """
        self._check_alive()
        if request_id in self._outputs:
            raise RequestError(
                f"request_id={request_id!r} is in use by a live request; choose another"
            )
        params = params if params is not None else SamplingParams()
        requests = self._intake.requests_of(
            request_id, prompt, params, hints or SchedulingHints(), self._num_arrivals
        )
        now = self._clock()
        added: list[Request] = []
        try:
            for request in requests:
                self.scheduler.add(request, now)
                added.append(request)
        except BaseException:
            self._let_go([request.request_id for request in added])
            raise
        self._num_arrivals += len(requests)
        self._outputs.add(prompt if isinstance(prompt, str) else None, requests)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free what it holds.

        Returns:
            What it had so far, with finish reason ``abort``; None if no such request is live.

        Raises:
            PluginError: the scheduling policy failed when it was told; the request has ended all
                the same.
        """
        children = self._outputs.children(request_id)
        output = self._outputs.abort(request_id, self._clock())
        if self._decision_log is not None:
            self._decision_log.note_aborted(children)
        if self._cause_of_death is None:
            self._let_go(children)
        if output is not None:
            self._notify_finished([output])
        return output

    def step(self) -> list[RequestOutput]:
        """Schedule, compute and sample once.

        Returns:
            Outputs of the requests that got a token (only finished ones with ``FINAL_ONLY``).

        Raises:
            EngineDeadError: the step failed; the engine can be used no more.
        """
        self._check_alive()
        try:
            return self._step()
        except BaseException as error:
            self._cause_of_death = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"a step failed: {type(error).__name__}: {error}") from error

    def _step(self) -> list[RequestOutput]:
        started = self._clock()
        plan = self.scheduler.schedule(started)
        for request_id in plan.preempted:
            self._assembler.release(request_id)
        if not plan.scheduled:
            self.model_runner.move_blocks(plan.moves)
            self._note_empty_step(plan)
            return []
        self._empty_steps = 0
        usage, queues = self.block_manager.usage(), self.scheduler.stats()
        for observer in self._observers:
            observer.step_planned(plan)
        inputs = self._assembler.assemble(
            plan, self.scheduler.get, self.block_manager, self.model_runner.padded_size
        )
        tokens = self.model_runner.execute(inputs, plan.moves)
        self._assembler.record(inputs, tokens)
        sampled = dict(zip(inputs.sampled_ids, tokens, strict=True))
        now = self._clock()
        finished = dict(self.scheduler.update(plan, sampled, now))
        outputs, stopped = self._outputs.process(list(sampled.items()), finished, now)
        self._let_go((*finished, *stopped))
        if self._decision_log is not None:
            reasons = {name: reason.value for name, reason in finished.items()}
            stops = dict.fromkeys(stopped, FinishReason.STOP.value)
            self._decision_log.record(plan, reasons | stops)
        self._account(plan, sampled, usage)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", describe_step(plan, queues, usage, now - started))
        self._notify_finished(outputs)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return len(self._outputs) > 0

    def unfinished_request_ids(self) -> list[str]:
        """Ids of the live requests, in order of arrival."""
        return self._outputs.request_ids()

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
            blocks=self.block_manager.usage(),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._num_generated,
            peak_block_usage=self._peak_usage,
            prefix=self.block_manager.prefix_stats(),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing has changed, while requests are live.

        Raises:
            UnsupportedError: the block manager caches no prefixes.
        """
        return self.block_manager.reset_prefix_cache()

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            cause = self._cause_of_death
            raise EngineDeadError(
                f"the engine stopped when a step failed ({type(cause).__name__}: {cause}); "
                "make a new one"
            ) from cause

    def _let_go(self, request_ids: Sequence[str]) -> None:
        """Free all that these requests hold; what a policy raises meanwhile comes afterwards."""
        failure: Exception | None = None
        for request_id in request_ids:
            self._assembler.release(request_id)
            try:
                self.scheduler.finish(request_id)
            except PluginError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _note_empty_step(self, plan: StepPlan) -> None:
        self._empty_steps += 1
        if self._decision_log is not None:
            self._decision_log.record(plan, {})
        if logger.isEnabledFor(logging.DEBUG):
            queues, usage = self.scheduler.stats(), self.block_manager.usage()
            logger.debug("%s", describe_step(plan, queues, usage, 0.0))
        if self._empty_steps < _MAX_EMPTY_STEPS or not self.has_unfinished_requests():
            return
        stats = self.scheduler.stats()
        clipped = "; ".join(plan.clipped) or "nothing was clipped"
        raise RuntimeError(
            f"scheduler {self.scheduler.name!r} with policy {self.scheduler.policy.name!r} planned "
            f"nothing for {self._empty_steps} steps with {stats.running} running, {stats.waiting} "
            f"waiting and {stats.paused} paused requests ({clipped})"
        )

    def _account(self, plan: StepPlan, sampled: dict[str, int], usage: BlockUsage) -> None:
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        self._num_generated += len(sampled)
        self._peak_usage = max(self._peak_usage, usage.fraction)
        if self._observers:
            stats = self.stats()
            for observer in self._observers:
                observer.step_finished(plan, sampled, stats)

    def _notify_finished(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                for observer in self._observers:
                    observer.request_finished(output)
