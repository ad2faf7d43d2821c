"""Deliberately broken attention backends: the conformance suite has to notice every one of them.

Each is ``PlainBackend`` with one fault. Faults that users of other libraries met and published name
the thread; the rest are slips that the contract makes possible.
"""

from __future__ import annotations

from . import (
    addressing,
    alibi,
    causality,
    declarations,
    eight_bits,
    lengths,
    plans,
    precision,
    rows,
    scores,
    sinks,
    softmax,
    splitting,
    windows,
    writing,
)
from .registry import Mutant, registered_in

_TOPICS = (
    windows,
    causality,
    lengths,
    addressing,
    scores,
    alibi,
    softmax,
    sinks,
    precision,
    splitting,
    rows,
    writing,
    eight_bits,
    plans,
    declarations,
)

#: Every mutant, by topic.
MUTANTS: tuple[Mutant, ...] = tuple(one for topic in _TOPICS for one in registered_in(topic))

__all__ = ["MUTANTS", "Mutant"]
