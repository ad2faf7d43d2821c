"""What a law of a stateful part is: a docstring for authors, and what breaking it looks like."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import ClassVar


class StatefulLaw:
    """One thing that every part of a kind owes, whatever is called in whatever order.

    The docstring of a subclass is its text for authors; the first paragraph is its title. A law is
    checked by a machine, after every call that it says something about.

    Class attributes:
        name: how reports and ``--law`` call it.
        power: the optional power without which it is not owed; "" if everybody owes it.
    """

    name: ClassVar[str]
    power: ClassVar[str] = ""

    @classmethod
    def title(cls) -> str:
        """The first paragraph of the docstring, in one line."""
        return " ".join(cls.paragraphs()[0].split())

    @classmethod
    def paragraphs(cls) -> list[str]:
        """The docstring, paragraph by paragraph."""
        return inspect.cleandoc(cls.__doc__ or cls.name).split("\n\n")


class LawBroken(Exception):  # noqa: N818 - it is the part's error, not ours
    """A part does not keep a law.

    Attributes:
        law: which one.
        message: what was seen, and what should have been.
        proof: lines of Python that fail after the story's calls; they may use the story's names.
    """

    def __init__(self, law: type[StatefulLaw], message: str, proof: Iterable[str] = ()) -> None:
        super().__init__(f"{law.name}: {message}")
        self.law = law
        self.message = message
        self.proof = tuple(proof)
