"""Moves the contents of KV blocks: within a device's caches, to host memory, and back.

The moves of a step take effect in the order of the calls that asked for them, and are executed in
batches: one gather and one scatter for each cache tensor and direction, not one for each block. A
block of host memory holds the block of all layers side by side, so that it crosses the bus in one
piece, and blocks next to each other in one transfer.

On CUDA nothing waits for the device. Host memory is pinned and never read or written by the CPU;
all transfers of both directions run in one stream of their own, so a host block may be given to
somebody else as soon as a call has returned. The compute stream waits for what it needs: blocks
that come in, or a staging buffer that is still on its way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention import KVCache, KVCacheSpec
from .errors import CapacityError
from .scheduler import KVMove, MoveKind

_ALIGNMENT = 16  # bytes at which each tensor's part of a host block begins
_STAGING_BYTES = 128 * 2**20  # of one staging buffer at most; there are two
_SEGMENT_BYTES = 2**30  # of pinned memory in one piece: torch rounds sizes up to powers of 2


def block_rows(tensor: Tensor) -> Tensor:
    """A cache tensor as one row of integers for each block: a view, in the physical order.

    Integers of the widest type that fits, because gathering does not depend on what the bytes
    mean, and torch cannot index all 8-bit floating-point types.

    Args:
        tensor: keys or values of a layer, ``[P, B, K, H]``, blocks packed inside.

    Returns:
        ``[P, bytes_per_block / itemsize]``.

    Raises:
        ValueError: there are gaps inside a block.
    """
    inner = sorted(range(1, tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    try:
        rows = tensor.permute(0, *inner).view(tensor.shape[0], -1).view(torch.uint8)
    except RuntimeError:
        raise ValueError(
            f"a cache of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps inside "
            "its blocks: it cannot be moved"
        ) from None
    for dtype in (torch.int64, torch.int32, torch.int16):
        bounds = (rows.shape[1], rows.stride(0), rows.storage_offset())
        if not any(bound % dtype.itemsize for bound in bounds):
            return rows.view(dtype)
    return rows


def host_block_bytes(specs: Sequence[KVCacheSpec]) -> int:
    """Bytes that one block of all layers, with these caches, takes in host memory."""
    total = 0
    for spec in specs:
        per_head = spec.block_size * spec.num_kv_heads * spec.dtype.itemsize
        total += _aligned(per_head * spec.head_size) + _aligned(per_head * spec.v_head_size)
    return total


def staging_bytes(host_block: int, num_host_blocks: int) -> int:
    """Bytes of device memory that moving blocks to and from host memory takes on CUDA.

    Args:
        host_block: bytes of a host block.
        num_host_blocks: how many there are.
    """
    return 2 * _staging_rows(host_block, num_host_blocks) * host_block


@dataclass
class MoveBatch:
    """Moves that are done together: out to the host, then in from it, then within the device.

    Within one of these three everything is read before anything is written. Each maps a
    destination to its source.
    """

    outs: dict[int, int] = field(default_factory=dict)
    ins: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    _sources: dict[MoveKind, set[int]] = field(
        default_factory=lambda: {kind: set() for kind in MoveKind}
    )

    def takes(self, kind: MoveKind, source: int, destination: int) -> bool:
        """Whether a copy that was asked for after all of these may be done together with them."""
        if kind is MoveKind.SWAP_OUT:
            changed = source in self.ins or source in self.copies
            host_read = destination in self._sources[MoveKind.SWAP_IN]
            return not (changed or host_read or destination in self.outs)
        if kind is MoveKind.SWAP_IN:
            read = destination in self._sources[MoveKind.COPY]
            return not (read or destination in self.copies or destination in self.ins)
        return source not in self.copies and destination not in self.copies

    def add(self, kind: MoveKind, source: int, destination: int) -> None:
        """Add a copy that the batch takes."""
        part = {MoveKind.SWAP_OUT: self.outs, MoveKind.SWAP_IN: self.ins}.get(kind, self.copies)
        part[destination] = source
        self._sources[kind].add(source)


def batches(moves: Sequence[KVMove]) -> Iterator[MoveBatch]:
    """The moves in as few batches as keep the meaning of doing them one after the other."""
    batch = MoveBatch()
    for kind, copies in moves:
        for source, destination in ((copy.source, copy.destination) for copy in copies):
            if not batch.takes(kind, source, destination):
                yield batch
                batch = MoveBatch()
            batch.add(kind, source, destination)
    if batch.outs or batch.ins or batch.copies:
        yield batch


class KVMover:
    """Executes moves on the caches of all layers.

    Args:
        caches: of the layers; all on one device.
        num_host_blocks: size of the swap space, allocated here, pinned on CUDA.

    Raises:
        CapacityError: the host memory cannot be had.
        ValueError: blocks of a cache are not packed.
    """

    def __init__(self, caches: Sequence[KVCache], num_host_blocks: int = 0) -> None:
        self._tensors = [block_rows(t) for cache in caches for t in (cache.k, cache.v)]
        self._device = self._tensors[0].device
        self._parts: list[tuple[int, int]] = []  # where each tensor's bytes lie in a host block
        end = 0
        for rows in self._tensors:
            self._parts.append((end, end + _row_bytes(rows)))
            end += _aligned(_row_bytes(rows))
        self._host: _HostBlocks | None = None
        if num_host_blocks:
            self._host = _HostBlocks(num_host_blocks, end, self._device)

    def execute(self, moves: Sequence[KVMove]) -> None:
        """Enqueue moves on the current stream; on a CPU they are done on return.

        Raises:
            RuntimeError: blocks are to go to host memory, and there is none.
        """
        for batch in batches(moves):
            if batch.outs or batch.ins:
                if self._host is None:
                    raise RuntimeError("blocks were to be swapped, but there are no host blocks")
                self._move_out(self._host, batch.outs)
                self._move_in(self._host, batch.ins)
            if batch.copies:
                self._copy(batch.copies)

    def _move_out(self, host: _HostBlocks, outs: dict[int, int]) -> None:
        host_ids = sorted(outs)  # as many neighbours as possible
        device_ids = self._to_device([outs[host_id] for host_id in host_ids])
        for start in range(0, len(host_ids), host.num_staged):
            chunk = host_ids[start : start + host.num_staged]
            indices = device_ids[start : start + len(chunk)]
            with host.sending(chunk) as staged:
                for rows, part in zip(self._tensors, self._views(staged), strict=True):
                    torch.index_select(rows, 0, indices, out=part)

    def _move_in(self, host: _HostBlocks, ins: dict[int, int]) -> None:
        order = sorted(ins, key=lambda device_id: ins[device_id])
        device_ids = self._to_device(order)
        for start in range(0, len(order), host.num_staged):
            chunk = [ins[device_id] for device_id in order[start : start + host.num_staged]]
            indices = device_ids[start : start + len(chunk)]
            with host.receiving(chunk) as staged:
                for rows, part in zip(self._tensors, self._views(staged), strict=True):
                    rows.index_copy_(0, indices, part)

    def _copy(self, copies: dict[int, int]) -> None:
        indices = self._to_device([*copies.values(), *copies])
        sources, destinations = indices[: len(copies)], indices[len(copies) :]
        for rows in self._tensors:
            rows.index_copy_(0, destinations, rows.index_select(0, sources))

    def _views(self, staged: Tensor) -> Iterator[Tensor]:
        """Each tensor's part of staged host blocks, as integers of its own width."""
        for rows, (start, end) in zip(self._tensors, self._parts, strict=True):
            yield staged[:, start:end].view(rows.dtype)

    def _to_device(self, ids: list[int]) -> Tensor:
        indices = torch.tensor(ids, dtype=torch.int64)
        if self._device.type != "cuda":
            return indices
        return indices.pin_memory().to(self._device, non_blocking=True)


