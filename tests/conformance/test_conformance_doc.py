"""What the documentation says about the suite and the backends is what the code does."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel
from support.pages import (
    assert_files_of_links,
    assert_has,
    assert_headings_of_links,
    assert_paths,
    assert_published,
    command_flags,
    one_line,
    own_reports,
    table,
)

from jackfield.backends.flex import FlexBackend
from jackfield.backends.torch_sdpa import TorchSdpaBackend
from jackfield.backends.triton_paged.backend import TritonBackend
from jackfield.conformance.attention.axes import SCALES, axis_names
from jackfield.conformance.attention.generate import DISTRIBUTIONS
from jackfield.conformance.attention.laws import Law
from jackfield.conformance.attention.mutants import MUTANTS
from jackfield.conformance.attention.suite import ALL_LAWS, PROFILES, described
from jackfield.conformance.attention.truth import attend, error_bounds
from jackfield.conformance.report_text import percentage
from jackfield.core.attention import AttentionBackend, Capabilities

BACKENDS: tuple[type[AttentionBackend], ...] = (TorchSdpaBackend, TritonBackend, FlexBackend)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/backends.md",
    "docs/conformance.md",
    "docs/plugins.md",
)
#: They name folders that a reader will have, and that a checkout does not.
NAME_OTHER_FOLDERS = ("CONTRIBUTING.md", "docs/backends.md")
#: Which batches a law of a kind is tried on, in words.
KINDS = {
    "decode": "Tried on decode batches.",
    "prefill": "Tried on prefill batches.",
    "one": "Tried on one sequence at a time.",
}


@pytest.fixture
def conformance_page(repository: Path) -> str:
    return (repository / "docs/conformance.md").read_text(encoding="utf-8")


@pytest.fixture
def backends_page(repository: Path) -> str:
    return (repository / "docs/backends.md").read_text(encoding="utf-8")


def sections(page: str, level: str) -> dict[str, str]:
    """Text below each heading of a level, by heading."""
    parts = re.split(rf"^{level} (.+)\n", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def law_text(law: Law) -> str:
    """What the page has to say about a law: its docstring, and how it is tried."""
    title, _, rest = inspect.cleandoc(law.__doc__ or "").partition("\n")
    notes = ["A law of equal bits."] * law.bitwise + [KINDS.get(law.kind, "")]
    paragraphs = [f"> {title}", *rest.strip().split("\n\n"), " ".join(filter(None, notes))]
    joined = (one_line(paragraph).replace("``", "`") for paragraph in paragraphs if paragraph)
    return "\n\n".join(textwrap.fill(one, 120, break_on_hyphens=False) for one in joined)


def test_every_law_has_its_text(conformance_page: str) -> None:
    laws = sections(sections(conformance_page, "##")["The laws"], "###")
    assert list(laws) == [f"`{law.name}`" for law in ALL_LAWS]
    for law in ALL_LAWS:
        expected = law_text(law)
        assert one_line(expected) in one_line(laws[f"`{law.name}`"]), f"write:\n\n{expected}"
        assert expected.startswith(f"> {law.title()}".replace("``", "`"))


def test_profiles_and_scales_are_those_of_the_code(conformance_page: str) -> None:
    profiles = table(
        ("profile", "random cases", "seconds", "cases"),
        (
            (f"`{name}`", f"{one.examples:,}", f"{one.seconds:g}", f"`{one.scale}`")
            for name, one in PROFILES.items()
        ),
    )
    assert_has(conformance_page, profiles)
    scales = table(
        ("scale", "tokens", "sequences", "many sequences", "query heads", "heads times head size"),
        (
            (
                f"`{name}`",
                str(one.max_seq_len),
                str(one.max_seqs),
                str(one.many_seqs or "-"),
                str(one.max_heads),
                str(one.max_elements),
            )
            for name, one in SCALES.items()
        ),
    )
    assert_has(conformance_page, scales)


def test_axes_and_distributions_are_named(conformance_page: str) -> None:
    rows = set(re.findall(r"^\| (.+?) \|", conformance_page, flags=re.MULTILINE))
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(axis_names()) | set(DISTRIBUTIONS) <= named


def test_mutants_that_are_named_exist(conformance_page: str) -> None:
    refused = sections(conformance_page, "###")["What is not allowed"]
    rows = re.findall(r"^\| .+ \| (`\w+`(?:, `\w+`)*) \|$", refused, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 5
    assert named <= {mutant.name for mutant in MUTANTS}


def test_typical_bounds_are_those_of_the_code(conformance_page: str) -> None:
    found = re.findall(r"^\| (\w+) \| (\d+) \| (\S+) \| (\S+) \|$", conformance_page, re.MULTILINE)
    assert len(found) == 8
    for name, num_keys, out_bound, lse_bound in found:
        dtype = getattr(torch, name)
        bounds = typical_bounds(dtype, int(num_keys))
        assert (float(out_bound), float(lse_bound)) == pytest.approx(bounds, rel=0.1)


def typical_bounds(dtype: torch.dtype, num_keys: int) -> tuple[float, float]:
    """Mean bounds of output and LSE for eight rows of normal numbers, heads of 64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, keys, values = draw(8, 1, 64), draw(num_keys, 1, 64), draw(num_keys, 1, 64)
    truth = attend(query, keys, values, scale=0.125, causal=False)
    out_bound, lse_bound = error_bounds(truth, dtype, dtype, 64, None)
    return float(out_bound.mean()), float(lse_bound.mean())


