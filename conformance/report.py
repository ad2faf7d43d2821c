"""Reports as JSON files: what is committed, published and compared.

The file holds the fields of ``Report`` in their order, the number of the format, and the verdict.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..core.errors import ConfigError
from ..plugins.validation import did_you_mean
from .results import PropertyResult, Report

#: Rises when a file can no longer be read by what read it before.
FORMAT = 1
#: Digits of errors and times: more would differ from run to run.
_DIGITS = 4
#: Fields of the file that are no fields of ``Report``.
_FORMAT, _OK = "format", "ok"

_ADAPTER = TypeAdapter(Report)


def to_json(report: Report) -> str:
    """The report as JSON, indented, with a newline at the end; the same report, the same text."""
    content = {_FORMAT: FORMAT, _OK: report.ok, **plain(report)}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """The report of a file's text.

    Raises:
        ConfigError: the text is no JSON or no conformance report, its format is another one, a
            field is missing, unknown or wrong, or its verdict contradicts its results.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"no conformance report: it is no JSON: {error}") from None
    if not isinstance(content, dict) or _FORMAT not in content:
        raise ConfigError(
            "no conformance report: it is no JSON object with the field 'format', such as "
            "`jackfield conformance attention --report FILE` writes"
        )
    if content[_FORMAT] != FORMAT:
        raise ConfigError(
            f"a conformance report of format {content[_FORMAT]!r}; this Jackfield reads format "
            f"{FORMAT}: make the report anew, or read it with the Jackfield that wrote it"
        )
    _check_fields("the report", content, (_FORMAT, _OK, *_names(Report)))
    rows = content["results"]
    if not isinstance(rows, list) or not rows:
        raise ConfigError("a damaged conformance report: results is no list of at least one law")
    for index, row in enumerate(rows):
        _check_fields(f"results[{index}]", row, _names(PropertyResult))
    fields = {name: content[name] for name in _names(Report)}
    try:
        report = _ADAPTER.validate_python(fields)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"]))
        raise ConfigError(
            f"a damaged conformance report: {where} is {detail['input']!r}: {detail['msg']}"
        ) from None
    if content[_OK] is not report.ok:
        raise ConfigError(
            f"a damaged conformance report: it says ok={json.dumps(content[_OK])}, its results "
            f"say {json.dumps(report.ok)}"
        )
    return report


def read_report(path: Path) -> Report:
    """The report of a file.

    Raises:
        ConfigError: it cannot be read, or as ``from_json``; the file is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the report {str(path)!r} cannot be read: {error}") from error
    try:
        return from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r} is {error}") from None


def plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as what JSON has; numbers rounded to four digits.

    JSON has no infinity and no NaN: they become the texts ``inf`` and ``nan``.
    """
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        text = f"{value:.{_DIGITS}g}"
        return text if text.lstrip("-") in ("inf", "nan") else float(text)
    return value


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _check_fields(where: str, found: object, known: Iterable[str]) -> None:
    names = tuple(known)
    if not isinstance(found, Mapping):
        raise ConfigError(f"a damaged conformance report: {where} is no JSON object")
    missing = [name for name in names if name not in found]
    if missing:
        raise ConfigError(
            f"a damaged conformance report: {where} has no {', '.join(map(repr, missing))}"
        )
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ConfigError(
            f"a damaged conformance report: {where} has an unknown field {unknown[0]!r}"
            f"{did_you_mean(str(unknown[0]), names)}"
        )