class _HostBlocks:
    """The swap space, and how blocks get there and back.

    Attributes:
        num_staged: most blocks that cross in one piece.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        self.num_staged = _staging_rows(block_bytes, num_blocks)
        self._rows_per_segment = max(1, _SEGMENT_BYTES // block_bytes)
        cuda = device.type == "cuda"
        sizes = [
            min(self._rows_per_segment, num_blocks - start)
            for start in range(0, num_blocks, self._rows_per_segment)
        ]
        try:
            self._segments = [
                torch.empty(size, block_bytes, dtype=torch.uint8, pin_memory=cuda) for size in sizes
            ]
        except RuntimeError as error:
            kind = "pinned host memory" if cuda else "memory"
            raise CapacityError(
                f"swap_space={num_blocks * block_bytes} bytes of {kind} could not be had "
                f"({str(error).splitlines()[0]}); lower swap_space, or set it to 0"
            ) from error
        self._staging = tuple(
            _Staging(torch.empty(self.num_staged, block_bytes, dtype=torch.uint8, device=device))
            for _ in range(2)
        )
        self._turn = 0
        self._transfers = _new_stream(device) if cuda else None

    @contextmanager
    def sending(self, host_ids: Sequence[int]) -> Iterator[Tensor]:
        """Rows to be filled, one for each host block; they are sent off at the end."""
        staging = self._next()
        staging.wait(staging.compute)
        yield staging.rows[: len(host_ids)]
        staging.used(staging.compute)
        staging.wait(self._transfers)
        with torch.cuda.stream(self._transfers):
            for start, blocks in self._pieces(host_ids):
                blocks.copy_(staging.rows[start : start + len(blocks)], non_blocking=True)
        staging.used(self._transfers)

    @contextmanager
    def receiving(self, host_ids: Sequence[int]) -> Iterator[Tensor]:
        """Rows with the contents of host blocks, to be used inside."""
        staging = self._next()
        staging.wait(self._transfers)
        with torch.cuda.stream(self._transfers):
            for start, blocks in self._pieces(host_ids):
                staging.rows[start : start + len(blocks)].copy_(blocks, non_blocking=True)
        staging.used(self._transfers)
        staging.wait(staging.compute)
        yield staging.rows[: len(host_ids)]
        staging.used(staging.compute)

    def _next(self) -> _Staging:
        self._turn = 1 - self._turn
        return self._staging[self._turn]

    def _pieces(self, host_ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Host blocks as slices of neighbours, each with the position of its first block."""
        start = 0
        for index in range(1, len(host_ids) + 1):
            ends = index == len(host_ids) or host_ids[index] != host_ids[index - 1] + 1
            if ends or host_ids[index] % self._rows_per_segment == 0:
                segment, row = divmod(host_ids[start], self._rows_per_segment)
                yield start, self._segments[segment][row : row + index - start]
                start = index


class _Staging:
    """Device memory through which blocks pass, used by two streams in turn.

    Attributes:
        rows: ``[num_staged, block_bytes]``, uint8.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._last_use: torch.cuda.Event | None = None
        self.used(self.compute)  # the memory may have been somebody else's in this stream

    @property
    def compute(self) -> torch.cuda.Stream | None:
        """The stream of the computations; None on a CPU."""
        return torch.cuda.current_stream(self.rows.device) if self.rows.is_cuda else None

    def used(self, stream: torch.cuda.Stream | None) -> None:
        """Take note that all that is in the stream now may use the memory."""
        if stream is not None:
            self._last_use = stream.record_event()

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Let what comes next in the stream wait for the last use."""
        if stream is not None and self._last_use is not None:
            stream.wait_event(self._last_use)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.dtype.itemsize


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _staging_rows(block_bytes: int, num_host_blocks: int) -> int:
    return min(num_host_blocks, max(1, _STAGING_BYTES // block_bytes))