def test_every_flag_has_a_row(conformance_page: str) -> None:
    running = sections(conformance_page, "##")["Running it"]
    first_cells = re.findall(r"^\| (`--.+?) \| ", running, flags=re.MULTILINE)
    named = {flag for cell in first_cells for flag in re.findall(r"--[a-z-]+", cell)}
    assert named == command_flags("conformance", "attention") - {"--help"}


def test_commands_have_the_flags_that_are_shown(repository: Path) -> None:
    shown = 0
    for page in ("README.md", "docs/conformance.md", "docs/backends.md"):
        text = (repository / page).read_text(encoding="utf-8")
        for name, rest in re.findall(r"jackfield conformance ([a-z-]+)(.*?)(?:  #.*)?[`\n]", text):
            shown += 1
            flags = set(re.findall(r"--[a-z-]+", rest))
            assert flags <= command_flags("conformance", name), f"{page}: {name}{rest}"
    assert shown > 8


def capability_table() -> str:
    """What the built-in backends declare; a value for a CPU where it is another one."""
    declared = [{device: of(one, device) for device in ("cuda", "cpu")} for one in BACKENDS]
    rows = []
    for field in fields(Capabilities):
        if field.name != "missing":
            cells = [cell({on: one[on][field.name] for on in one}) for one in declared]
            rows.append((f"`{field.name}`", *cells))
    return table(("", *(f"`{one.name}`" for one in BACKENDS)), rows)


def of(backend: type[AttentionBackend], device: str) -> Mapping[str, str]:
    return described(backend.capabilities(torch.device(device)))


def cell(values: Mapping[str, str]) -> str:
    if values["cpu"] == values["cuda"]:
        return values["cuda"]
    return f"{values['cuda']} (CPU: {values['cpu']})"


def option_table(backend: type[AttentionBackend]) -> str:
    """The options of a backend, those of nested models with a dot."""

    def rows(model: type[BaseModel], prefix: str = "") -> Iterator[Sequence[str]]:
        for name, field in model.model_fields.items():
            yield f"`{prefix}{name}`", field.description or ""
            nested = [
                one
                for one in getattr(field.annotation, "__args__", ())
                if inspect.isclass(one) and issubclass(one, BaseModel)
            ]
            for one in nested:
                yield from rows(one, f"{prefix}{name}.")

    return table(("option", "meaning"), rows(backend.Options))


def test_declared_capabilities_are_those_of_the_page(backends_page: str) -> None:
    assert_has(backends_page, capability_table())


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: str(one.name))
def test_options_are_those_of_the_page(backend: type[AttentionBackend], backends_page: str) -> None:
    assert_has(sections(backends_page, "##")[f"`{backend.name}`"], option_table(backend))


def test_published_reports_are_those_of_the_page(backends_page: str, repository: Path) -> None:
    section = sections(backends_page, "##")["Published reports"]
    reports = own_reports("attention")
    linked = re.findall(r"^\| `(\w+)` \| \[.+?\]\(conformance/(.+?)\.md\)", section, re.MULTILINE)
    assert sorted(f"{file}.json" for _, file in linked) == sorted(reports)
    for part, file in linked:
        report = reports[f"{file}.json"]
        assert report.part == part
        page = repository / "docs" / "conformance" / f"{file}.md"
        assert_published(section, report, page, "examples")


def test_calibration_is_that_of_the_published_report(conformance_page: str) -> None:
    report = own_reports("attention")["torch_sdpa-h200.json"]
    for what, laws in (("output", ["meaning"]), ("LSE", ["lse"]), ("any law", [])):
        largest: dict[str, float] = {}
        for one in report.results:
            if not laws or one.law in laws:
                largest[one.variant] = max(largest.get(one.variant, 0.0), one.max_error or 0.0)
        cells = (
            percentage(largest[name]).replace("%", " %")
            for name in ("float64", "float32", "bfloat16", "float16")
        )
        row = re.escape(f"| `torch_sdpa`, H200, {what} |") + ".+" + re.escape(" | ".join(cells))
        assert re.search(row, conformance_page), row


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page: str, repository: Path) -> None:
    assert_files_of_links(repository / page)
    assert_paths(repository / page, repository, folders=page not in NAME_OTHER_FOLDERS)


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_have_one(page: str, repository: Path) -> None:
    assert_headings_of_links(repository / page)
