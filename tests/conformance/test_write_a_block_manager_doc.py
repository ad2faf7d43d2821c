"""``docs/write-a-block-manager.md``, followed from its first block to its last, as a reader would.

Replaced, because it would take long or need a package index:

- ``pip install "jackfield[conformance]"`` is not run: this is installed already. ``pip install -e``
  is imitated (``support.guide``), ``pip wheel`` runs without build isolation.
- All profiles tell fewer stories, in one process. After a failure the run looks for no others, and
  the search for the shortest story is not cut short, so that it does not depend on the machine.
- The model gets a small KV cache where the page says nothing of it, by environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.guide import Guide, Reader, reading

#: Makes the suite small.
_PRELUDE = """
import functools, sys

if sys.argv[0] == "pytest" or "block-manager" in sys.argv:
    from jackfield.conformance.block_manager import suite
    from jackfield.conformance.stateful import search, workers

    suite.PROFILES = dict.fromkeys(suite.PROFILES, search.Budget(70, 30, 600.0))
    search.SHRINK_SECONDS = 600.0
    workers.search = functools.partial(search.search, first_only=True)
"""
_GUIDE = Guide(
    page="write-a-block-manager.md",
    module="jackfield_adjacent/manager.py",
    replaced=(("conformance block-manager ", "conformance block-manager --jobs 1 "),),
    environ={"JACKFIELD_MAX_MODEL_LEN": "512", "JACKFIELD_NUM_GPU_BLOCKS_OVERRIDE": "64"},
    masks=(
        (r"[━─┏┳┓┡╇┩└┴┘┃│]+", " "),
        (r"\s+", " "),
        (r"(pass|FAIL) \(\d+\)", r"\1 #"),
        (r"\d+\.\d+ ?s\b", "# s"),
        (r"\d+ laws? failed", "# failed"),
        (r": \d+\b", ": #"),
        (r"\d+(?= (examples|passed|skipped|deselected))", "#"),
        # Of modules that the prelude imported before.
        (r"=+ warnings summary .* capture-warnings.html|, \d+ warnings", ""),
        # What stands in place of a profile.
        (r"(profile:?) \w+, (?:\d+ of )?\d+ stories of \d+ steps", r"\1 #"),
    ),
    prelude=_PRELUDE,
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
