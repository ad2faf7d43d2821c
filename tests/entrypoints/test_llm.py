"""``LLM`` and ``LLMEngine`` on a tiny model: outputs, stopping, bad input, aborts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import BOS, make_tiny_llama

from jackfield import (
    LLM,
    LLMEngine,
    Proposal,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)
from jackfield.core.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    ModelError,
    PluginError,
    RequestError,
)
from jackfield.entrypoints.engine_builder import EngineBuilder
from jackfield.entrypoints.settings import load_settings
from jackfield.plugins.discovery import discover
from jackfield.plugins.registry import Origin

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory)
    return str(directory)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model)


def _tokens(output: RequestOutput, index: int = 0) -> list[int]:
    return list(output.outputs[index].token_ids)


def test_text_and_token_ids_one_and_many(llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode("hello")
    text = llm.generate("hello", GREEDY, use_tqdm=False)
    ids = llm.generate(tokens, GREEDY, use_tqdm=False)
    many = llm.generate(["hello", tokens], GREEDY, use_tqdm=False)
    assert len(text) == len(ids) == 1
    assert text[0].prompt == "hello"
    assert ids[0].prompt is None
    assert list(text[0].prompt_token_ids) == tokens
    assert _tokens(text[0]) == _tokens(ids[0]) == _tokens(many[0]) == _tokens(many[1])
    assert text[0].outputs[0].text == llm.get_tokenizer().decode(_tokens(text[0]))
    assert text[0].outputs[0].finish_reason == "length"
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=length) for length in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(_tokens(output)) for output in outputs] == [1, 2, 3]
    with pytest.raises(RequestError, match="3 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], params, use_tqdm=False)


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    rendered = llm.get_tokenizer().encode(expected, add_special_tokens=False)
    assert list(output.prompt_token_ids) == rendered
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    (bad,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ nothing.at.all }}")
    assert isinstance(bad.error, RequestError)


def test_several_completions(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=16, seed=1, ignore_eos=True)
    first, second = (llm.generate("x", params, use_tqdm=False)[0] for _ in range(2))
    assert [item.index for item in first.outputs] == [0, 1, 2, 3]
    assert [_tokens(first, i) for i in range(4)] == [_tokens(second, i) for i in range(4)]
    assert len({tuple(item.token_ids) for item in first.outputs}) > 1
    greedy = SamplingParams(n=2, temperature=0.0, max_tokens=4)
    (same,) = llm.generate("x", greedy, use_tqdm=False)
    assert _tokens(same, 0) == _tokens(same, 1)


def test_seeded_request_ignores_its_batch(llm: LLM) -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    alone = _tokens(llm.generate("x", seeded, use_tqdm=False)[0])
    mates = [SamplingParams(), SamplingParams(seed=7), GREEDY, SamplingParams(top_p=0.5, top_k=9)]
    for mate in mates:
        for position in (0, 1):
            params = [mate, mate]
            params.insert(position, seeded)
            outputs = llm.generate(["a", "x", "b"] if position else ["x", "a", "b"], params)
            assert _tokens(outputs[position]) == alone
    other = SamplingParams(seed=43, temperature=0.8, max_tokens=16, ignore_eos=True)
    assert _tokens(llm.generate("x", other, use_tqdm=False)[0]) != alone


def test_unseeded_requests_differ_and_runs_repeat(model: str) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for _ in range(2):
        outputs = LLM(model, seed=5).generate(["x", "x"], params, use_tqdm=False)
        runs.append([_tokens(output) for output in outputs])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_stop_token_and_stop_string(llm: LLM) -> None:
    (free,) = llm.generate("abc", GREEDY, use_tqdm=False)
    tokens = _tokens(free)
    stop_token = tokens[5]
    (by_token,) = llm.generate(
        "abc",
        SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_token]
        ),
        use_tqdm=False,
    )
    end = tokens.index(stop_token)
    assert _tokens(by_token) == tokens[: end + 1]
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == (
        "stop",
        stop_token,
    )
    assert by_token.outputs[0].text == llm.get_tokenizer().decode(tokens[:end])
    text = free.outputs[0].text
    readable = next(index for index, char in enumerate(text) if char.isascii() and index > 2)
    stop = text[readable]
    (by_string,) = llm.generate(
        "abc",
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop, "never"]),
        use_tqdm=False,
    )
    assert by_string.outputs[0].text == text[: text.index(stop)]
    assert by_string.outputs[0].stop_reason == stop
    assert by_string.outputs[0].finish_reason == "stop"
    assert llm.engine.stats().blocks.used == 0


def test_end_token_of_the_model(model: str) -> None:
    """The model's own end tokens end a completion unless they are to be ignored."""
    llm = LLM(model)
    (free,) = llm.generate("abc", GREEDY, use_tqdm=False)
    end = _tokens(free)[3]
    object.__setattr__(llm.engine.limits, "eos_token_ids", frozenset({end}))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (stopped,) = llm.generate("abc", params, use_tqdm=False)
    assert _tokens(stopped) == _tokens(free)[: _tokens(free).index(end) + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    (ignored,) = llm.generate("abc", GREEDY, use_tqdm=False)
    assert _tokens(ignored) == _tokens(free)


def test_max_tokens_none_fills_the_model_length(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert len(output.prompt_token_ids) + len(_tokens(output)) == 64
    assert output.outputs[0].finish_reason == "length"


def test_one_bad_prompt_of_several(llm: LLM) -> None:
    """Each is told why, and the others are completed."""
    prompts: list[Any] = ["good", "", "x" * 64, [BOS, 300], [1, -1], [1, 2.5], "also good"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    errors = [str(output.error) if output.error else None for output in outputs]
    assert errors[0] is None
    assert errors[-1] is None
    assert len(_tokens(outputs[0])) == len(_tokens(outputs[-1])) == 12
    expected = [
        "prompt='' is empty: at least 1 token",
        "the prompt has 64 tokens, and max_model_len=64",
        "token id 300; this model's ids are 0 to 299",
        "token id -1; this model's ids are 0 to 299",
        "prompt contains 2.5, which is no token id",
    ]
    for message, part in zip(errors[1:-1], expected, strict=True):
        assert message is not None
        assert part in message
    assert all(not output.outputs and output.finished for output in outputs[1:-1])
    assert llm.engine.stats().blocks.used == 0


def test_prompt_and_max_tokens_beyond_the_model_length(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10)
    (output,) = llm.generate("x" * 60, params, use_tqdm=False)
    assert "60 tokens and max_tokens=10 exceed max_model_len=64" in str(output.error)
    assert "max_tokens may be 4 at most" in str(output.error)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("max_tokens", 0, "max_tokens=0"),
        ("n", 0, "n=0"),
        ("temperature", math.nan, "temperature=nan"),
        ("temperature", -1.0, "temperature=-1.0"),
        ("top_p", 0.0, "top_p=0.0"),
        ("stop", "", "stop"),
        ("stop", ["a", ""], "stop"),
    ],
)
def test_bad_sampling_params(field: str, value: object, part: str) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(RequestError, match=part):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"attention_backend": "nonsense"}, PluginError, "nonsense"),
        ({"scheduler": "nonsense"}, PluginError, "queue"),
        ({"scheduling_policy": "fcfss"}, PluginError, "fcfs"),
        ({"block_manager": "pagde"}, PluginError, "paged"),
        ({"max_model_length": 5}, ConfigError, "max_model_len"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"dtype": "int8"}, ConfigError, "float32"),
        ({"device": "tpu"}, ConfigError, "device='tpu'"),
        ({"max_model_len": 65}, ConfigError, "max_model_len=65 is above the 64 tokens"),
        ({"num_gpu_blocks_override": 3}, CapacityError, "max_model_len=64 does not fit.*48"),
        ({"kv_cache_memory": "100"}, CapacityError, "100 B"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization"),
        ({"scheduler_options": {"x": 1}}, ConfigError, "x"),
    ],
)
def test_bad_options(
    model: str, options: dict[str, Any], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        LLM(model, **options)


def test_unknown_model() -> None:
    with pytest.raises(ModelError, match="no/such-model-anywhere"):
        LLM("no/such-model-anywhere")
    with pytest.raises(ModelError, match=r"missing\.gguf"):
        LLM("missing.gguf")


def test_engine_streams_and_aborts(model: str) -> None:
    engine = LLMEngine.from_options(model=model)
    params = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    engine.add_request("stream", "abc", params)
    engine.add_request("gone", "abcdef", params)
    with pytest.raises(RequestError, match="request_id='gone' is in use"):
        engine.add_request("gone", "x", params)
    pieces: list[str] = []
    tokens: list[int] = []
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "stream":
                pieces.append(output.outputs[0].text)
                tokens.extend(output.outputs[0].token_ids)
        steps += 1
        if steps == 3:
            aborted = engine.abort_request("gone")
            assert aborted is not None
            assert aborted.finished
            assert aborted.outputs[0].finish_reason == "abort"
            assert engine.abort_request("gone") is None
    assert len(tokens) == 20
    whole = LLM.from_engine(engine).generate(
        "abc", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False
    )
    assert "".join(pieces) == whole[0].outputs[0].text
    assert engine.stats().blocks.used == 0
    engine.add_request("gone", "x", params)
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()


def test_a_failing_step_kills_the_engine_clearly(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine.from_options(model=model)
    engine.add_request("a", "abc")

    def broken(*arguments: object) -> list[int]:
        raise ValueError("no current")

    monkeypatch.setattr(engine.model_runner, "execute", broken)
    with pytest.raises(EngineDeadError, match="ValueError: no current"):
        engine.step()
    with pytest.raises(EngineDeadError, match="make a new one"):
        engine.add_request("b", "abc")


def test_mixed_and_empty_input(llm: LLM) -> None:
    """Nothing is dropped, nothing is made up."""
    mixed: list[Any] = ["Hello", 5]
    with pytest.raises(RequestError, match="mixes token ids such as 5"):
        llm.generate(mixed, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="0 sampling_params for 1 prompts"):
        llm.generate("x", [], use_tqdm=False)
    assert llm.chat([], GREEDY, use_tqdm=False) == []
    prompts: list[Any] = ["a", None, "half \ud800", np.array([1, 2]).tolist(), b"bytes"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, False, True, False]
    assert "neither text nor a list of token ids" in str(outputs[1].error)
    assert "position 5" in str(outputs[2].error)


def test_requests_of_somebody_else_are_left_alone(llm: LLM) -> None:
    llm.engine.add_request("theirs", "abc", GREEDY)
    with pytest.raises(RequestError, match="1 live requests of somebody else"):
        llm.generate("x", GREEDY, use_tqdm=False)
    assert llm.engine.unfinished_request_ids() == ["theirs"]
    llm.engine.abort_request("theirs")


class PreemptsAll(SchedulingPolicy):
    """Takes every running request's blocks away, until each has been preempted once."""

    name = "preempts_all"

    def propose(self, view: SchedulerView) -> Proposal:
        return Proposal(preempt=[one.request_id for one in view.running()])


class FailsOnFinish(SchedulingPolicy):
    """Raises whenever a request ends."""

    name = "fails_on_finish"

    def on_finish(self, view: SchedulerView, request_id: str) -> None:
        raise ValueError("no finish")


def _engine_with(model: str, policy: type[SchedulingPolicy], **options: Any) -> LLMEngine:
    class Plugin:
        JACKFIELD_API_VERSION = "1.0"

        @hookimpl
        def jackfield_scheduling_policies(self, register: Any) -> None:
            register(policy.name, policy)

    host = discover()
    host.add(Origin("test"), Plugin())
    flags = {"model": model, "scheduling_policy": policy.name, **options}
    return LLMEngine.from_settings(load_settings(flags, {}), host)


def test_a_policy_that_preempts_everything_changes_no_token(model: str, llm: LLM) -> None:
    engine = _engine_with(model, PreemptsAll, max_num_seqs=2)
    prompts = ["abc", "defgh", "x" * 30]
    expected = [_tokens(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    outputs = LLM.from_engine(engine).generate(prompts, GREEDY, use_tqdm=False)
    assert [_tokens(output) for output in outputs] == expected
    assert engine.stats().scheduler.num_preemptions > 0
    assert engine.stats().blocks.used == 0


def test_a_policy_that_fails_at_an_abort_leaves_nothing_behind(model: str) -> None:
    engine = _engine_with(model, FailsOnFinish)
    engine.add_request("a", "abc", SamplingParams(n=3, max_tokens=9))
    engine.step()
    with pytest.raises(PluginError, match="fails_on_finish"):
        engine.abort_request("a")
    assert not engine.has_unfinished_requests()
    assert engine.stats().blocks.used == 0
    assert engine.step() == []


def test_settings_that_would_be_ignored_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=9 and kv_cache_memory"):
        LLM(model, num_gpu_blocks_override=9, kv_cache_memory="1MiB")
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        LLM(model, skip_tokenizer_init=True, tokenizer=model)
    with pytest.raises(ModelError, match="revision='main' is for Hugging Face ids"):
        LLM(model, revision="main")


def test_poor_settings_are_warned_about(model: str, caplog: pytest.LogCaptureFixture) -> None:
    LLM(model, max_num_batched_tokens=32, max_num_seqs=64, enable_chunked_prefill=False)
    assert "max_num_batched_tokens=32 is below max_num_seqs=64" in caplog.text
    assert "below max_model_len=64" in caplog.text


def test_metrics(llm: LLM) -> None:
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_skip_tokenizer_init(model: str) -> None:
    llm = LLM(model, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=3, detokenize=False)
    (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
    assert len(_tokens(output)) == 3
    (text,) = llm.generate("abc", params, use_tqdm=False)
    assert "no tokenizer" in str(text.error)


def test_dummy_weights(tmp_path: Path) -> None:
    """A configuration without weights: random numbers, the same for the same seed."""
    make_tiny_llama(tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    runs = [
        LLM(str(tmp_path), load_format="dummy", seed=seed).generate("abc", GREEDY, use_tqdm=False)
        for seed in (1, 1, 2)
    ]
    assert _tokens(runs[0][0]) == _tokens(runs[1][0])
    assert _tokens(runs[0][0]) != _tokens(runs[2][0])


def test_limits_and_tokenizer_are_those_of_the_intake(llm: LLM) -> None:
    assert llm.engine.limits is llm.engine._intake.limits
    assert llm.engine.tokenizer is llm.engine._intake.tokenizer
    for name in ("limits", "tokenizer"):
        with pytest.raises(AttributeError):
            setattr(llm.engine, name, None)


def test_a_builder_shows_nothing_that_is_not_there_yet() -> None:
    public = {name for name in vars(EngineBuilder) if not name.startswith("_")}
    assert public == {"build"}
    builder = EngineBuilder(load_settings({"model": "none"}, {}), discover())
    assert all(name.startswith("_") for name in vars(builder))
