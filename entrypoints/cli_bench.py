"""``jackfield bench``: times attention backends, shows and draws earlier results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import bad_input

bench = typer.Typer(
    name="bench",
    help="Time parts side by side, each checked before it is timed.",
    no_args_is_help=True,
)

Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the results: FILE.png, .svg, .pdf. Needs matplotlib."),
]


@bench.command("attention")
def bench_attention(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Registered name, or package.module:ClassName; a JSON object with options may "
            "follow. May be repeated. Default: all that run here.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of a case, or part of one, such as decode or 28/4/128. May be repeated. "
            "Default: all that suit the device.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of query and output. Default: bfloat16; float32 on a CPU.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="Of the cache. Default: that of the query.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a block. Default: what each backend prefers."),
    ] = None,
    milliseconds: Annotated[
        float, typer.Option(min=1, help="Time for each measurement, roughly.")
    ] = 60.0,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="CUDA: leave the L2 cache as the call before left it, instead of emptying it.",
        ),
    ] = False,
    direct: Annotated[
        bool,
        typer.Option("--direct", help="Also time the libraries' own calls, without their backend."),
    ] = False,
    no_ceilings: Annotated[
        bool,
        typer.Option("--no-ceilings", help="Do not measure what the device does at most."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Time attention backends side by side, each checked before it is timed.

    A result that float64 contradicts is reported as wrong, and not timed. Status 0: all are right;
    1: one is wrong or failed, or cannot serve any case although it was named; 2: bad input.
    """
    with bad_input():
        from .bench.command import AttentionBench, run_attention_bench

        asked = AttentionBench(
            backends=tuple(backend or ()),
            cases=tuple(case or ()),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            block_size=block_size,
            milliseconds=milliseconds,
            warm=warm,
            direct=direct,
            ceilings=not no_ceilings,
            json=json_file,
            plot=plot,
        )
        raise typer.Exit(run_attention_bench(asked))


@bench.command("show")
def bench_show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.json", help="What `bench attention --json` wrote.")
    ],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table in Markdown instead.")
    ] = False,
    plot: Plot = None,
) -> None:
    """Show the results of an earlier run again, or draw them."""
    with bad_input():
        from .bench.command import show_results

        raise typer.Exit(show_results(file, markdown, plot))
