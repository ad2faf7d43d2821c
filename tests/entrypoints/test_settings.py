"""Settings: one name in all sources, a fixed precedence, and nothing unknown is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.core.config import EngineOptions
from jackfield.core.errors import ConfigError
from jackfield.entrypoints.settings import flag_of, load_settings, variable_of

DEFAULTS = EngineOptions.model_validate({})


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "jackfield.toml"
    path.write_text(text, encoding="utf-8")
    return path


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_model_len": st.integers(1, 10**6),
    "max_num_seqs": st.integers(1, 10**4),
    "gpu_memory_utilization": st.floats(0.01, 1.0),
    "enable_chunked_prefill": st.booleans(),
    "dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16"]),
    "cuda_graph_sizes": st.sets(st.integers(1, 512), min_size=1, max_size=4).map(
        lambda sizes: tuple(sorted(sizes))
    ),
    "attention_backend": st.text("abcdefgh_", min_size=1).filter(lambda text: text != "none"),
    "scheduler_options": st.dictionaries(
        st.text("abc", min_size=1), st.integers() | st.booleans() | st.text("xyz"), max_size=3
    ),
}


def written(value: Any) -> str:
    """As in JSON; a plain text as it is, numbers with commas in between."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def in_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {in_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if not isinstance(value, float) else repr(value)


SOURCES = st.fixed_dictionaries({}, optional=VALUES)


@given(flags=SOURCES, environ=SOURCES, file=SOURCES, as_text=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flag_then_environment_then_file_then_default(
    tmp_path: Path,
    flags: dict[str, Any],
    environ: dict[str, Any],
    file: dict[str, Any],
    as_text: bool,
) -> None:
    path = toml(tmp_path, "\n".join(f"{name} = {in_toml(value)}" for name, value in file.items()))
    told = load_settings(
        {name: written(value) if as_text else value for name, value in flags.items()},
        {variable_of(name): written(value) for name, value in environ.items()},
        path,
    )
    for name in EngineOptions.model_fields:
        if name in flags:
            expected, origin = flags[name], f"flag {flag_of(name)}"
        elif name in environ:
            expected, origin = environ[name], f"environment {variable_of(name)}"
        elif name in file:
            expected, origin = file[name], f"file {path}"
        else:
            expected, origin = getattr(DEFAULTS, name), "default"
        assert getattr(told.options, name) == expected
        assert told.origins[name] == origin


def test_every_setting_has_one_name_everywhere(tmp_path: Path) -> None:
    default = DEFAULTS.model_dump(exclude_none=True)
    file = toml(tmp_path, "\n".join(f"{name} = {in_toml(v)}" for name, v in default.items()))
    from_file = load_settings({}, {}, file)
    assert set(from_file.origins) == set(EngineOptions.model_fields)
    environ = {variable_of(name): written(value) for name, value in default.items()}
    flags = {flag_of(name): written(value) for name, value in default.items()}
    assert load_settings({}, environ).options == DEFAULTS
    assert load_settings(flags, {}).options == from_file.options == DEFAULTS


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "4096", 4096),
        ("max_model_len", "none", None),
        ("block_size", "None", None),
        ("tokenizer", "none", None),
        ("enable_chunked_prefill", "true", True),
        ("enable_chunked_prefill", "0", False),
        ("kv_cache_memory", "4GiB", 4 * 2**30),
        ("kv_cache_memory", "512M", 512 * 10**6),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("scheduling_policy_options", '{"weights": {"a": [1, 2]}}', {"weights": {"a": [1, 2]}}),
    ],
)
def test_text_is_parsed_by_the_type_of_the_setting(name: str, text: str, value: object) -> None:
    told = load_settings({}, {variable_of(name): text})
    assert getattr(told.options, name) == value
    assert load_settings({name: text}, {}).options == told.options


def test_option_tables_are_tables_in_toml_and_are_not_merged(tmp_path: Path) -> None:
    path = toml(tmp_path, "[scheduling_policy_options]\na = 1\nb = {c = [2]}\n")
    assert load_settings({}, {}, path).options.scheduling_policy_options == {
        "a": 1,
        "b": {"c": [2]},
    }
    told = load_settings({"scheduling_policy_options": {"a": 5}}, {}, path)
    assert told.options.scheduling_policy_options == {"a": 5}


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = toml(tmp_path, "seed = 7\n")
    told = load_settings({}, {"JACKFIELD_CONFIG": str(path)})
    assert told.options.seed == 7
    assert told.origins["seed"] == f"file {path}"
    other = tmp_path / "other.toml"
    other.write_text("seed = 8\n")
    assert load_settings({}, {"JACKFIELD_CONFIG": str(path)}, other).options.seed == 8


