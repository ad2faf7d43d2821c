"""``LLM``: many prompts in, answers out, in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

from tqdm import tqdm

from ..core.errors import PluginError, RequestError
from ..core.request import RequestOutput, SchedulingHints
from ..core.sampling_params import RequestOutputKind, SamplingParams
from ..core.tokenizer import ChatMessage, Tokenizer
from .interrupts import deferred_interrupt
from .llm_engine import LLMEngine

logger = logging.getLogger("jackfield")

T = TypeVar("T")
Prompt = str | Sequence[int]
Conversation = Sequence[ChatMessage]
_Work = tuple[str, Prompt | RequestError, SamplingParams, SchedulingHints]


class LLM:
    """A model that is loaded and ready to generate.

    Args:
        model: Hugging Face id, local directory, GGUF file, or ``demo``.
        options: any setting of ``EngineOptions`` by name, such as ``max_model_len=2048``. Settings
            that are not given come from ``JACKFIELD_*`` environment variables, then the TOML file
            that ``JACKFIELD_CONFIG`` names, then the defaults.

    Raises:
        ConfigError: an unknown or impossible setting.
        ModelError: the model cannot be found or read.
        PluginError, UnsupportedError: a part cannot be had, or cannot serve this model.
        CapacityError: the model length does not fit in memory.

    Example:
        >>> llm = LLM("demo")  # doctest: +SKIP
        >>> llm.generate("The capital of France is")[0].outputs[0].text  # doctest: +SKIP
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        self.engine = LLMEngine.from_options(**options)
        self._num_calls = 0

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Wrap an engine that is there already."""
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._num_calls = 0
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        hints: SchedulingHints | Sequence[SchedulingHints] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them side by side.

        Args:
            prompts: a text, a list of token ids, or a list of these.
            sampling_params: for all prompts, or one for each; default ``SamplingParams()``. Their
                ``output_kind`` is for engines that stream: whole outputs come back here.
            use_tqdm: show progress on standard error.
            hints: for the scheduling policy and the prefix cache, for all prompts or one for each.

        Returns:
            One output per prompt, in their order. A prompt that cannot be served has its reason in
            ``error``, and no outputs; the others are completed all the same.

        Raises:
            RequestError: the numbers of prompts, parameters and hints differ, or the engine is
                busy with requests of somebody else.
            EngineDeadError: a step failed.
        """
        return self._run(_as_batch(prompts), sampling_params, hints, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        hints: SchedulingHints | Sequence[SchedulingHints] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, all of them side by side.

        Args:
            messages: a conversation (a list of ``{"role": ..., "content": ...}``), or several.
            sampling_params: see ``generate``.
            use_tqdm: see ``generate``.
            chat_template: a Jinja template; default: the model's own.
            add_generation_prompt: end with the header of the assistant's turn.
            hints: see ``generate``.
        """
        conversations = _as_conversations(messages)
        tokenizer = self.get_tokenizer()

        def render(conversation: Conversation) -> list[int]:
            return tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
            )

        prompts = [_or_error(render, conversation) for conversation in conversations]
        return self._run(prompts, sampling_params, hints, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: the model came without one.
        """
        if self.engine.tokenizer is None:
            raise RequestError("this engine has no tokenizer: set skip_tokenizer_init=False")
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing has changed, while requests are live.

        Raises:
            UnsupportedError: the block manager caches no prefixes.
        """
        return self.engine.reset_prefix_cache()

    def _run(
        self,
        prompts: Sequence[Prompt | RequestError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        hints: SchedulingHints | Sequence[SchedulingHints] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        all_params = _one_each(sampling_params, SamplingParams, len(prompts), "sampling_params")
        all_hints = _one_each(hints, SchedulingHints, len(prompts), "hints")
        if self.engine.has_unfinished_requests():
            raise RequestError(
                f"the engine has {len(self.engine.unfinished_request_ids())} live requests of "
                "somebody else: finish them with step() or abort them first"
            )
        self._num_calls += 1
        ids = [f"{self._num_calls}.{index}" for index in range(len(prompts))]
        work = zip(ids, prompts, all_params, all_hints, strict=True)
        try:
            outputs = self._add_all(work)
            self._drain(outputs, len(prompts), use_tqdm)
        except BaseException:
            self._abort(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            try:
                self.engine.abort_request(request_id)
            except PluginError:
                logger.exception("a plugin failed while request %s was aborted", request_id)

    def _add_all(self, work: Iterable[_Work]) -> dict[str, RequestOutput]:
        """Add the requests; returns the outputs of those that were refused."""
        refused: dict[str, RequestOutput] = {}
        for request_id, prompt, params, hints in work:
            params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
            try:
                if isinstance(prompt, RequestError):
                    raise prompt
                self.engine.add_request(request_id, prompt, params, hints=hints)
            except RequestError as error:
                refused[request_id] = _refused(request_id, prompt, error)
        return refused

    def _drain(self, outputs: dict[str, RequestOutput], total: int, use_tqdm: bool) -> None:
        """Step until nothing is left; Ctrl-C takes effect between steps."""
        tokens = 0
        bar = tqdm(total=total, initial=len(outputs), disable=not use_tqdm, unit="prompt")
        with bar, deferred_interrupt() as interrupt:
            while self.engine.has_unfinished_requests():
                interrupt.check()
                for output in self.engine.step():
                    outputs[output.request_id] = output
                    tokens += sum(len(item.token_ids) for item in output.outputs)
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{tokens / elapsed:.1f} tokens/s", refresh=False)
                    bar.update()
            interrupt.check()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whatever came.

    Raises:
        RequestError: token ids and prompts are mixed.
    """
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    numbers = [item for item in items if isinstance(item, Integral)]
    if not numbers:
        return items
    if len(numbers) < len(items):
        raise RequestError(
            f"prompts mixes token ids such as {numbers[0]} with prompts: give the token ids of one "
            "prompt, or a list of prompts"
        )
    return [items]


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list of conversations, whatever came."""
    conversations: list[Conversation] = []
    single: list[ChatMessage] = []
    for item in messages:
        if isinstance(item, Mapping):
            single.append(item)
        else:
            conversations.append(item)
    if single and conversations:
        raise RequestError("messages mixes messages and conversations: give one or the other")
    return [single] if single else conversations


def _or_error(
    render: Callable[[Conversation], list[int]], conversation: Conversation
) -> list[int] | RequestError:
    try:
        return render(conversation)
    except RequestError as error:
        return error


def _one_each(value: T | Sequence[T] | None, kind: type[T], count: int, name: str) -> list[T]:
    if value is None:
        return [kind()] * count
    if isinstance(value, kind):
        return [value] * count
    items = list(value) if isinstance(value, Sequence) else []
    if len(items) != count:
        raise RequestError(f"{len(items)} {name} for {count} prompts: give one, or one for each")
    return items


def _refused(request_id: str, prompt: Prompt | RequestError, error: RequestError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    tokens: tuple[int, ...] = ()
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        tokens = tuple(prompt)
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=tokens,
        outputs=(),
        finished=True,
        error=error,
    )
