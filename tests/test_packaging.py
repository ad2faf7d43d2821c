"""What is in the wheel is what is in git."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDERS = (
    "core",
    "backends",
    "schedulers",
    "models",
    "plugins",
    "conformance",
    "entrypoints",
)
REPORTS = "docs/conformance"


def test_wheel_has_every_module_and_report(repository: Path, tmp_path: Path) -> None:
    """A folder that is missing in pyproject.toml would be left out silently."""
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(
        ["git", "ls-files", "--", "*.py", "py.typed", "docs/conformance/*.json"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    # Published reports travel; what lies in folders beside them is for readers of the repository.
    expected = {
        f"jackfield/{name}"
        for name in tracked
        if "/" not in name or name.startswith(FOLDERS) or str(Path(name).parent) == REPORTS
    }
    source = tmp_path / "source"
    for name in [*tracked, "pyproject.toml", "README.md", "LICENSE"]:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((repository / name).read_bytes())
    # Whatever reports are committed, one that is added travels as well.
    added = "docs/conformance/added.json"
    (source / added).parent.mkdir(parents=True, exist_ok=True)
    (source / added).write_text("{}")
    expected.add(f"jackfield/{added}")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("jackfield-*.whl")
    packed = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if not name.split("/")[0].endswith("info")
    }
    assert packed == expected


def test_public_names_exist() -> None:
    """Every name of the root face can be had."""
    import jackfield

    assert "check_num_tokens" in jackfield.__all__
    for name in jackfield.__all__:
        assert getattr(jackfield, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = jackfield.nonsense


def test_import_is_cheap() -> None:
    """``import jackfield`` loads neither torch nor transformers."""
    code = (
        "import sys, jackfield; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/"
    )
    assert result.stdout.strip() == "[]"
