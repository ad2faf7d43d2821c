"""Deliberately broken block managers: the suite has to notice every one of them.

Each is ``PlainBlockManager`` with one fault. Faults that users of other engines met and published
name the thread; the rest are slips that the contract makes possible.
"""

from __future__ import annotations

from ...stateful.hunt import Mutant
from . import admission, growth, pools, prefixes, questions
from .registry import MUTANTS as _REGISTERED

#: Every mutant, by topic.
MUTANTS: tuple[Mutant, ...] = _REGISTERED.registered_in(
    admission, growth, pools, prefixes, questions
)

__all__ = ["MUTANTS", "Mutant"]
