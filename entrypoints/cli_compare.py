"""The commands of ``jackfield conformance`` that look at several backends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import bad_input


def add_comparisons(conformance: typer.Typer) -> None:
    """Register the commands."""
    conformance.command("pairwise")(conformance_pairwise)
    conformance.command("matrix")(conformance_matrix)


def conformance_pairwise(
    backend: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="Registered name, or package.module:ClassName; two or more."
        ),
    ],
    batches: Annotated[int, typer.Option(min=1, help="How many are compared.")] = 500,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=VALUE,VALUE",
            help="Only these values of an axis, such as head_size=64,128 or alibi=on; may be "
            "repeated.",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="Size of the batches: tiny, small or large.")
    ] = "small",
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 0,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes that share the batches; they stay the same.")
    ] = 1,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the report as JSON.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the report as Markdown.")
    ] = None,
) -> None:
    """Compare attention backends with each other, on the same batches.

    Batches are those that all of them take; each result is compared with float64 as well. Status 0:
    all are within the error bounds; 1: not; 2: bad input.
    """
    with bad_input():
        from .cli_conformance_compare import PairwiseRun, run_pairwise

        asked = PairwiseRun(
            backends=tuple(backend),
            device=device,
            batches=batches,
            seed=seed,
            scale=scale,
            dtypes=tuple(dtype or ()),
            only=tuple(only or ()),
            jobs=jobs,
            report=report,
            markdown=markdown,
        )
        raise typer.Exit(run_pairwise(asked))


def conformance_matrix(
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT.json", help="Written by `conformance attention`."),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Write the table as Markdown; between the markers of a matrix if the file has "
            "them.",
        ),
    ] = None,
) -> None:
    """Show side by side what backends may claim, from their reports.

    Status 0: all reports passed; 1: one did not; 2: bad input.
    """
    with bad_input():
        from .cli_conformance_compare import run_matrix

        raise typer.Exit(run_matrix(reports, markdown))
