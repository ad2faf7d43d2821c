"""Where the commands write.

Text of users, models and parts appears as it is: nothing in it is highlighted, and a name between
colons stays what it is.
"""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.markup import escape

#: Exit status after Ctrl-C.
INTERRUPTED = 130


def output_console(*, soft_wrap: bool = False) -> Console:
    """For results, on standard output.

    Args:
        soft_wrap: leave it to the terminal to break long lines.
    """
    return Console(soft_wrap=soft_wrap, highlight=False, emoji=False)


def error_console(*, soft_wrap: bool = True) -> Console:
    """For everything else, on standard error; ``soft_wrap`` as in ``output_console``."""
    return Console(stderr=True, soft_wrap=soft_wrap, highlight=False, emoji=False)


def show(what: RenderableType) -> None:
    """Print a result."""
    output_console().print(what)


def say(text: str) -> None:
    """Tell the user something beside the result; the text is no markup."""
    error_console().print(escape(text))
