"""What a mutant is, and the list that the decorator ``mutant`` fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from ..plain_backend import PlainBackend


@dataclass(frozen=True)
class Mutant:
    """A backend that is wrong in one way.

    Attributes:
        name: unique, and the ``name`` of the backend too.
        fault: one sentence that says what is broken.
        published: where users of other libraries met such a fault: ``project#number`` of a thread,
            or the release whose notes name it.
        backend: the broken backend.
    """

    name: str
    fault: str
    published: tuple[str, ...]
    backend: type[PlainBackend]


_registered: list[Mutant] = []


def mutant(
    name: str, fault: str, published: tuple[str, ...] = ()
) -> Callable[[type[PlainBackend]], type[PlainBackend]]:
    """Register the decorated backend as a mutant; the arguments are the fields of ``Mutant``."""

    def register(backend: type[PlainBackend]) -> type[PlainBackend]:
        backend.name = name
        _registered.append(Mutant(name, fault, published, backend))
        return backend

    return register


def registered_in(module: ModuleType) -> list[Mutant]:
    """The mutants that a module defines, in its order."""
    return [one for one in _registered if one.backend.__module__ == module.__name__]
