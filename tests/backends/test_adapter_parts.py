"""What the adapters of optional libraries share."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jackfield.backends import _library
from jackfield.backends._batch_parts import blind_rows, split_by_query_len, take_part
from jackfield.backends._library import Library
from jackfield.backends._lse import apply_sinks, blank_rows
from jackfield.backends._packed_keys import pack_keys
from jackfield.backends.triton_paged.store import by_token_places
from jackfield.core.attention import AttentionBatch
from jackfield.core.errors import UnsupportedError

BLOCK = 4
GARBAGE = -7


def a_batch(lengths: list[tuple[int, int]]) -> AttentionBatch:
    """A batch of ``(query_len, seq_len)``, whose blocks are numbered as they come."""
    query_lens = [query for query, _ in lengths]
    used = [-(-tokens // BLOCK) for _, tokens in lengths]
    table = np.full((len(lengths), max(used, default=0)), GARBAGE, np.int32)
    first = 1
    for row, count in zip(table, used, strict=True):
        row[:count] = np.arange(first, first + count)
        first += count
    return AttentionBatch.from_host(
        torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32),
        torch.from_numpy(table),
        torch.full((sum(query_lens),), -1, dtype=torch.int64),
    )


def test_decoding_sequences_are_a_part_of_their_own() -> None:
    parts, rest = split_by_query_len(a_batch([(1, 5), (3, 3), (0, 2), (1, 1)]), BLOCK)
    (decode,) = parts
    assert decode.sequences.tolist() == [0, 3]
    assert isinstance(decode.rows, np.ndarray)
    assert decode.rows.tolist() == [0, 4]
    assert decode.block_table.tolist() == [[1, 2], [5, 0]]
    assert rest.sequences.tolist() == [1]
    assert rest.rows == slice(1, 4)
    assert rest.query_start_loc.tolist() == [0, 3]
    assert (rest.max_query_len, rest.max_seq_len, rest.num_rows) == (3, 3, 3)


def test_a_part_of_nothing_has_no_rows() -> None:
    parts, rest = split_by_query_len(a_batch([(0, 2)]), BLOCK)
    assert parts == []
    assert (rest.num_seqs, rest.num_rows, rest.max_query_len) == (0, 0, 0)
    assert rest.rows == slice(0, 0)


def test_only_rows_of_sequences_without_tokens_are_blind() -> None:
    batch = a_batch([(2, 2), (1, 0), (0, 0), (2, 0)])
    assert blind_rows(batch, np.arange(4)).tolist() == [2, 3, 4]
    assert blind_rows(batch, np.array([0, 3])).tolist() == [3, 4]
    assert blind_rows(a_batch([(2, 2)]), np.arange(1)).tolist() == []


lengths_of_batches = st.lists(
    st.integers(0, 9).flatmap(lambda tokens: st.tuples(st.integers(0, tokens), st.just(tokens))),
    max_size=6,
)


@given(lengths_of_batches, st.none() | st.integers(1, 10))
def test_packed_keys_are_those_that_some_row_sees(
    lengths: list[tuple[int, int]], window: int | None
) -> None:
    batch = a_batch(lengths)
    packed = pack_keys(take_part(batch, np.arange(len(lengths)), BLOCK), BLOCK, window)
    expected: list[int] = []
    for row, (query_len, seq_len) in zip(batch.block_table_cpu.tolist(), lengths, strict=True):
        first = 0 if window is None else max(seq_len - query_len - window + 1, 0)
        expected += [row[j // BLOCK] * BLOCK + j % BLOCK for j in range(first, seq_len)]
    assert packed.slots.tolist() == expected
    assert packed.key_start_loc.tolist() == [0, *np.cumsum(packed.key_lens)]
    assert packed.max_key_len == max(packed.key_lens.tolist(), default=0)


def test_a_sink_takes_its_share_and_all_of_nothing() -> None:
    out = torch.ones(2, 1, 3)
    apply_sinks(out, torch.tensor([[2.0], [-torch.inf]]), torch.tensor([2.0]))
    torch.testing.assert_close(out, torch.tensor([[[0.5] * 3], [[0.0] * 3]]))


def test_blank_rows_are_zero_without_weight() -> None:
    out, lse = torch.full((3, 1, 2), torch.nan), torch.full((3, 1), torch.inf)
    blank_rows(out, lse, torch.tensor([1]))
    assert out[1].tolist() == [[0.0, 0.0]]
    assert lse.flatten().tolist() == [torch.inf, -torch.inf, torch.inf]
    assert out[[0, 2]].isnan().all()


CPU = torch.device("cpu")
CUDA = torch.device("cuda")
LIBRARY = Library("swift-attention", "swift_attention.api", "swift", "2.1", "3")


def test_an_absent_library_is_named_with_the_command_that_installs_it() -> None:
    assert LIBRARY.missing(CPU) == (
        "swift-attention is not installed; install it with: pip install 'jackfield[swift]'"
    )
    with pytest.raises(UnsupportedError, match="swift-attention is not installed"):
        LIBRARY.require("swift", CPU)


@pytest.mark.parametrize("version", ["2.0.9", "3", "unknown"])
def test_another_version_is_named_with_the_supported_ones(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert LIBRARY.missing(CPU) == (
        f"swift-attention {version} is installed, and versions from 2.1 to below 3 are supported; "
        "install one with: pip install 'jackfield[swift]'"
    )


def test_what_an_import_raises_is_told_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.1.post1")
    assert LIBRARY.missing(CPU) is None
    _library._import_failure.cache_clear()
    assert LIBRARY.missing(CUDA) == (
        "swift-attention 2.1.post1 cannot be imported: ModuleNotFoundError: No module named "
        "'swift_attention'"
    )
    _library._import_failure.cache_clear()


def test_what_a_library_warns_of_when_it_is_imported_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy_attention.py").write_text(
        'import warnings\nwarnings.warn("an old name", DeprecationWarning)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata, "version", lambda name: "2.1")
    assert Library("noisy", "noisy_attention", None, "2.1", "3").missing(CUDA) is None


def test_a_library_without_an_extra_is_installed_by_its_own_name() -> None:
    assert Library("swift", "swift", None, "2.1", "3").missing(CPU) == (
        "swift is not installed; install it with: pip install 'swift>=2.1,<3'"
    )


def test_blocks_of_one_token_may_have_gaps_between_them() -> None:
    """A view by token hides where blocks end; what it cannot hide is how far apart tokens are."""
    wide = torch.zeros(6, 1, 2, 16)
    keys, values = wide[::2].flatten(0, 1), wide[::3].flatten(0, 1)
    places = by_token_places(keys, values)
    in_elements = [stride * places.unit for stride in places.strides]
    assert in_elements == [64, 0, 16, 96, 0, 16]
