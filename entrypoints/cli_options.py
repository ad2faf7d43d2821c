"""Command-line flags made from the settings: every field of ``EngineOptions`` is one flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ..core.config import Bytes, EngineOptions, Sizes

CONFIG_FLAG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            envvar="JACKFIELD_CONFIG",
            help="TOML file with settings; flags and JACKFIELD_* variables come before it.",
            show_envvar=False,
        ),
    ],
)


def engine_flags(exclude: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """One keyword-only parameter for each setting; None means that the flag was not given."""
    return [_flag(name) for name in EngineOptions.model_fields if name not in exclude]


def with_engine_flags(
    exclude: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes ``flags``: it gets ``--config`` and a flag for each setting.

    The command receives the given ones as ``flags`` (a mapping) and the file as ``config``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name not in ("flags", "config")
        ]
        added = [CONFIG_FLAG, *engine_flags(exclude)]
        names = {parameter.name for parameter in added} - {"config"}

        def run(**values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            command(flags=given(flags), **values)

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
        return run

    return decorate


def _flag(name: str) -> inspect.Parameter:
    field = EngineOptions.model_fields[name]
    kind, metavar = _flag_type(field.annotation)
    default = field.get_default(call_default_factory=True)
    default_text = "" if default is None or default == {} else f" [default: {default}]"
    option = typer.Option(
        help=f"{field.description}{default_text}",
        show_default=False,
        metavar=metavar,
        rich_help_panel="Engine",
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _flag_type(annotation: Any) -> tuple[Any, str | None]:
    """The type that the command line parses, and what ``--help`` calls it."""
    if get_origin(annotation) is Literal:
        return str | None, "|".join(get_args(annotation))
    arguments = [item for item in get_args(annotation) if item is not NoneType]
    for kind, metavar in ((Bytes, "BYTES"), (Sizes, "N,N,...")):
        if kind in (annotation, *arguments):
            return str | None, metavar
    if get_origin(annotation) is dict:
        return str | None, "JSON"
    kind = arguments[0] if arguments else annotation
    if kind is bool:
        return bool | None, None
    if kind in (int, float):
        return kind | None, "INTEGER" if kind is int else "NUMBER"
    return str | None, "TEXT"


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in values.items() if value is not None}
