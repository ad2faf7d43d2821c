"""The third-party example, installed with pip as its author would, beside the built-in parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import make_tiny_llama

PROMPTS = ["abc", "The quick brown fox", "x" * 30]
PARTS = {
    "attention_backend": "example_loop",
    "scheduling_policy": "example_shortest_prompt",
    "block_manager": "example_stack",
}


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the example in it."""
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(repository / "examples/plugins/jackfield-example-plugin", source)
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--target", str(target), str(source)], check=True
    )
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory)
    return str(directory)


def _jackfield(
    *arguments: str, site: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with the example installed or not."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ.update(variables)
    if site is not None:
        environ["PYTHONPATH"] = str(site)
    return subprocess.run(
        [sys.executable, "-m", "jackfield.entrypoints.cli", *arguments],
        capture_output=True,
        text=True,
        env=environ,
        cwd="/",
        check=False,
    )


def _generate(
    model: str, *flags: str, site: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    arguments = ["generate", "--model", model, "--json", "--ignore-eos", "--max-tokens", "10"]
    return _jackfield(*arguments, *flags, *PROMPTS, site=site, **variables)


def _tokens(result: subprocess.CompletedProcess[str]) -> list[list[int]]:
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return [row["outputs"][0]["token_ids"] for row in rows]


@pytest.fixture(scope="module")
def builtin_tokens(model: str) -> list[list[int]]:
    return _tokens(_generate(model))


def test_it_is_listed(site: Path) -> None:
    result = _jackfield("plugins", "--json", site=site)
    assert result.returncode == 0, result.stderr
    listed = json.loads(result.stdout)["plugins"]
    (example,) = (row for row in listed if row["origin"]["plugin"] == "example")
    assert example["origin"]["distribution"] == "jackfield-example-plugin"
    assert {(kind, name) for kind, name, _ in example["parts"]} == set(PARTS.items())


def test_selected_by_flag(site: Path, model: str, builtin_tokens: list[list[int]]) -> None:
    flags = [text for name, part in PARTS.items() for text in (f"--{name.replace('_', '-')}", part)]
    assert _tokens(_generate(model, *flags, site=site)) == builtin_tokens


def test_selected_by_environment(site: Path, model: str, builtin_tokens: list[list[int]]) -> None:
    variables = {f"JACKFIELD_{name.upper()}": part for name, part in PARTS.items()}
    assert _tokens(_generate(model, site=site, **variables)) == builtin_tokens


def test_selected_by_file(
    site: Path, model: str, builtin_tokens: list[list[int]], tmp_path: Path
) -> None:
    config = tmp_path / "jackfield.toml"
    lines = [f'{name} = "{part}"' for name, part in PARTS.items()]
    config.write_text("\n".join([*lines, "[scheduling_policy_options]", "max_wait_steps = 3"]))
    assert _tokens(_generate(model, "--config", str(config), site=site)) == builtin_tokens


def test_what_was_asked_for_runs(site: Path, model: str) -> None:
    """The parts that are logged are the example's."""
    flags = [text for name, part in PARTS.items() for text in (f"--{name.replace('_', '-')}", part)]
    result = _generate(model, *flags, site=site, JACKFIELD_LOGGING_LEVEL="INFO", COLUMNS="400")
    for part in PARTS.values():
        assert part in result.stderr


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_uninstalled_it_is_missed(model: str, kind: str) -> None:
    """The same choice without the package names what is missing and what there is."""
    result = _generate(model, f"--{kind.replace('_', '-')}", PARTS[kind])
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"{kind}='{PARTS[kind]}': no plugin registers" in result.stderr
    assert "Traceback" not in result.stderr


def test_explain_knows_it(site: Path, model: str) -> None:
    result = _jackfield(
        "explain", model, "--json", "--attention-backend", "example_loop", site=site
    )
    assert result.returncode == 0, result.stderr
    parts = json.loads(result.stdout)["parts"]
    verdicts = {part["name"]: part["verdict"] for part in parts}
    assert verdicts["example_loop"] == "chosen"
    assert verdicts["torch_sdpa"] == "usable"


def test_its_own_tests_pass(site: Path, repository: Path) -> None:
    """Of the laws, those that depend on the dtype with one of them only, to be quick."""
    tests = repository / "examples/plugins/jackfield-example-plugin/tests"
    environ = dict(os.environ, PYTHONPATH=str(site))
    some = ["-k", "not TestLoopBackend or refusals or declared or bfloat16"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some, str(tests)],
        capture_output=True,
        text=True,
        env=environ,
        cwd=site,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
