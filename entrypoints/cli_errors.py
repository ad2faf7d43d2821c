"""How the commands tell errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.markup import escape

from ..core.errors import JackfieldError
from .console import error_console


@contextmanager
def bad_input() -> Iterator[None]:
    """Our errors are status 2 where 1 says what was found."""
    try:
        yield
    except JackfieldError as error:
        tell(error)
        raise typer.Exit(2) from error


def tell(error: JackfieldError) -> None:
    """One line on standard error."""
    error_console().print(f"[bold red]error:[/] {escape(str(error))}")
