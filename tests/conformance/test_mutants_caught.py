"""The suite notices every deliberately broken backend, and passes the one they are made of."""

from __future__ import annotations

from pathlib import Path

from jackfield.conformance.attention.contract import AttentionContract
from jackfield.conformance.attention.hunt import Kill, hints_of, hunt, to_markdown
from jackfield.conformance.attention.mutants import MUTANTS
from jackfield.conformance.attention.plain_backend import PlainBackend

TABLE = Path(__file__).parents[2] / "docs" / "conformance" / "mutants.md"


def test_every_mutant_is_caught() -> None:
    hints = hints_of(TABLE.read_text(encoding="utf-8"))
    assert hints.keys() == {mutant.name for mutant in MUTANTS}
    kills = hunt(jobs=2, hints=hints)
    assert [kill.mutant for kill in kills] == [mutant.name for mutant in MUTANTS]
    assert [kill.mutant for kill in kills if not kill.killed] == []


def test_a_survivor_is_told() -> None:
    table = to_markdown([Kill(MUTANTS[0].name, (), 7, 1.0, "")], "a command")
    assert "0 of 1 deliberately broken backends are caught. Written by `a command`" in table
    assert f"| `{MUTANTS[0].name}` | {MUTANTS[0].fault} |" in table
    assert table.endswith("| **nothing** | 7 |\n")


class TestPlainBackend(AttentionContract):
    backend = PlainBackend
