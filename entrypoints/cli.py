"""The command ``jackfield``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import JackfieldError
from ..core.sampling_params import SamplingParams
from .cli_bench import bench
from .cli_compare import add_comparisons
from .cli_conformance_stateful import add_stateful_suites
from .cli_errors import bad_input, tell
from .cli_options import given, with_engine_flags
from .logging import configure_logging

app = typer.Typer(
    name="jackfield",
    help="An LLM inference engine made of plugins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

conformance = typer.Typer(
    name="conformance",
    help="Prove that a part keeps its contract: laws tried on many random cases.",
    no_args_is_help=True,
)
app.add_typer(conformance)
app.add_typer(bench)

SAMPLING = "Sampling"
NumCompletions = Annotated[
    int | None, typer.Option("--n", help="Completions per prompt.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 takes the likeliest token each time. Default: 0; in chat 0.7.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample from the k likeliest tokens; -1: all.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens of this joint probability. Default: 1; in chat 0.9.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this share of the likeliest one's probability.",
        rich_help_panel=SAMPLING,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens to generate. Default: 128; in chat up to the model length.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=SAMPLING),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id", help="Stop at this token; may be repeated.", rich_help_panel=SAMPLING
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Go on after the model's end tokens.", rich_help_panel=SAMPLING
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
@with_engine_flags()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="Texts to complete, side by side.")
    ],
    *,
    flags: dict[str, Any],
    config: Path | None = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each prompt.")
    ] = False,
    n: NumCompletions = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    stop_token_ids: StopTokenIds = None,
    ignore_eos: IgnoreEos = False,
) -> None:
    """Complete prompts, all of them side by side."""
    from .cli_generate import run_generate

    params = SamplingParams(
        **{
            "temperature": 0.0,
            "max_tokens": 128,
            **given(
                {
                    "n": n,
                    "temperature": temperature,
                    "top_k": top_k,
                    "top_p": top_p,
                    "min_p": min_p,
                    "max_tokens": max_tokens,
                    "stop": stop,
                    "stop_token_ids": stop_token_ids,
                }
            ),
            "ignore_eos": ignore_eos,
        }
    )
    raise typer.Exit(run_generate(flags, config, prompts, params, chat, json_lines))


@app.command()
@with_engine_flags()
def chat(
    *,
    flags: dict[str, Any],
    config: Path | None = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Talk with the model; the answer appears as it is generated."""
    from .cli_chat import run_chat

    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    raise typer.Exit(run_chat(flags, config, system, given({**params, "max_tokens": max_tokens})))


@app.command()
@with_engine_flags()
def demo(*, flags: dict[str, Any], config: Path | None = None) -> None:
    """Answer six prompts at once with a small real model, and say how fast."""
    from .cli_generate import run_demo

    raise typer.Exit(run_demo(flags, config))


@app.command()
def plugins(json_output: Json = False) -> None:
    """List the installed plugins, what each provides, and what is wrong with any."""
    from .cli_explain import run_plugins

    raise typer.Exit(run_plugins(json_output))


@app.command()
@with_engine_flags(exclude=("model",))
def explain(
    model: Annotated[str, typer.Argument(help="As for --model.")],
    *,
    flags: dict[str, Any],
    config: Path | None = None,
    json_output: Json = False,
) -> None:
    """Say which parts would serve a model, which would not, and why; loads no weights."""
    from .cli_explain import run_explain

    raise typer.Exit(run_explain({**flags, "model": model}, config, json_output))


@conformance.command("attention")
def conformance_attention(
    backend: Annotated[
        str, typer.Option(help="Registered name, or package.module:ClassName.", metavar="NAME")
    ],
    backend_options: Annotated[
        str | None, typer.Option(help="The backend's options.", metavar="JSON")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    profile: Annotated[str, typer.Option(help="Size of the run: quick, full or soak.")] = "quick",
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
    law: Annotated[
        list[str] | None,
        typer.Option(help="Only this law (see `conformance laws`); may be repeated."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Size of the cases: tiny, small or large. Default: the profile's; tiny for a "
            "slow backend."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random cases.")] = 0,
    jobs: Annotated[
        int,
        typer.Option(
            min=0, help="Processes that share the laws; 0: one a core, at most 4, if worth it."
        ),
    ] = 0,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the report as JSON.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the report as Markdown.")
    ] = None,
    reproducers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a file for each failure that shows it alone."),
    ] = None,
) -> None:
    """Try an attention backend. Status 0: all it claims holds; 1: not; 2: bad input."""
    with bad_input():
        from .cli_conformance import AttentionRun, run_attention

        asked = AttentionRun(
            backend=backend,
            backend_options=backend_options,
            device=device,
            profile=profile,
            seed=seed,
            dtypes=tuple(dtype or ()),
            only=tuple(only or ()),
            laws=tuple(law or ()),
            scale=scale,
            jobs=jobs,
            reproducers=reproducers,
            report=report,
            markdown=markdown,
        )
        raise typer.Exit(run_attention(asked))


@conformance.command("laws")
def conformance_laws() -> None:
    """List the laws of the attention suite, each with its text."""
    with bad_input():
        from .cli_conformance import run_laws

        raise typer.Exit(run_laws())


@conformance.command("mutants")
def conformance_mutants(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MUTANT]...", help="Default: all.")
    ] = None,
    all_laws: Annotated[
        bool, typer.Option("--all-laws", help="Find every law that notices, not just the first.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the mutants.")] = 1,
    earlier: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Table of an earlier run: the law that it names for a mutant is tried first.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the table as Markdown.")
    ] = None,
) -> None:
    """Try the suite on broken backends. Status 0: all are caught; 1: not; 2: bad input."""
    with bad_input():
        from .cli_conformance import run_mutants

        raise typer.Exit(run_mutants(names or (), all_laws, jobs, earlier, output))


@conformance.command("diff")
def conformance_diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="The earlier report.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="The later report.")],
    json_output: Json = False,
) -> None:
    """Compare two reports. Status 0: nothing became worse; 1: something did; 2: bad input."""
    with bad_input():
        from .cli_conformance import run_diff

        raise typer.Exit(run_diff(old, new, json_output))


add_comparisons(conformance)
add_stateful_suites(conformance)


@app.command()
def version() -> None:
    """Print the version of Jackfield and of what it stands on."""
    import platform

    import torch
    import transformers

    import jackfield

    versions = {
        "jackfield": jackfield.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(versions))


def main() -> None:
    """Run the command; errors of ours are one line on standard error, Ctrl-C is status 130."""
    try:
        configure_logging(os.environ, application=True)
        app()
    except JackfieldError as error:
        tell(error)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
