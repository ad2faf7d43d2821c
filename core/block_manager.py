"""The block manager contract: who owns which block of the KV cache.

A block manager owns ids, not tensors. Every operation is all-or-nothing: one that cannot be done
changes nothing at all. Equal sequences of calls give equal block ids, in any process. Every
operation costs time in proportion to the blocks it touches.

**Two pools.** Device blocks have the ids 0 to ``num_blocks - 1``, host blocks (swap space) 0 to
``num_host_blocks - 1``. A request holds blocks of one pool at a time. A device block is *used* (at
least one request holds it), *cached* (nobody holds it, but a prefix hit could revive it) or *free*;
cached and free blocks are *available*.

**Sharing.** With prefix caching, full blocks whose tokens are computed are shared by all requests
that begin with the same tokens under the same salt. After ``fork`` the blocks of two requests are
the same until one of them is about to write: ``append`` then gives it a copy (copy-on-write).
A block that is not full, or not computed, is otherwise held by one request only. An implementation
identifies shared blocks in a way that no client can make collide: by comparing tokens, or by a
cryptographic hash of parent, tokens and salt.

**Copies** that the methods return take effect in the order of the calls, and before the step
writes any key: a block may be handed to another request as soon as a call has returned.

**Powers.** Prefix caching, forks, swap space and lookahead are optional: a manager that has them
says so in ``powers``. One that has not refuses the calls, and a configuration that asks for them,
by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .block_manager_config import BlockManagerConfig as BlockManagerConfig
from .errors import UnsupportedError
from .options import NoOptions, PartOptions

BlockTable = NDArray[np.int32]


class AllocationStatus(Enum):
    """Whether a request can get its blocks."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True)
class BlockCopy:
    """Contents of one block to be copied to another before the step's keys are written.

    Copies of ``append`` and ``Allocation`` stay on the device. Those of ``swap_out`` have a device
    block as source and a host block as destination, those of ``swap_in`` the reverse.
    """

    source: int
    destination: int


@dataclass(frozen=True)
class Allocation:
    """What an admission got.

    Attributes:
        num_cached_tokens: leading tokens whose keys and values are in the cache already; always
            less than the request's tokens, so that something is left to compute.
        copies: block copies to be done first. A prompt that is cached whole gets a private copy
            of its last block, because its last token is computed anew. If nobody holds that block
            and no other is left, the request gets the block itself, which is evicted: no copy,
            and it can be found no more until the request's next commit.
    """

    num_cached_tokens: int = 0
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True)
class BlockUsage:
    """How the blocks stand. ``used + cached + free == total``.

    Attributes:
        total: all device blocks.
        used: device blocks of live requests, a shared one counted once.
        cached: device blocks of no live request that a prefix hit could revive; they count as
            available.
        free: device blocks that hold nothing.
        host_total: all host blocks.
        host_used: host blocks of swapped requests.
    """

    total: int
    used: int
    cached: int
    free: int
    host_total: int = 0
    host_used: int = 0

    @property
    def available(self) -> int:
        """Device blocks that a request could get."""
        return self.cached + self.free

    @property
    def fraction(self) -> float:
        """Share of the device blocks that live requests use, 0 to 1."""
        return self.used / self.total


