"""What is timed: layers and batches as they occur while a model is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ...core.errors import ConfigError
from ...plugins.validation import did_you_mean

Sequences = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BenchCase:
    """A layer and a batch.

    Attributes:
        num_heads, num_kv_heads, head_size: of the layer.
        sequences: tokens and new tokens of each sequence.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    sequences: Sequences

    @property
    def kind(self) -> str:
        """``decode`` (one new token each), ``prefill`` (all tokens are new), else ``mixed``."""
        if all(new == 1 for _, new in self.sequences):
            return "decode"
        return "prefill" if all(new == length for length, new in self.sequences) else "mixed"

    @property
    def name(self) -> str:
        """Such as ``decode 64x4096 28/4/128``, or ``mixed 60x2048+4x512 28/4/128``."""
        runs = [(len(list(run)), length) for (length, _), run in groupby(self.sequences)]
        batch = "+".join(f"{count}x{length}" for count, length in runs)
        return f"{self.kind} {batch} {self.num_heads}/{self.num_kv_heads}/{self.head_size}"

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(new for _, new in self.sequences)

    def num_bytes(self, itemsize: int, kv_itemsize: int) -> int:
        """Bytes of the visible keys and values, the query and the output, each once.

        Args:
            itemsize: bytes of a number of query and output.
            kv_itemsize: bytes of a number of the cache.
        """
        keys = sum(length for length, _ in self.sequences) * self.num_kv_heads * self.head_size
        rows = self.num_tokens * self.num_heads * self.head_size
        return 2 * (keys * kv_itemsize + rows * itemsize)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products over visible keys."""
        # Row i of q in a sequence of n tokens sees n - q + 1 + i keys.
        visible = sum((2 * length - new + 1) * new // 2 for length, new in self.sequences)
        return 4 * visible * self.num_heads * self.head_size


def _decode(count: int, length: int) -> Sequences:
    return ((length, 1),) * count


def _prefill(count: int, length: int) -> Sequences:
    return ((length, length),) * count


#: Of models of 7 and 8 billion parameters, and of one with half a billion.
CUDA_CASES = (
    BenchCase(28, 4, 128, _decode(64, 4096)),
    BenchCase(32, 8, 128, _decode(64, 4096)),
    BenchCase(28, 4, 128, _decode(256, 1024)),
    BenchCase(32, 8, 128, _decode(256, 1024)),
    BenchCase(14, 2, 64, _decode(256, 1024)),
    BenchCase(28, 4, 128, _decode(1, 4096)),
    BenchCase(28, 4, 128, _decode(1, 32768)),
    BenchCase(28, 4, 128, _prefill(1, 8192)),
    BenchCase(28, 4, 128, _prefill(8, 1024)),
    BenchCase(32, 8, 128, _prefill(1, 8192)),
    BenchCase(14, 2, 64, _prefill(8, 1024)),
    BenchCase(28, 4, 128, _decode(60, 2048) + _prefill(4, 512)),
)
#: Of a model with 135 million parameters.
CPU_CASES = (
    BenchCase(9, 3, 64, _decode(16, 192)),
    BenchCase(9, 3, 64, _prefill(4, 128)),
    BenchCase(9, 3, 64, _decode(8, 192) + _prefill(1, 128)),
)


def chosen_cases(wanted: Sequence[str], device_type: str) -> tuple[BenchCase, ...]:
    """The cases that are asked for by name, or by a part of a name; without names, those that suit
    the device.

    Raises:
        ConfigError: nothing has such a name.
    """
    if not wanted:
        return CPU_CASES if device_type == "cpu" else CUDA_CASES
    cases = (*CUDA_CASES, *CPU_CASES)
    names = [case.name for case in cases]
    for part in wanted:
        if not any(part in name for name in names):
            raise ConfigError(
                f"--case {part!r} is no part of a case's name{did_you_mean(part, names) or '.'} "
                f"Cases: {', '.join(names)}"
            )
    return tuple(
        case
        for case, name in zip(cases, names, strict=True)
        # A full name means that case alone, also where it is a part of another name.
        if name in wanted or any(part in name for part in wanted if part not in names)
    )
