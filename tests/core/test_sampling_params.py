"""Sampling settings: defaults, normal forms, and one clear sentence for each refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jackfield.core.errors import RequestError
from jackfield.core.sampling_params import RequestOutputKind, SamplingParams


def test_defaults_are_plain_sampling() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p) == (1, 1.0, -1, 1.0)
    assert (params.min_p, params.seed, params.stop, params.max_tokens) == (0.0, None, (), 16)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.greedy


@pytest.mark.parametrize(
    ("stop", "expected"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), ((), ()), ([], ())]
)
def test_stop_is_a_tuple(stop: str | list[str], expected: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == expected


def test_none_is_no_stop() -> None:
    nothing: Any = None
    params = SamplingParams(stop=nothing, stop_token_ids=nothing)
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_later_changes_of_a_list_do_not_matter() -> None:
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(3)
    assert params.stop_token_ids == (1, 2)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-10, 9e-6])
def test_low_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy


def test_top_k_of_one_is_greedy() -> None:
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams(top_k=0).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_values_on_the_border_are_accepted() -> None:
    SamplingParams(n=1, top_k=-1, max_tokens=1, seed=-(2**63), top_p=1, min_p=0)
    SamplingParams(seed=2**64 - 1, top_p=1e-9, min_p=1, max_tokens=None, temperature=3.4e38)


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=np.uint64(7),  # type: ignore[arg-type]
    )
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 7)
    assert type(params.top_k) is type(params.seed) is int


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": True}, "n=True must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be an integer"),
        ({"top_k": -2}, f"top_k=-2 must be at least -1 and at most {2**63 - 1}"),
        ({"top_k": 2**63}, f"top_k={2**63} must be at least -1 and at most {2**63 - 1}"),
        ({"top_k": None}, "top_k=None must be an integer"),
        ({"seed": "x"}, "seed='x' must be an integer"),
        ({"seed": 2**64}, f"seed={2**64} must be at least {-(2**63)} and at most {2**64 - 1}"),
        ({"temperature": -0.1}, "temperature=-0.1 must be at least 0 and at most 3.4e+38"),
        ({"temperature": math.nan}, "temperature=nan must be at least 0 and at most 3.4e+38"),
        ({"temperature": math.inf}, "temperature=inf must be at least 0 and at most 3.4e+38"),
        ({"temperature": "1"}, "temperature='1' must be a number"),
        ({"top_p": 0}, "top_p=0 must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p=nan must be above 0 and at most 1"),
        ({"min_p": -0.01}, "min_p=-0.01 must be at least 0 and at most 1"),
        ({"min_p": 2}, "min_p=2 must be at least 0 and at most 1"),
        ({"stop": ""}, "stop contains '': a stop string needs at least 1 character"),
        ({"stop": ["a", ""]}, "stop contains '': a stop string needs at least 1 character"),
        ({"stop": ["a", 5]}, "stop contains 5, which is not a string"),
        ({"stop": b"ab"}, "stop=b'ab' must be a list; leave it out for none"),
        (
            {"stop": "a", "detokenize": False},
            "stop=['a'] needs text: set detokenize=True or use stop_token_ids",
        ),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids: token id=-1 must be at least 0"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: token id='a' must be an integer"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list; leave it out for none"),
        ({"stop_token_ids": 7}, "stop_token_ids=7 must be a list; leave it out for none"),
        ({"ignore_eos": "no"}, "ignore_eos='no' must be True or False"),
        ({"detokenize": 0}, "detokenize=0 must be True or False"),
        (
            {"output_kind": "delta"},
            "output_kind='delta' must be one of RequestOutputKind.CUMULATIVE, "
            "RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused_with_name_value_and_limit(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="min_tokens"):
        SamplingParams(min_tokens=5)  # type: ignore[call-arg]
