"""``docs/write-a-backend.md``, followed from its first block to its last, as a reader would.

Replaced, because it would take long or need a package index:

- ``pip install "jackfield[conformance]"`` is not run: this is installed already. ``pip install -e``
  is imitated (``support.guide``), ``pip wheel`` runs without build isolation.
- ``--profile quick`` of the first run gets tiny cases; ``--profile full`` becomes quick, tiny, and
  a single law.
- The model gets a small KV cache, by environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.guide import Guide, Reader, reading

_GUIDE = Guide(
    page="write-a-backend.md",
    module="jackfield_toy/attention.py",
    replaced=(
        ("--profile quick", "--profile quick --scale tiny"),
        ("--profile full --jobs 2", "--profile quick --scale tiny --law write_kv"),
    ),
    environ={"JACKFIELD_MAX_MODEL_LEN": "512", "JACKFIELD_NUM_GPU_BLOCKS_OVERRIDE": "64"},
    masks=(
        (r"[━─┏┳┓┡╇┩└┴┘┃│]+", " "),  # lines of tables, whose lengths depend on numbers
        (r"on cpu, [A-Z]\w*", "on cpu"),
        (r"torch \d[\w.+]*", "torch #"),
        (r"_[0-9a-f]{8}\.py", "_#.py"),
        (r"(pass|FAIL)( \S+%)? \(\d+\)", r"\1 #"),
        (r"-?\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+", "#"),
        (r"\d+(?= examples| deselected)", "#"),
        (r": \d+\b", ": #"),
        (r"\s+", " "),
        # What is replaced.
        (r"profile (quick, small|full, large) cases", "profile quick, tiny cases"),
        (r"[,;] narrowed to law=write_kv", ""),
    ),
)
#: The model is needed from here on.
_SERVING = next(at for at, name in enumerate(_GUIDE.sections) if name.startswith("7."))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """One reader for all sections."""
    with reading(_GUIDE, tmp_path_factory.mktemp("reader")) as one:
        yield one


@pytest.mark.parametrize("section", _GUIDE.sections[:_SERVING])
def test_what_the_page_says(reader: Reader, section: str) -> None:
    reader.read(section)


@pytest.mark.demo
@pytest.mark.usefixtures("demo_file")
@pytest.mark.parametrize("section", _GUIDE.sections[_SERVING:])
def test_what_the_page_says_about_serving(reader: Reader, section: str) -> None:
    reader.read(section)


def test_all_blocks_are_of_a_known_kind() -> None:
    _GUIDE.check_kinds()
