"""Reports that come with the parts they are about.

A package that provides parts carries its reports as package data, one JSON file each, in its folder
``conformance``, or ``docs/conformance`` as Jackfield's own does. They are found without importing
the package, in a wheel as well as in an editable install, and a package speaks for its own parts
only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ConfigError
from .report import read_report
from .report_text import narrowing, verdict
from .results import Report

#: Where reports lie, below the folder of the import package.
FOLDERS = ("conformance", "docs/conformance")


@dataclass(frozen=True)
class Published:
    """One file with a report.

    Attributes:
        path: the file.
        report: what it holds; None if it cannot be read.
        problem: why it cannot be read; "" if it can.
    """

    path: Path
    report: Report | None
    problem: str = ""


def published(package: str) -> tuple[Published, ...]:
    """All reports that a package carries, by file name.

    Args:
        package: the top-level import package, such as ``jackfield``. One that is not installed
            carries none.
    """
    return tuple(_read(path) for path in _files(package))


def published_lines(suite: str, part: str, target: str) -> tuple[str, ...]:
    """What is published about a part, a line for each report; at least one line.

    Args:
        suite: such as ``attention``.
        part: name of the part.
        target: its class, as ``package.module:ClassName``. Reports in its package count.
    """
    return lines_about(published(package_of(target)), suite, part)


def package_of(target: str) -> str:
    """The top-level import package of ``package.module:ClassName``."""
    return target.partition(":")[0].partition(".")[0]


def lines_about(found: Sequence[Published], suite: str, part: str) -> tuple[str, ...]:
    """As ``published_lines``, of reports that have been read already."""
    lines = [
        summary(one.report)
        for one in found
        if one.report is not None and (one.report.suite, one.report.part) == (suite, part)
    ]
    lines += [f"unreadable report: {one.problem}" for one in found if one.problem]
    return tuple(lines) or ("no published report",)


def summary(report: Report) -> str:
    """A report in one line: verdict, device, dtypes, size and versions."""
    variants = dict.fromkeys(result.variant for result in report.results if result.variant)
    tried = f", {'/'.join(variants)}" if variants else ""
    size = [f"profile {report.profile}"]
    if report.only:
        size.append(f"narrowed to {narrowing(report)}")
    shown = ("jackfield", "torch")
    versions = [f"{name} {report.versions[name]}" for name in shown if name in report.versions]
    return f"{verdict(report)} on {report.device}{tried} ({'; '.join([*size, *versions])})"


def _files(package: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    for location in spec.submodule_search_locations or ():
        for folder in FOLDERS:
            yield from sorted((Path(location) / folder).glob("*.json"))


def _read(path: Path) -> Published:
    try:
        return Published(path, read_report(path))
    except ConfigError as error:
        return Published(path, None, str(error))
