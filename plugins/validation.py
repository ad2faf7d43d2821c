"""Says in one sentence what is wrong with a value and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "null": "none",
    "array": "a list",
    "object": "an object",
}
#: How JSON schema and how pydantic's errors call a bound, and the words for it.
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_ERROR_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class FieldHelp:
    """One field of a typed model, for help, errors and reports.

    Attributes:
        name: of the field.
        allowed: its values, in words.
        default: as text; None if the field must be given.
        description: what it is for.
    """

    name: str
    allowed: str
    default: str | None
    description: str

    def __str__(self) -> str:
        default = "required" if self.default is None else f"default {self.default}"
        return f"{self.name} ({self.allowed}; {default})"


def fields_of(model: type[BaseModel]) -> tuple[FieldHelp, ...]:
    """The fields of a typed model, in its order."""
    schema = _schema(model)
    properties, definitions = schema.get("properties", {}), schema.get("$defs", {})
    result = []
    for name, info in model.model_fields.items():
        default = None if info.is_required() else repr(info.get_default(call_default_factory=True))
        allowed = in_words(properties.get(name, {}), definitions)
        result.append(FieldHelp(name, allowed, default, info.description or ""))
    return tuple(result)


def allowed_values(model: type[BaseModel], name: str) -> str:
    """The values of one field, in words."""
    schema = _schema(model)
    return in_words(schema.get("properties", {}).get(name, {}), schema.get("$defs", {}))


def in_words(
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any] | None = None,
    within: frozenset[str] = frozenset(),
) -> str:
    """A JSON schema in words: ``an integer that is at least 1, or none``.

    Args:
        schema: of a value.
        definitions: the schemas of models that it refers to, by name; an object of such a model is
            put in words by its fields.
        within: the models whose fields are being put in words; one that holds itself is "an
            object" there.
    """
    known = definitions or {}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within:
            return _TYPES["object"]
        schema, within = known.get(name, {}), within | {name}
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    if "anyOf" in schema:
        return ", or ".join(in_words(choice, known, within) for choice in schema["anyOf"])
    if "properties" in schema:
        return _object_in_words(schema, known, within)
    kind = _TYPES.get(schema.get("type", ""), "a value of its type")
    bounds = [f"{words} {_number(schema[key])}" for key, words in _BOUNDS.items() if key in schema]
    return f"{kind} that is {' and '.join(bounds)}" if bounds else kind


def _object_in_words(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], within: frozenset[str]
) -> str:
    """An object by its fields, those that must be given marked so."""
    required = schema.get("required", ())
    fields = []
    for name, field in schema["properties"].items():
        must = ", required" if name in required else ""
        fields.append(f"{name} ({in_words(field, definitions, within)}{must})")
    return f"an object with {', '.join(fields)}"


def _number(value: Any) -> str:
    """A bound as people write it: ``1`` for ``1.0``."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else str(value)


def problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence for each thing that pydantic found wrong with an instance of ``model``."""
    return [_problem(detail, model) for detail in error.errors(include_url=False)]


def expected(detail: Mapping[str, Any], model: type[BaseModel], name: str) -> str:
    """What the field ``name`` must be, given one of the details of a ``ValidationError``."""
    context = detail.get("ctx", {})
    if detail["type"] == "value_error":
        return str(context["error"])
    allowed = allowed_values(model, name)
    bounds = [
        f"{words} {_number(context[key])}" for key, words in _ERROR_BOUNDS.items() if key in context
    ]
    unsaid = "".join(f", {bound}" for bound in bounds if bound not in allowed)
    return f"it must be {allowed}{unsaid}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x' or 'y'?`` with the closest known names, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _problem(detail: Any, model: type[BaseModel]) -> str:
    location = ".".join(str(part) for part in detail["loc"])
    message = f"{detail['msg'][:1].lower()}{detail['msg'][1:]}"
    if len(detail["loc"]) > 1:
        return f"field {location!r} is {detail['input']!r}: {message}"
    if detail["type"] == "extra_forbidden":
        fields = "; ".join(map(str, fields_of(model))) or "none"
        return (
            f"field {location!r} is unknown (fields: {fields})"
            f"{did_you_mean(location, model.model_fields)}"
        )
    if detail["type"] == "missing":
        return f"field {location!r} must be given: {allowed_values(model, location)}"
    if location not in model.model_fields:
        return str(detail["ctx"]["error"]) if detail["type"] == "value_error" else message
    return f"field {location!r} is {detail['input']!r}, {expected(detail, model, location)}"


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    try:
        schema = model.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return {}
    if "$ref" not in schema:
        return schema
    # A model that holds itself is one of its own definitions.
    definitions = schema["$defs"]
    return {**definitions[schema["$ref"].rpartition("/")[2]], "$defs": definitions}
