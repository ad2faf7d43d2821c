"""The laws of a block manager, in the words that its author reads.

The numbers are those of the list of invariants that the suite follows; a law without one is about
how the contract is spoken rather than about blocks.
"""

from __future__ import annotations

from ..stateful.laws import StatefulLaw


class Refusals(StatefulLaw):
    """What is not declared is refused by name.

    A method of a power that is not in ``powers`` raises ``UnsupportedError`` with the power in its
    message, and so does the constructor for a configuration that asks for it. Nothing changes.
    """

    name = "refusals"


class Errors(StatefulLaw):
    """Wrong calls raise the error that the contract names, and right calls raise nothing.

    ``ValueError`` for a request that has blocks already and for ``num_tokens`` out of range,
    ``KeyError`` for a request that holds none of the blocks that the method is about.
    """

    name = "errors"


class TableView(StatefulLaw):
    """A block table is a one-dimensional, read-only int32 array that stays what it is.

    It is valid until the next change: neither a probe, nor a call that was refused, nor asking for
    the table of another request alters what the caller holds. The request's entries themselves
    stay for as long as it holds blocks, except where a copy of ``append`` replaces one.
    """

    name = "table_view"


class LargestRequest(StatefulLaw):
    """A request that is alone can have exactly ``largest_request()`` tokens.

    It is admitted with as many, or grows to as many by ``append``; one with more, as far as
    ``max_model_len`` allows more, is answered NEVER.
    """

    name = "largest_request"


class Partition(StatefulLaw):
    """``used + cached + free`` is ``total`` after every call, and none of them is negative.

    ``total`` is ``num_blocks`` and ``host_total`` is ``num_host_blocks``. Without prefix caching
    nothing is cached.
    """

    name = "B1_partition"


class Holders(StatefulLaw):
    """``used`` is the number of blocks that stand in some block table, a shared one counted once.

    Every entry is the id of a device block, no table names one twice, and a block that is handed
    out anew belonged to nobody. So no block is freed while a request still holds it.
    """

    name = "B2_holders"


class Sharing(StatefulLaw):
    """Two requests share a block only if it is full, computed, and stands for the same tokens.

    All tokens from the beginning count, not only those of the block: keys and values depend on
    everything before. Blocks shared by a fork are the exception until one of the two writes.
    """

    name = "B3_sharing"
    power = "prefix_caching"


class PrivateTail(StatefulLaw):
    """A slot that is about to be written lies in a block that one request alone holds.

    That is so after ``allocate`` and ``append``, for all slots up to ``num_tokens`` and the
    lookahead slots behind them. A block that is not full, or not committed, is never found as a
    prefix.
    """

    name = "B4_private_tail"


class Slots(StatefulLaw):
    """A request has slots for all tokens that it was promised, and for the lookahead.

    Its table has at least ``config.blocks_for(num_tokens)`` entries. ``append`` for what it has
    already, with nothing shared, changes nothing.
    """

    name = "B5_slots"


class AllOrNothing(StatefulLaw):
    """A call that is refused changes nothing at all.

    Neither usage, nor a table, nor what ``match_prefix`` finds; and what is called afterwards
    gives the same block ids as if the refused call had never been made, so that the order of the
    free list and of eviction is the same too.
    """

    name = "B6_all_or_nothing"


class Watermark(StatefulLaw):
    """An admission beside other requests leaves ``watermark_blocks`` available; growth need not.

    A request that grows gets its blocks as long as enough are available.
    """

    name = "B7_watermark"


class NoLeak(StatefulLaw):
    """When all requests have gone, every block of both pools can be handed out again.

    The suite does not believe the counts alone: it fills both pools and compares with a new
    manager.
    """

    name = "B8_no_leak"


class FreeAgain(StatefulLaw):
    """To free a request that has no blocks changes nothing."""

    name = "B9_free_again"


class Evicted(StatefulLaw):
    """What was handed to somebody else is no longer found.

    ``match_prefix`` and ``allocate`` promise only blocks that hold the keys and values of exactly
    these tokens: committed, and not reused since.
    """

    name = "B10_evicted"
    power = "prefix_caching"


