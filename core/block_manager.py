"""The block manager contract: who owns which block of the KV cache.

A block manager owns ids, not tensors. Every operation is all-or-nothing: one that cannot be done
changes nothing at all. Equal sequences of calls give equal block ids.

Sharing of full blocks between requests with a common prefix (prefix caching), forks with
copy-on-write and swap space are optional powers: a manager that has them says so in ``powers``,
one that has not refuses the call by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .errors import UnsupportedError
from .options import NoOptions, PartOptions

BlockTable = NDArray[np.int32]


class AllocationStatus(Enum):
    """Whether a request can get its blocks."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True)
class BlockManagerConfig:
    """What every block manager is built from.

    Attributes:
        num_blocks: physical blocks, ids 0 to num_blocks - 1.
        block_size: tokens a block holds.
        max_model_len: most tokens that one request can ever have.
        watermark: share of the blocks that admissions leave free, so that running requests can
            grow; running requests may use them.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    watermark: float = 0.01


@dataclass(frozen=True)
class BlockCopy:
    """Contents of one block to be copied to another before the step's keys are written."""

    source: int
    destination: int


@dataclass(frozen=True)
class Allocation:
    """What an admission got.

    Attributes:
        num_cached_tokens: leading tokens whose keys and values are in the cache already; always
            less than the request's tokens, so that something is left to compute.
        copies: block copies to be done first.
    """

    num_cached_tokens: int = 0
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True)
class BlockUsage:
    """How the blocks stand. ``used + cached + free == total``.

    Attributes:
        total: all blocks.
        used: blocks of live requests.
        cached: blocks of no live request that a prefix hit could revive; they count as available.
        free: blocks that hold nothing.
    """

    total: int
    used: int
    cached: int
    free: int

    @property
    def fraction(self) -> float:
        """Share of the blocks that live requests use, 0 to 1."""
        return self.used / self.total


class BlockManager(ABC):
    """Hands out the blocks of one KV cache.

    The life of a request: ``allocate`` once when it is admitted, ``append`` before each step that
    needs more slots, ``commit`` after each step, ``free`` at the end or at preemption.
    """

    name: ClassVar[str]
    Options: ClassVar[type[PartOptions]] = NoOptions
    #: Optional operations that work: "prefix_caching", "fork", "swap".
    powers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        self.config = config
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def can_allocate(self, token_ids: Sequence[int], num_tokens: int) -> AllocationStatus:
        """Whether a new request could be admitted now.

        Args:
            token_ids: all tokens of the request (for prefix hits).
            num_tokens: leading tokens that need slots now: ``1 <= num_tokens <= len(token_ids)``.

        Returns:
            OK if ``allocate`` with the same arguments succeeds, NEVER if it would fail on an
            empty pool too.
        """

    @abstractmethod
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int
    ) -> Allocation | None:
        """Admit a request: give it slots for its first ``num_tokens`` tokens.

        Cached tokens count among them. The watermark is kept here and only here.

        Returns:
            None, and nothing has changed, if there is no room.

        Raises:
            ValueError: the request has blocks already, or ``num_tokens`` is out of range.
        """

    @abstractmethod
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make sure that the request has slots for ``num_tokens`` tokens in all.

        Returns:
            Copies to be done before the step; None, and nothing has changed, if there is no room.

        Raises:
            KeyError: the request has no blocks.
        """

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Take note that the first ``num_computed_tokens`` tokens are in the cache.

        A manager with prefix caching makes the full blocks among them shareable.
        """

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens are cached. A probe: it changes nothing, not even statistics."""
        return 0

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Give back all blocks of a request; a request without blocks is left alone."""

    @abstractmethod
    def block_table(self, request_id: str) -> BlockTable:
        """Physical block ids in logical order, int32, read-only; valid until the next change.

        A request's entries stay what they are while it holds blocks, except where a ``BlockCopy``
        that ``append`` returned says otherwise.

        Raises:
            KeyError: the request has no blocks.
        """

    @abstractmethod
    def usage(self) -> BlockUsage:
        """How the blocks stand; constant time."""

    @abstractmethod
    def largest_request(self) -> int:
        """Most tokens that a single request can have when it is alone."""

    def fork(self, parent_id: str, child_id: str) -> None:
        """Let a new request share the blocks of another, to diverge by copy-on-write."""
        raise self._refusal("fork")

    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        """Move a request to host memory: copies from device blocks to host blocks."""
        raise self._refusal("swap")

    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        """Move a request back: copies from host blocks to device blocks."""
        raise self._refusal("swap")

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing has changed, while requests hold blocks."""
        raise self._refusal("prefix_caching")

    def _refusal(self, power: str) -> UnsupportedError:
        has = ", ".join(sorted(self.powers)) or "none"
        return UnsupportedError(
            f"block manager {self.name!r}",
            [f"{power} is not supported (its optional powers: {has})"],
        )
