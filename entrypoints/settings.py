"""Settings from the command line, the environment and a TOML file, in this order of precedence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..core.config import EngineOptions
from ..core.errors import ConfigError
from ..plugins.validation import did_you_mean, expected, problems

PREFIX = "JACKFIELD_"
CONFIG_VARIABLE = "JACKFIELD_CONFIG"

#: Variables with the prefix that are no engine settings, with what they are for.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "path of the TOML file",
    "JACKFIELD_PLUGINS": "names of the plugins to load",
    "JACKFIELD_CACHE": "folder for downloaded files",
    "JACKFIELD_LOGGING_LEVEL": "level of the logger",
}


#: What is said of text that should be an option table.
NO_OBJECT = 'it must be a JSON object such as {"field": 1}'


@dataclass(frozen=True)
class Settings:
    """All settings of an engine, and where each one comes from.

    Attributes:
        options: the values.
        origins: for every setting: ``flag --max-model-len``, ``environment
            JACKFIELD_MAX_MODEL_LEN``, ``file PATH``, or ``default``.
    """

    options: EngineOptions
    origins: dict[str, str]


@dataclass(frozen=True)
class _Given:
    """A value that somebody wrote down; ``text`` is whether it is text to be parsed."""

    value: object
    origin: str
    text: bool


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    toml_path: Path | None = None,
    *,
    keyword_arguments: bool = False,
) -> Settings:
    """Put the settings together: flag, else environment, else TOML file, else default.

    The first of these that names a setting decides it whole: option tables are not merged. Text
    from flags and environment is parsed by the setting's type: JSON for option tables, and ``none``
    for no value where a setting may have none. Values in the TOML file have their own types.

    Args:
        flags: only what was given, by setting (``max_model_len`` or ``--max-model-len``).
        environ: the environment; ``JACKFIELD_CONFIG`` is the TOML file if no path is given.
        toml_path: a TOML file with settings as top-level keys and option tables as tables.
        keyword_arguments: whether ``flags`` are arguments of a Python call, for the messages.

    Raises:
        ConfigError: a name is unknown, in any of the sources (the closest ones are suggested), a
            value is wrong (it is told what is allowed), or the file cannot be read.
    """
    path = toml_path
    if path is None and CONFIG_VARIABLE in environ:
        path = Path(environ[CONFIG_VARIABLE])
    given = dict(_from_toml(path)) if path is not None else {}
    given |= dict(_from_environ(environ))
    given |= dict(_from_flags(flags, keyword_arguments))
    values = {name: _parse(name, item) for name, item in given.items()}
    try:
        options = EngineOptions.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(problems(error, EngineOptions))) from None
    origins = {
        name: given[name].origin if name in given else "default"
        for name in EngineOptions.model_fields
    }
    return Settings(options, origins)


def variable_of(setting: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + setting.upper()


def flag_of(setting: str) -> str:
    """The command-line flag of a setting."""
    return "--" + setting.replace("_", "-")


def _from_flags(
    flags: Mapping[str, object], keyword_arguments: bool
) -> Iterator[tuple[str, _Given]]:
    for written, value in flags.items():
        name = written.removeprefix("--").replace("-", "_")
        if name not in EngineOptions.model_fields:
            if keyword_arguments:
                known, shown, what = list(EngineOptions.model_fields), written, "argument"
            else:
                known = [flag_of(setting) for setting in EngineOptions.model_fields]
                shown, what = flag_of(name), "flag"
            raise ConfigError(f"unknown {what} {shown!r}{did_you_mean(shown, known)}")
        origin = f"argument {name}" if keyword_arguments else f"flag {flag_of(name)}"
        yield name, _Given(value, origin, isinstance(value, str))


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    settings = {variable_of(name): name for name in EngineOptions.model_fields}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in settings:
            hint = did_you_mean(variable.upper(), [*settings, *OTHER_VARIABLES])
            raise ConfigError(f"unknown environment variable {variable!r}{hint}")
        yield settings[variable], _Given(environ[variable], f"environment {variable}", True)


def _from_toml(path: Path) -> Iterator[tuple[str, _Given]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {str(path)!r} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings file {str(path)!r} is no TOML: {error}") from error
    for name, value in table.items():
        if name not in EngineOptions.model_fields:
            hint = did_you_mean(name.replace("-", "_"), EngineOptions.model_fields)
            raise ConfigError(f"unknown setting {name!r} in the file {str(path)!r}{hint}")
        yield name, _Given(value, f"file {path}", False)


def _parse(name: str, given: _Given) -> object:
    annotation, optional, table = _type_of(name)
    value = given.value
    if given.text and isinstance(value, str):
        if optional and value.strip().lower() in ("none", "null"):
            return None
        if table:
            value = parse_json(value, f"{name}={value!r} (from {given.origin})")
    adapter: TypeAdapter[object] = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(value, strict=not given.text)
    except ValidationError as error:
        what = expected(error.errors(include_url=False)[0], EngineOptions, name)
        raise ConfigError(f"{name}={value!r} (from {given.origin}) is wrong: {what}") from None


def parse_json(text: str, what: str) -> object:
    """The value of an option table that was given as text.

    Args:
        text: JSON.
        what: the setting with the text and where it comes from, for the message.

    Raises:
        ConfigError: it is no JSON, or an object names a field twice.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise ConfigError(f"{what} is wrong: {NO_OBJECT} ({error})") from None
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field is given twice")
    return result


def _type_of(name: str) -> tuple[Any, bool, bool]:
    """A setting's type with its bounds, whether it may be None, and whether it is a table."""
    info = EngineOptions.model_fields[name]
    optional = NoneType in get_args(info.annotation)
    table = get_origin(info.annotation) is dict
    if not info.metadata:
        return info.annotation, optional, table
    return Annotated[(info.annotation, *info.metadata)], optional, table