class PrefixHits(StatefulLaw):
    """A hit is the longest cached prefix, and an admission gets what the probe promises.

    It is a multiple of the block size, but for a prompt that is cached whole. Blocks that a live
    request committed are found, and so are those of a freed one until they are reused.
    ``allocate`` reports what ``match_prefix`` found, as far as ``num_tokens`` reaches.
    """

    name = "B11_prefix_hits"
    power = "prefix_caching"


class LastToken(StatefulLaw):
    """A hit never covers the last token of a request, since something must be left to compute."""

    name = "S12_last_token"
    power = "prefix_caching"


class Probes(StatefulLaw):
    """``can_allocate``, ``match_prefix`` and all methods that only tell something change nothing.

    Neither what can be seen, nor the order of eviction, nor statistics: the same calls without
    the probes give the same block ids.
    """

    name = "B12_probes"


class Eviction(StatefulLaw):
    """Cached blocks are evicted only for want of free ones, and children before parents.

    ``cached`` counts the blocks that a hit could revive: a block whose parent is gone can never
    be found again and is not one of them.
    """

    name = "B13_eviction"
    power = "prefix_caching"


class Contents(StatefulLaw):
    """Read through its block table, a request finds its own keys and values, always.

    The suite writes as the engine does: copies first, in the order of the calls, then each new
    token into its slot. A key stands for its token, all tokens before it, and the salt.
    """

    name = "B14_contents"


class CanAllocate(StatefulLaw):
    """``can_allocate`` says what ``allocate`` does.

    OK: it succeeds. LATER: it is refused, but would succeed on an empty pool. NEVER: it would be
    refused there too. While no request holds device blocks the answer is never LATER, and a
    request for which enough blocks are available besides the watermark is admitted, cached
    prefix or not.
    """

    name = "B15_can_allocate"


class Swap(StatefulLaw):
    """Swapping out and in moves every block of a request, and nothing else.

    One copy for each entry of the table, in logical order, to host blocks that belong to nobody,
    and back to device blocks that belong to nobody. It works whenever enough blocks are there.
    ``host_used`` counts the host blocks of swapped requests.
    """

    name = "B16_swap"
    power = "swap"


class Fork(StatefulLaw):
    """A fork has the table of its parent, uses no block more, and is free to diverge.

    ``append`` copies what both still hold and one is about to write: one ``BlockCopy`` for each
    replaced entry, from the old block to the new one. Freeing one leaves the other intact.
    """

    name = "B17_fork"
    power = "fork"


class Reset(StatefulLaw):
    """``reset_prefix_cache`` forgets everything, or says False while any request holds blocks.

    Requests that are swapped out count. Afterwards nothing is cached and nothing is found.
    """

    name = "B18_reset"
    power = "prefix_caching"


class Accounting(StatefulLaw):
    """Statistics count admissions: tokens of the admitted requests, and those found in the cache.

    A probe, a refused admission, ``append`` and a swap count nothing; without prefix caching both
    numbers are 0.
    """

    name = "B19_accounting"


class Reclaimable(StatefulLaw):
    """``reclaimable`` is by how much ``available`` grows when the request gives up its blocks."""

    name = "B20_reclaimable"


class Salt(StatefulLaw):
    """Requests with different salts never share a block, whatever their tokens."""

    name = "B23_salt"
    power = "prefix_caching"


class Determinism(StatefulLaw):
    """The same calls give the same block ids and answers, on every new manager."""

    name = "B24_determinism"


class Processes(StatefulLaw):
    """The same calls give the same block ids and answers in any process.

    Tried in new processes with other values of ``PYTHONHASHSEED``, which changes the order of sets
    and the hash of text.
    """

    name = "B24_processes"


#: Every law, in the order of reports.
ALL_LAWS: tuple[type[StatefulLaw], ...] = (
    Refusals,
    Errors,
    TableView,
    LargestRequest,
    Partition,
    Holders,
    Sharing,
    PrivateTail,
    Slots,
    AllOrNothing,
    Watermark,
    NoLeak,
    FreeAgain,
    Evicted,
    PrefixHits,
    LastToken,
    Probes,
    Eviction,
    Contents,
    CanAllocate,
    Swap,
    Fork,
    Reset,
    Accounting,
    Reclaimable,
    Salt,
    Determinism,
    Processes,
)
