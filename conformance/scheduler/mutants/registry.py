"""The list that the decorator ``mutant`` fills."""

from __future__ import annotations

from ...stateful.hunt import Mutants

MUTANTS = Mutants()
mutant = MUTANTS.mutant
