"""The output processor: from sampled tokens to the outputs that the caller reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .detokenizer import Detokenizer, make_detokenizer
from .request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
)
from .sampling_params import RequestOutputKind, SamplingParams
from .tokenizer import Tokenizer


@dataclass
class _Completion:
    """One completion under way."""

    request: Request
    detokenizer: Detokenizer
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens_sent: int = 0

    def output(self, delta: bool) -> CompletionOutput:
        """What is there so far, or with ``delta`` since the last call."""
        first_token = self.tokens_sent if delta else 0
        token_ids = tuple(self.request.output_token_ids[first_token:])
        self.tokens_sent += len(token_ids) if delta else 0
        return CompletionOutput(
            index=self.request.index,
            text=self.detokenizer.next_delta() if delta else self.detokenizer.visible_text,
            token_ids=token_ids,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )


@dataclass
class _Group:
    """The completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival_time: float
    completions: list[_Completion] = field(default_factory=list)
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def streams(self) -> bool:
        """Whether there is an output before the end."""
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        return all(item.finish_reason is not None for item in self.completions)

    def output(self) -> RequestOutput:
        delta = self.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(item.output(delta) for item in self.completions),
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_preemptions=sum(item.request.num_preemptions for item in self.completions),
            ),
            num_cached_tokens=self.completions[0].request.num_cached_tokens,
        )


class OutputProcessor:
    """Detokenises incrementally, looks for stop strings, and builds outputs."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._completions: dict[str, tuple[_Group, _Completion]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, prompt: str | None, requests: Sequence[Request]) -> None:
        """Take the completions of one prompt, which share ``parent_id`` and parameters."""
        first = requests[0]
        group = _Group(
            first.parent_id, prompt, first.prompt_token_ids, first.params, first.arrival_time
        )
        for request in requests:
            completion = _Completion(request, make_detokenizer(self._tokenizer, request.params))
            group.completions.append(completion)
            self._completions[request.request_id] = (group, completion)
        self._groups[group.request_id] = group

    def children(self, request_id: str) -> list[str]:
        """Ids of the unfinished completions of a prompt."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        return [c.request.request_id for c in group.completions if c.finish_reason is None]

    def request_ids(self) -> list[str]:
        """Ids of all prompts that are not finished."""
        return list(self._groups)

    def process(
        self,
        sampled: Sequence[tuple[str, int]],
        finished: dict[str, FinishReason],
        now: float,
    ) -> tuple[list[RequestOutput], list[str]]:
        """Take the tokens of a step.

        Args:
            sampled: request id and new token.
            finished: the requests that the scheduler ended in this step.
            now: seconds on the engine's clock.

        Returns:
            The outputs to hand out, and the ids of requests that a stop string has ended and that
            the scheduler must still let go.
        """
        touched: dict[str, _Group] = {}
        stopped = []
        for request_id, token in sampled:
            if request_id not in self._completions:
                continue
            group, completion = self._completions[request_id]
            reason = finished.get(request_id)
            if group.first_token_time is None:
                group.first_token_time = now
            matched = self._advance(completion, token, reason)
            if matched is not None:
                completion.stop_reason = matched
                if reason is None:
                    stopped.append(request_id)
                reason = FinishReason.STOP
            if reason is not None:
                self._finish(completion, reason)
            if reason is not None or group.streams:
                touched[group.request_id] = group
        return [out for group in touched.values() if (out := self._emit(group, now))], stopped

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a prompt's completions with reason ``abort``; None if there is no such prompt."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for completion in group.completions:
            if completion.finish_reason is None:
                self._finish(completion, FinishReason.ABORT)
        return self._emit(group, now)

    def _advance(
        self, completion: _Completion, token: int, reason: FinishReason | None
    ) -> str | None:
        """Feed the detokeniser; returns the stop string that matched."""
        params = completion.request.params
        if reason is FinishReason.STOP:
            if token in params.stop_token_ids:
                completion.stop_reason = token
            if not params.include_stop_str_in_output:
                return None
        return completion.detokenizer.append(token)

    def _finish(self, completion: _Completion, reason: FinishReason) -> None:
        matched = completion.detokenizer.finish()
        if matched is not None and reason is not FinishReason.ABORT:
            completion.stop_reason = matched
            reason = FinishReason.STOP
        completion.finish_reason = reason
        del self._completions[completion.request.request_id]

    def _emit(self, group: _Group, now: float) -> RequestOutput | None:
        if group.finished:
            group.finished_time = now
            del self._groups[group.request_id]
        elif not group.streams:
            return None
        return group.output()