@dataclass(frozen=True)
class PrefixStats:
    """What prefix caching has saved since the start, counted from admissions only.

    Attributes:
        num_queried_tokens: tokens of all requests that were admitted, one admitted again after a
            preemption counted again.
        num_hit_tokens: those of them that were found in the cache.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were found in the cache, 0 to 1; 0 before any admission."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


#: Powers that a setting asks for.
_POWER_OF_SETTING = {
    "enable_prefix_caching": "prefix_caching",
    "num_host_blocks": "swap",
    "num_lookahead_tokens": "lookahead",
}


def check_num_tokens(token_ids: Sequence[int], num_tokens: int) -> None:
    """Refuse to admit a request with more tokens than it has, or none.

    Raises:
        ValueError: ``num_tokens`` is out of range.
    """
    if not 1 <= num_tokens <= len(token_ids):
        raise ValueError(
            f"num_tokens={num_tokens} must be at least 1 and at most {len(token_ids)}, "
            "the tokens of the request"
        )


class BlockManager(ABC):
    """Hands out the blocks of one KV cache.

    The life of a request: ``allocate`` once when it is admitted; ``append`` before each step that
    needs more slots, and before the first step after a ``fork`` that it took part in; ``commit``
    after each step; ``free`` at the end or at preemption. In between it may be swapped out and in.

    ``salt`` is a keyword of the methods that look for prefixes. Requests with different salts never
    share a block (the fork of a request has the same salt). Callers pass it only to a manager with
    the power "prefix_caching"; no other shares anything.

    Raises:
        UnsupportedError: the configuration asks for a power that the manager lacks.
    """

    name: ClassVar[str]
    Options: ClassVar[type[PartOptions]] = NoOptions
    #: Optional operations that work: "prefix_caching", "fork", "swap", "lookahead".
    powers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: BlockManagerConfig, options: PartOptions | None = None) -> None:
        lacking = [
            f"{setting}={getattr(config, setting)} needs the power {power!r}, which is not among "
            f"its optional powers ({self._describe_powers()})"
            for setting, power in _POWER_OF_SETTING.items()
            if getattr(config, setting) and power not in self.powers
        ]
        if lacking:
            raise UnsupportedError(f"block manager {self.name!r}", lacking)
        self.config = config
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def can_allocate(
        self, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> AllocationStatus:
        """Whether a new request could be admitted now. A probe: it changes nothing.

        Args:
            token_ids: all tokens of the request (for prefix hits).
            num_tokens: leading tokens that need slots now: ``1 <= num_tokens <= len(token_ids)``.
            salt: see the class.

        Returns:
            OK if ``allocate`` with the same arguments succeeds, NEVER if it would fail on an
            empty pool too, else LATER.

        Raises:
            ValueError: ``num_tokens`` is out of range.
        """

    @abstractmethod
    def allocate(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, salt: str = ""
    ) -> Allocation | None:
        """Admit a request: give it slots for its first ``num_tokens`` tokens.

        Cached tokens count among them: a hit covers at most ``num_tokens`` tokens, and never the
        last token of the request. The watermark is kept here and only here, and only beside other
        requests: one that needs nearly all blocks would otherwise wait for ever.

        Returns:
            None, and nothing has changed, if there is no room.

        Raises:
            ValueError: the request has blocks already (of either pool), or ``num_tokens`` is out
                of range.
        """

    @abstractmethod
    def append(self, request_id: str, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make sure that the request can write its slots up to ``num_tokens`` tokens in all.

        It gets the blocks that are missing, and private copies of the blocks from the first that
        is not full of committed tokens on, up to that number, as far as other requests hold them
        (after a fork). Of two holders the first to append gets the copy, the last needs none.

        Returns:
            Copies to be done before the step, one for each replaced block; None, and nothing has
            changed, if there is no room.

        Raises:
            KeyError: the request holds no device blocks.
        """

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Take note that the first ``num_computed_tokens`` tokens are in the cache.

        A manager with prefix caching makes the full blocks among them shareable, those of
        generated tokens too; one with forks needs the number for ``append``. The block table stays
        what it is.

        Args:
            request_id: holds device blocks.
            token_ids: all tokens of the request; those committed before are unchanged.
            num_computed_tokens: never less than at the commit before, or than what was cached at
                the admission.
        """

    def match_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        """How many leading tokens an admission of these tokens would find in the cache now.

        A probe: it changes nothing, neither the order of eviction nor statistics. At most
        ``len(token_ids) - 1``, and else a multiple of the block size.
        """
        return 0

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, of either pool; one without blocks is left alone.

        Blocks that other requests hold stay theirs; computed full blocks stay in the prefix cache.
        """

    @abstractmethod
    def block_table(self, request_id: str) -> BlockTable:
        """Physical block ids in logical order, int32, read-only; valid until the next change.

        A request's entries stay what they are while it holds blocks, except where a ``BlockCopy``
        that ``append`` returned says otherwise, and after it was swapped in. There may be more
        entries than its tokens need.

        Raises:
            KeyError: the request holds no device blocks.
        """

    @abstractmethod
    def usage(self) -> BlockUsage:
        """How the blocks stand; constant time."""

    @abstractmethod
    def largest_request(self) -> int:
        """Most tokens that a single request can have when it is alone."""

    def reclaimable(self, request_id: str) -> int:
        """How many more device blocks would be available if the request gave up its own: those
        that no other request holds. The default is right where nothing is shared.

        Raises:
            KeyError: the request holds no blocks.
        """
        return 0 if self.is_swapped(request_id) else len(self.block_table(request_id))

    def prefix_stats(self) -> PrefixStats:
        """What prefix caching has saved; constant time, zeros without prefix caching."""
        return PrefixStats()

    def fork(self, parent_id: str, child_id: str) -> None:
        """Let a new request share the blocks of another, its last one included.

        The child stands where the parent stands: same tokens, same commits, same salt. Both append
        before they write again.

        Raises:
            KeyError: the parent holds no device blocks.
            ValueError: the child has blocks already.
            UnsupportedError: no power "fork".
        """
        raise self._refusal("fork")

    def is_swapped(self, request_id: str) -> bool:
        """Whether the request holds host blocks."""
        return False

    def swap_out(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        """Move a request to host memory. Its device blocks are given up as by ``free``.

        A swapped request has no block table and keeps its host blocks until ``swap_in`` or
        ``free``.

        Returns:
            Copies from device blocks to host blocks, in logical order; None, and nothing has
            changed, if too few host blocks are free.

        Raises:
            KeyError: the request holds no device blocks.
            UnsupportedError: no power "swap".
        """
        raise self._refusal("swap")

    def swap_in(self, request_id: str) -> tuple[BlockCopy, ...] | None:
        """Move a request back. It has as many blocks as before, none of them shared.

        Returns:
            Copies from host blocks to device blocks, in logical order; None, and nothing has
            changed, if too few device blocks are available.

        Raises:
            KeyError: the request is not swapped.
            UnsupportedError: no power "swap".
        """
        raise self._refusal("swap")

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing has changed, while requests hold blocks.

        Host blocks count too: what they hold would be shared again after ``swap_in``.

        Raises:
            UnsupportedError: no power "prefix_caching".
        """
        raise self._refusal("prefix_caching")

    def _refusal(self, power: str) -> UnsupportedError:
        return UnsupportedError(
            f"block manager {self.name!r}",
            [f"{power} is not supported (its optional powers: {self._describe_powers()})"],
        )

    @classmethod
    def _describe_powers(cls) -> str:
        return ", ".join(sorted(cls.powers)) or "none"
