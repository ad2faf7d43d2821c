"""The laws of a scheduler, in the words that its author reads.

The numbers are those of the list of invariants that the suite follows; a law without one is about
how the contract is spoken. Not here are promises of single policies (S26 to S29, S32), of wake-ups
(S36), of simulators (S37), and of saved states (S38), none of which the contract of schedulers has.
"""

from __future__ import annotations

from ..stateful.laws import StatefulLaw

#: Stands among a subject's powers if its policy is first come, first served.
FCFS = "fcfs"


class Errors(StatefulLaw):
    """Right calls raise nothing, and wrong calls raise the error that the contract names.

    ``update`` without the token of a request that samples raises ``ValueError``. ``finish`` of a
    request that is not live says False.
    """

    name = "errors"


class Told(StatefulLaw):
    """The policy is told once of each preemption, each end and each request's progress."""

    name = "policy_told"


class Budget(StatefulLaw):
    """The tokens of a step are at most ``max_num_batched_tokens``."""

    name = "S1_budget"


class Seats(StatefulLaw):
    """At most ``max_num_seqs`` requests hold device blocks or count as running."""

    name = "S2_seats"


class Shares(StatefulLaw):
    """A scheduled request gets at least one token, and no more than it has left or its chunk.

    The chunk is ``long_prefill_token_threshold``. Without ``enable_chunked_prefill`` a prompt is
    computed whole, unless a preempted request has grown past ``max_num_batched_tokens``.
    """

    name = "S3_shares"


class States(StatefulLaw):
    """Every live request is in one state: ``stats`` adds up to them, and ``get`` finds each."""

    name = "S4_states"


class Transitions(StatefulLaw):
    """The blocks of a request move only as a plan says: by preemption, swap or admission.

    A preempted request has none, or host blocks if it is among ``swapped_out``; one of
    ``swapped_in`` has device blocks again. A paused request keeps its own. Calls other than
    ``schedule`` move nothing, but ``update`` may fork.
    """

    name = "S6_transitions"


class Once(StatefulLaw):
    """No request is scheduled twice in a step, and only live ones are."""

    name = "S5_once"


class Chunks(StatefulLaw):
    """Shares follow each other without a gap: each begins where the last one ended.

    The first begins at the prefix hit, and one after a preemption at nothing, or where a swapped
    request stood.
    """

    name = "S7_chunks"


class Computed(StatefulLaw):
    """``num_computed_tokens`` stays below the known tokens, and falls by preemption only."""

    name = "S8_computed"


class Sampling(StatefulLaw):
    """A step samples for a request exactly if it computes its last known token."""

    name = "S9_sampling"


class Arrivals(StatefulLaw):
    """What can never be served is refused on arrival, and what fits is taken.

    Too many tokens for ``max_model_len``, for the cache or, without chunked prefill, for a step; an
    id that is in use; a refusal by the policy: all raise ``RequestError`` and change nothing.
    """

    name = "S10_arrivals"


class Endings(StatefulLaw):
    """A request ends at its stop token or its last token, not before and not after.

    ``update`` names exactly those that ended, with the reason.
    """

    name = "S11_endings"


class LastToken(StatefulLaw):
    """A prefix hit never covers the last token of a request: something is left to compute."""

    name = "S12_last_token"
    power = "prefix_caching"


class Impossible(StatefulLaw):
    """What a policy proposes and cannot have is reported, or raises under ``strict_policy``.

    Only running requests are preempted or paused, only swapped ones brought back.
    """

    name = "S13_impossible"


class Clipping(StatefulLaw):
    """A plan is at most what was proposed: budgets, chunk sizes, orders, pauses, admissions.

    A proposal that leaves nothing to run may be set aside, if the plan says so.
    """

    name = "S14_clipping"


class Slots(StatefulLaw):
    """A scheduled request has blocks for all its tokens up to the end of its share."""

    name = "S15_slots"


class Resumption(StatefulLaw):
    """A request emits the tokens that it would have emitted alone, preempted or not."""

    name = "S16_resumption"


class Release(StatefulLaw):
    """A victim gives up its blocks at once; only a swapped one keeps its progress."""

    name = "S17_release"


class Victims(StatefulLaw):
    """Who gives way is whom the policy named, as long as it names anybody of use.

    The candidates are the requests that hold blocks, the beneficiary among them; a victim is live
    and loses its blocks once in a step.
    """

    name = "S18_victims"


class Gain(StatefulLaw):
    """A preemption for want of blocks makes blocks available, if any victim could."""

    name = "S19_gain"


class NotBoth(StatefulLaw):
    """Nobody is preempted and scheduled in one step.

    Under first come, first served a step that preempts for want of blocks admits nobody.
    """

    name = "S20_not_both"


