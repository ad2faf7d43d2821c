"""A picture of a run: a group of bars for each case, a bar for each backend."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .results import BackendResult, BenchReport, CaseRecord
from .table import case_rate, header

_BAR = 0.8


def require_matplotlib(path: Path) -> None:
    """Find out before a long run whether a picture can be drawn after it.

    Raises:
        ConfigError: matplotlib is not installed, or draws no files of this kind.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {str(path)!r} needs matplotlib, which is not installed: "
            "pip install 'jackfield[plot]'"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"--plot {str(path)!r}: the name of a picture ends in one of: "
            f"{', '.join(sorted(kinds))}"
        )


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture. Bars are shares of the ceiling; without ceilings, speed relative to the
    fastest backend of the case.

    Args:
        report: what to show.
        path: a file; its ending says of which kind.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(one.backend for one in report.results if one.ratio is not None))
    figure = Figure(figsize=(max(7.0, 1.5 + 1.3 * len(report.cases)), 5.5), layout="constrained")
    axes: Any = figure.subplots()
    width = _BAR / max(1, len(names))
    colours = _colours(len(names))
    for index, name in enumerate(names):
        for place, case in enumerate(report.cases):
            found = [one for one in report.of_case(case.name) if one.backend == name]
            if not found or found[0].ratio is None:
                continue
            height = _height(found[0])
            left = place - _BAR / 2 + (index + 0.5) * width
            axes.bar(left, height, width * 0.92, color=colours[index])
            axes.annotate(
                _label(case, found[0]),
                (left, height),
                xytext=(0, 3),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
            )
    axes.set_xticks(range(len(report.cases)), [_tick(case) for case in report.cases], fontsize=8)
    share = report.ceilings is not None
    axes.set_ylabel("% of the ceiling" if share else "speed, % of the fastest")
    axes.margins(x=0.02, y=0.22)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    handles = [_patch(name, colour) for name, colour in zip(names, colours, strict=True)]
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel("\n".join(header(report)), fontsize=7, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _height(result: BackendResult) -> float:
    if result.share is not None:
        return 100 * result.share
    return 100 / (result.ratio or 1.0)


def _label(case: CaseRecord, result: BackendResult) -> str:
    return case_rate(case, result)


def _tick(case: CaseRecord) -> str:
    return case.name.replace("+", "+\n").replace(" ", "\n")


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    # Its ten colours can be told apart by most people; more backends get them again.
    colours = colormaps["tab10"]
    return [colours(index % 10) for index in range(count)]


def _patch(name: str, colour: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=name)
