"""The tables of the page on what ``jackfield explain`` says, made of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .pages import table

#: For each model, by name: for each attention backend, by name: what ``explain`` says of it.
Answers = Mapping[str, Mapping[str, Mapping[str, Any]]]


def of_explanation(explanation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The attention backends in the JSON of ``jackfield explain``."""
    parts = explanation["parts"]
    return {part["name"]: part for part in parts if part["kind"] == "attention_backend"}


def gpu_table(answers: Answers) -> str:
    """A row for each backend, a column for each model: the verdict, and what decided it."""
    rows = [
        [f"`{name}`", *(_verdict(answers[model][name]) for model in answers)]
        for name in next(iter(answers.values()))
    ]
    return table(["backend", *answers], rows) + "\n"


def cpu_table(answers: Answers) -> str:
    """A row for each backend: the verdict on a CPU and what decided it, the same for all models;
    then a column for each model: what is said of CUDA."""
    first = next(iter(answers.values()))
    rows = []
    for name in first:
        verdicts = {_verdict(backends[name]) for backends in answers.values()}
        assert len(verdicts) == 1, f"{name} depends on the model: {verdicts}"
        elsewhere = (backends[name]["elsewhere"] for backends in answers.values())
        rows.append([f"`{name}`", verdicts.pop(), *map(_elsewhere, elsewhere)])
    head = ["backend", "on the CPU", *(f"on CUDA: {model}" for model in answers)]
    return table(head, rows) + "\n"


def _verdict(part: Mapping[str, Any]) -> str:
    reasons: Sequence[str] = part["reasons"]
    # Where the device is another one, what is missing besides does not matter.
    device = [reason for reason in reasons if reason.startswith("device=")]
    said = [reason.partition("; install it with")[0] for reason in device or reasons]
    return f"{part['verdict']}: {'; '.join(said)}"


def _elsewhere(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "(runs here)"
    if not found["usable"]:
        return f"refused: {'; '.join(found['reasons'])}"
    needed = found["compute_capability"]
    return "usable" if needed is None else f"usable from compute capability {needed}"