class SwapSpace(StatefulLaw):
    """In mode ``swap`` a victim is swapped if host memory has room, else it is recomputed."""

    name = "S21_swap_space"
    power = "swap"


class Storm(StatefulLaw):
    """Between two events, first come, first served preempts at most as often as requests live.

    An event is an arrival or an end.
    """

    name = "S22_storm"
    power = FCFS


class Progress(StatefulLaw):
    """A plan is empty only if nothing is live, or the policy preempted in this very step."""

    name = "S23_progress"


class Drain(StatefulLaw):
    """After the last arrival every request ends within a known number of steps.

    At worst each token takes a step, and each preemption repeats the tokens of a request.
    """

    name = "S24_drain"


class Order(StatefulLaw):
    """Under first come, first served nobody starts before one who came earlier.

    Nor before one that was preempted and waits.
    """

    name = "S25_order"
    power = FCFS


class Conservation(StatefulLaw):
    """Under first come, first served no waiting request is left out that could be admitted.

    With tokens of the budget left, a free seat, and room for whoever waits, somebody is admitted.
    """

    name = "S30_conservation"
    power = FCFS


class Decodes(StatefulLaw):
    """Under first come, first served every decoding request gets its token in every step.

    As long as ``max_num_batched_tokens`` is not below ``max_num_seqs``.
    """

    name = "S31_decodes"
    power = FCFS


class Ties(StatefulLaw):
    """Requests that arrived at the same time start in the order in which they were added."""

    name = "S33_ties"
    power = FCFS


class Determinism(StatefulLaw):
    """The same calls lead to the same plans on every new scheduler."""

    name = "S34_determinism"


class Processes(StatefulLaw):
    """The same calls lead to the same plans in any process.

    Tried in new processes with other values of ``PYTHONHASHSEED``.
    """

    name = "S34_processes"


class Clock(StatefulLaw):
    """The machine's clock changes no plan: a scheduler knows the time from ``now`` alone.

    Tried by telling a story again while every reading of the module ``time`` leaps forward.
    """

    name = "S35_clock"


class Shift(StatefulLaw):
    """Shifting all times by the same amount changes no plan."""

    name = "S39_shift"


class Names(StatefulLaw):
    """Other request ids lead to the same plans: only the order of arrival counts."""

    name = "S39_names"


class Views(StatefulLaw):
    """Views are read-only, and looking through them changes nothing, statistics included."""

    name = "S40_views"


class Accounting(StatefulLaw):
    """Preemptions, swaps and cached tokens are counted as they happen.

    ``stats`` counts the preemptions and swaps of all plans, ``num_preemptions`` those of a request,
    and ``num_cached_tokens`` is its prefix hit when it was first admitted.
    """

    name = "S41_accounting"


class Failures(StatefulLaw):
    """An exception in the policy is attributed to it, and leaves everything consistent.

    It comes as ``PluginError`` with the policy's name, and the next step goes on.
    """

    name = "S42_failures"


class Tokens(StatefulLaw):
    """Other values of the tokens lead to the same plans: decisions depend on counts.

    The values are exchanged one for one, so the same prefixes are found in the cache.
    """

    name = "token_values"


class Forks(StatefulLaw):
    """Each fork is told in the next plan, once, and joins completions of one prompt.

    Blocks that a request got outside of ``schedule`` came from a fork.
    """

    name = "forks"
    power = "fork"


class Private(StatefulLaw):
    """A block that is written is held by one request alone."""

    name = "B3_private"


class NoLeak(StatefulLaw):
    """A request that ended holds no blocks, and when all have ended every block is available."""

    name = "B8_no_leak"


class Contents(StatefulLaw):
    """Read through its block table, a request finds its own keys and values, always.

    The suite does the moves of each plan in their order, then writes each share, as a runner does.
    """

    name = "B14_contents"


#: Every law, in the order of reports.
ALL_LAWS: tuple[type[StatefulLaw], ...] = (
    Errors,
    Told,
    Budget,
    Seats,
    Shares,
    States,
    Transitions,
    Once,
    Chunks,
    Computed,
    Sampling,
    Arrivals,
    Endings,
    LastToken,
    Impossible,
    Clipping,
    Slots,
    Resumption,
    Release,
    Victims,
    Gain,
    NotBoth,
    SwapSpace,
    Storm,
    Progress,
    Drain,
    Order,
    Conservation,
    Decodes,
    Ties,
    Determinism,
    Processes,
    Clock,
    Shift,
    Names,
    Views,
    Accounting,
    Failures,
    Tokens,
    Forks,
    Private,
    NoLeak,
    Contents,
)
