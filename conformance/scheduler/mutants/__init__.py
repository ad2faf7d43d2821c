"""Deliberately broken schedulers: the suite has to notice every one of them.

Each is ``PlainScheduler`` with one fault. Faults that users of other engines met and published
name the thread; the rest are slips that the contract makes possible.
"""

from __future__ import annotations

from ...stateful.hunt import Mutant
from . import admission, arrivals, forks, order, planning, policies, preemption
from .registry import MUTANTS as _REGISTERED

#: Every mutant, by topic.
MUTANTS: tuple[Mutant, ...] = _REGISTERED.registered_in(
    arrivals, planning, order, admission, forks, preemption, policies
)

__all__ = ["MUTANTS", "Mutant"]
