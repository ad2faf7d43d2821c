"""Moving KV blocks: the contents are what doing one copy after the other would leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda import no_synchronisation
from torch import Tensor

from jackfield.core import kv_movement
from jackfield.core.attention import KVCache, KVCacheSpec, allocate_kv_cache
from jackfield.core.block_manager import BlockCopy
from jackfield.core.capabilities import KVLayout
from jackfield.core.errors import CapacityError
from jackfield.core.kv_movement import (
    KVMover,
    batches,
    block_rows,
    host_block_bytes,
    staging_bytes,
)
from jackfield.core.scheduler import KVMove, MoveKind

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4
POOLS = {
    MoveKind.COPY: ("device", "device"),
    MoveKind.SWAP_OUT: ("device", "host"),
    MoveKind.SWAP_IN: ("host", "device"),
}


def make_caches(
    layout: KVLayout = "NHD",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    num_blocks: int = NUM_BLOCKS,
    sizes: tuple[int, int] = (5, 7),
) -> list[KVCache]:
    """Three layers, each byte of a block the block's id."""
    spec = KVCacheSpec(num_blocks, 2, 3, *sizes, dtype)
    caches = [allocate_kv_cache(spec, layout, device) for _ in range(3)]
    for cache in caches:
        for tensor in as_bytes(cache):
            ids = torch.arange(num_blocks, dtype=torch.uint8, device=device)
            tensor.copy_(ids.view(-1, 1, 1, 1).expand_as(tensor))
    return caches


def as_bytes(cache: KVCache) -> list[Tensor]:
    return [block_rows(t).view(torch.uint8)[:, :, None, None] for t in (cache.k, cache.v)]


def contents(caches: list[KVCache]) -> list[int]:
    """Whose contents each block has, in all layers alike."""
    rows = torch.cat([t.flatten(1) for cache in caches for t in as_bytes(cache)], 1).cpu()
    assert bool((rows == rows[:, :1]).all()), "parts of a block have come from different blocks"
    result: list[int] = rows[:, 0].tolist()
    return result


def one_by_one(moves: list[KVMove], num_blocks: int = NUM_BLOCKS) -> list[int]:
    """What must be in the blocks, from the meaning of the moves."""
    memory = {("device", block): block for block in range(num_blocks)}
    memory |= {("host", block): 200 + block for block in range(NUM_HOST_BLOCKS)}
    for kind, copies in moves:
        source_pool, destination_pool = POOLS[kind]
        for copy in copies:
            memory[destination_pool, copy.destination] = memory[source_pool, copy.source]
    return [memory["device", block] for block in range(num_blocks)]


def move(kind: MoveKind, *pairs: tuple[int, int]) -> KVMove:
    return KVMove(kind, tuple(BlockCopy(*pair) for pair in pairs))


OUT, IN, COPY = MoveKind.SWAP_OUT, MoveKind.SWAP_IN, MoveKind.COPY


@st.composite
def move_lists(draw: st.DrawFn) -> list[KVMove]:
    """Calls of a block manager in any order, each of its copies on blocks of its own; the host
    blocks that are read have been written before."""
    device = st.integers(0, NUM_BLOCKS - 1)
    moves = [move(OUT, *((block, block) for block in range(NUM_HOST_BLOCKS)))]
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(list(MoveKind)))
        host = st.integers(0, NUM_HOST_BLOCKS - 1)
        pools = {"device": device, "host": host}
        source_pool, destination_pool = POOLS[kind]
        sources = draw(st.lists(pools[source_pool], min_size=1, max_size=3, unique=True))
        targets = draw(st.lists(pools[destination_pool], min_size=3, max_size=3, unique=True))
        if source_pool == destination_pool:
            targets = [block for block in targets if block not in sources]
        moves.append(move(kind, *zip(sources, targets, strict=False)))
    return moves


@settings(deadline=None, max_examples=300)
@given(move_lists())
def test_any_order_of_calls(moves: list[KVMove]) -> None:
    caches = make_caches()
    KVMover(caches, NUM_HOST_BLOCKS).execute(moves)
    assert contents(caches) == one_by_one(moves)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("sizes", [(5, 7), (8, 8), (1, 3)])