def test_variables_that_are_no_settings_are_left_alone() -> None:
    environ = {
        "PATH": "/bin",
        "JACKFIELD_CACHE": "/tmp",
        "JACKFIELD_LOGGING_LEVEL": "DEBUG",
        "JACKFIELD_PLUGINS": "",
        "VLLM_MAX_MODEL_LEN": "3",
    }
    assert load_settings({}, environ).options == DEFAULTS


@pytest.mark.parametrize(
    ("flags", "environ", "text", "words"),
    [
        ({"max_modl_len": 1}, {}, "", ["flag '--max-modl-len'", "'--max-model-len'"]),
        ({}, {"JACKFIELD_MAX_MODLE_LEN": "1"}, "", ["JACKFIELD_MAX_MODEL_LEN"]),
        ({}, {"JACKFIELD_max_model_len": "1"}, "", ["JACKFIELD_MAX_MODEL_LEN"]),
        ({}, {"JACKFIELD_PLUGIN": "a"}, "", ["JACKFIELD_PLUGINS"]),
        ({}, {}, "max-model-len = 3", ["'max-model-len'", "'max_model_len'", "jackfield.toml"]),
        ({}, {}, "[engine]\nseed = 1", ["unknown setting 'engine'"]),
        ({}, {}, "seed = = 1", ["is no TOML", "jackfield.toml"]),
        ({"max_model_len": "0"}, {}, "", ["max_model_len='0'", "--max-model-len", "at least 1"]),
        ({}, {"JACKFIELD_DTYPE": "int4"}, "", ["dtype='int4'", "JACKFIELD_DTYPE", "'bfloat16'"]),
        ({}, {}, "max_num_seqs = true", ["max_num_seqs=True", "jackfield.toml", "an integer"]),
        ({}, {}, 'max_num_seqs = "4"', ["max_num_seqs='4'", "an integer"]),
        ({}, {}, "seed = 1.5", ["seed=1.5", "an integer"]),
        ({}, {}, 'scheduler_options = "{}"', ["scheduler_options='{}'", "an object"]),
        ({"max_num_seqs": None}, {}, "", ["max_num_seqs=None", "an integer"]),
        ({"max_num_seqs": "none"}, {}, "", ["max_num_seqs='none'", "an integer"]),
        ({"max_model_len": ""}, {}, "", ["max_model_len=''", "an integer"]),
        ({"kv_cache_memory": "4 parsecs"}, {}, "", ["'4 parsecs' is not a size"]),
        ({"kv_cache_memory": "0"}, {}, "", ["kv_cache_memory='0'", "above 0"]),
        ({"gpu_memory_utilization": "nan"}, {}, "", ["gpu_memory_utilization='nan'", "at most 1"]),
        ({"gpu_memory_utilization": 1.5}, {}, "", ["gpu_memory_utilization=1.5", "at most 1"]),
        ({"scheduler_options": "{a: 1}"}, {}, "", ["JSON object"]),
        ({"scheduler_options": "[1]"}, {}, "", ["an object"]),
        ({"scheduler_options": '{"a": 1, "a": 2}'}, {}, "", ["given twice"]),
    ],
)
def test_what_is_wrong_is_one_sentence_with_what_is_allowed(
    tmp_path: Path, flags: dict[str, Any], environ: dict[str, str], text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, environ, toml(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    for word in words:
        assert word in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_settings({}, {}, tmp_path / "missing.toml")


def test_arguments_of_a_python_call_are_called_so() -> None:
    told = load_settings({"seed": 3}, {}, keyword_arguments=True)
    assert told.origins["seed"] == "argument seed"
    with pytest.raises(ConfigError, match="unknown argument 'max_modl_len'; did you mean 'max_mod"):
        load_settings({"max_modl_len": 3}, {}, keyword_arguments=True)


@given(st.text(max_size=12))
@settings(deadline=None)
def test_any_text_is_parsed_or_refused_by_name(text: str) -> None:
    for name in ("max_model_len", "kv_cache_memory", "enable_chunked_prefill", "scheduler_options"):
        try:
            told = load_settings({name: text}, {})
        except ConfigError as error:
            message = str(error)
        else:
            EngineOptions.model_validate(told.options.model_dump())
            continue
        assert message.startswith(f"{name}=")


@pytest.mark.parametrize("text", ["0,2", "", "1;2", "-1", "1.5", "[]"])
def test_sizes_of_graphs_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="cuda_graph_sizes="):
        load_settings({"cuda_graph_sizes": text}, {})


def test_sizes_of_graphs_are_sorted() -> None:
    options = load_settings({"cuda_graph_sizes": "8, 1,8"}, {}).options
    assert options.cuda_graph_sizes == (1, 8)
