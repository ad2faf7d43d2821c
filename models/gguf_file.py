"""Reading GGUF files: header and metadata at once, tensors when asked for.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
Quantised blocks are expanded by the ``gguf`` package. Its reader is not used: it makes an array
object per string, which takes seconds for a vocabulary of 50,000 tokens, and this takes a tenth of
one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from ..core.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF's value types and their ``struct`` codes."""
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in its file.

    Attributes:
        name: GGUF's own name.
        kind: how its numbers are stored.
        shape: outermost dimension first, as in torch (the file has them the other way round).
        offset, size: bytes from the start of the file, and bytes taken.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


class GGUFFile:
    """One file, opened by mapping it into memory.

    Attributes:
        path: of the file.
        metadata: key to number, text, bool or list of these.
        tensors: name to place.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: no GGUF file, another version, or shorter than its header says.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ModelError(f"cannot read the GGUF file {path}: {error}") from error
        cursor = _Cursor(self._data, path)
        if cursor.take(4) != _MAGIC:
            raise ModelError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{path} has GGUF version {version} (supported: 2 and 3, little-endian)"
            )
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        fields = ((cursor.text(), cursor.value(cursor.scalar("I"))) for _ in range(num_fields))
        self.metadata: Mapping[str, Any] = dict(fields)
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        start = -(-cursor.at // alignment) * alignment
        places = (self._place(start, *info) for info in infos)
        self.tensors: Mapping[str, GGUFTensor] = {place.name: place for place in places}

    def _place(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, at: int
    ) -> GGUFTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from error
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if shape[-1] % block_elements:
            raise ModelError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]} numbers, no multiple of the "
                f"{block_elements} of a {quantization.name} block"
            )
        size = prod(shape) // block_elements * block_bytes
        if start + at + size > len(self._data):
            raise ModelError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {start + at + size}, the "
                f"file at {len(self._data)}"
            )
        return GGUFTensor(name, quantization, shape, start + at, size)

    def tensor(self, name: str) -> Tensor:
        """The numbers of a tensor, float32, on the host.

        Raises:
            ModelError: its quantisation cannot be expanded.
        """
        place = self.tensors[name]
        stored = np.frombuffer(self._data, np.uint8, place.size, place.offset)
        try:
            numbers = dequantize(stored.reshape(*place.shape[:-1], -1), place.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as {place.kind.name}, which cannot be read"
            ) from error
        # A copy where the numbers still lie in the read-only mapping (float32 tensors).
        writable = numbers if numbers.flags.writeable else numbers.copy()
        return torch.from_numpy(writable).view(place.shape)


class _Cursor:
    """A position in the header, which refuses to run past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self.at = data, path, 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._data):
            raise ModelError(
                f"{self._path} is truncated: its header goes on behind the end of the file at byte "
                f"{len(self._data)}"
            )
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                taken = self.take(count * struct.calcsize(f"<{code}"))
                return list(struct.unpack(f"<{count}{code}", taken))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._path}: its header holds the unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of one tensor."""
        name, dims = self.text(), self.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise ModelError(f"{self._path}: tensor {name!r} has {dims} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dims)]))
        return name, shape, self.scalar("I"), self.scalar("Q")