def test_every_layout_and_dtype(
    layout: KVLayout, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    caches = make_caches(layout, dtype, sizes=sizes)
    before = [t.view(torch.uint8).clone() for c in caches for t in (c.k, c.v)]
    moves = [move(OUT, (1, 3), (2, 0)), move(COPY, (5, 1)), move(IN, (3, 2), (0, 4))]
    KVMover(caches, NUM_HOST_BLOCKS).execute(moves)
    after = [t.view(torch.uint8) for c in caches for t in (c.k, c.v)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[[0, 5, 1, 3, 2, 5]])


def test_host_blocks_may_be_reused_at_once() -> None:
    caches = make_caches()
    mover = KVMover(caches, NUM_HOST_BLOCKS)
    mover.execute([move(OUT, (0, 2))])
    for tensor in (t for cache in caches for t in as_bytes(cache)):
        tensor[0] = 77
    mover.execute([move(IN, (2, 1)), move(OUT, (0, 2)), move(OUT, (4, 3)), move(IN, (2, 5))])
    assert contents(caches) == [77, 0, 2, 3, 4, 77]


def test_the_usual_order_is_one_batch_and_the_unusual_is_split() -> None:
    usual = [move(OUT, (1, 0), (2, 1)), move(IN, (2, 1)), move(COPY, (3, 4)), move(IN, (3, 2))]
    assert len(list(batches(usual))) == 1
    assert list(batches([])) == []
    for first, second in (
        (move(COPY, (1, 2)), move(OUT, (2, 0))),  # what was just copied goes out
        (move(COPY, (1, 2)), move(COPY, (2, 3))),
        (move(COPY, (1, 2)), move(IN, (0, 1))),
        (move(IN, (0, 2)), move(OUT, (3, 0))),
        (move(OUT, (1, 0)), move(OUT, (2, 0))),
    ):
        assert len(list(batches([first, second]))) == 2


def test_transfers_are_as_long_as_neighbours_allow_and_staging_may_be_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of host memory and staging buffers of two blocks: nothing else changes."""
    caches = make_caches(num_blocks=12)
    size = host_block_bytes([KVCacheSpec(12, 2, 3, 5, 7, torch.float32)] * 3)
    monkeypatch.setattr(kv_movement, "_STAGING_BYTES", 2 * size)
    monkeypatch.setattr(kv_movement, "_SEGMENT_BYTES", 2 * size)
    assert staging_bytes(size, 7) == 4 * size
    mover = KVMover(caches, 7)
    mover.execute([move(OUT, *((block, 6 - block) for block in range(7)))])
    mover.execute([move(IN, *((6 - block, 11 - block) for block in range(7)))])
    assert contents(caches) == [0, 1, 2, 3, 4, 6, 5, 4, 3, 2, 1, 0]


def test_gaps_and_missing_host_memory_are_errors() -> None:
    cache = make_caches()[0]
    gaps = KVCache(cache.k[..., :3], cache.v)
    with pytest.raises(ValueError, match="gaps inside its blocks"):
        KVMover([gaps])
    mover = KVMover([cache])
    mover.execute([move(COPY, (1, 2))])
    with pytest.raises(RuntimeError, match="no host blocks"):
        mover.execute([move(OUT, (1, 0))])


def test_too_much_host_memory_is_an_error_with_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_movement, "_SEGMENT_BYTES", 2**60)  # in one piece
    with pytest.raises(CapacityError, match=r"swap_space=\d+ bytes of memory.*lower swap_space"):
        KVMover(make_caches(), 2**50)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_on_a_gpu_without_waiting(layout: KVLayout, dtype: torch.dtype) -> None:
    """Out, in, copies and reuse of the same host blocks, all enqueued before anything has run."""
    caches = make_caches(layout, dtype, torch.device("cuda"))
    mover = KVMover(caches, NUM_HOST_BLOCKS)
    rounds = [
        [move(OUT, (1, 3), (2, 0)), move(COPY, (5, 1)), move(IN, (3, 2), (0, 4))],
        [move(OUT, (4, 3), (2, 0)), move(IN, (0, 5))],
        [move(IN, (3, 0)), move(OUT, (1, 3)), move(IN, (3, 3))],
    ]
    torch.cuda.synchronize()
    with no_synchronisation():
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # the device is busy: what follows is all waiting for it
        for moves in rounds:
            mover.execute(moves)
    torch.cuda.synchronize()
    assert contents(caches) == one_by_one([item for moves in rounds for item in moves])
