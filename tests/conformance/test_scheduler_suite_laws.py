"""The laws of the scheduler suite: texts, published faults as stories, other tellings."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jackfield.conformance.scheduler.laws import ALL_LAWS
from jackfield.conformance.scheduler.mutants import MUTANTS
from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.conformance.scheduler.replay import difference, told_again
from jackfield.conformance.scheduler.sight import Law
from jackfield.conformance.scheduler.suite import subject_of
from jackfield.conformance.scheduler.tale import Tale
from jackfield.conformance.scheduler.telling import OTHERWISE, TELLINGS, Telling
from jackfield.conformance.scheduler.world import (
    Abort,
    Arrive,
    Misfit,
    Operation,
    Step,
    Wish,
    World,
)
from jackfield.conformance.stateful.hunt import laws_of_table
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduler import ScheduledRequest, Scheduler, StepPlan
from jackfield.schedulers.queue_scheduler import QueueScheduler


class Strict:
    """Fails with the first law that is broken.

    Attributes:
        seen: what occurred, and how often.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def check(self, law: Law, holds: bool, message: Callable[[], str]) -> bool:
        assert holds, f"{law.name}: {message()}"
        return True

    def demand(self, law: Law, holds: bool, message: Callable[[], str]) -> None:
        self.check(law, holds, message)

    def covered(self, axis: str, value: str) -> None:
        self.seen[value] += 1

    def checked_failure(self) -> None:
        self.seen["failure"] += 1


def tell(
    scheduler: type[Scheduler], world: World, operations: Sequence[Operation]
) -> tuple[Tale, Counter[str]]:
    """Tell a story to its end, every law checked."""
    checker = Strict()
    tale = Tale(subject_of(scheduler), world, checker)
    for operation in operations:
        tale.perform(operation)
    tale.end()
    return tale, checker.seen


# What authors read.


def test_each_law_says_what_it_wants_in_a_sentence_or_two() -> None:
    assert len({law.name for law in ALL_LAWS}) == len(ALL_LAWS) >= 43
    assert len({law.title() for law in ALL_LAWS}) == len(ALL_LAWS)
    for law in ALL_LAWS:
        assert re.fullmatch(r"([SB]\d+_)?[a-z]+(_[a-z]+)*", law.name)
        assert law.title().endswith(".")
        assert len(law.title()) <= 120, law.name
        assert all(paragraph.endswith(".") for paragraph in law.paragraphs())


def test_every_law_is_the_first_to_notice_some_mutant(repository: Path) -> None:
    table = (repository / "docs" / "conformance" / "scheduler-mutants.md").read_text("utf-8")
    assert {law.name for law in ALL_LAWS} == set(laws_of_table(table).values())


@pytest.mark.parametrize(
    "invariant",
    [*range(1, 26), 30, 31, 33, 34, 35, 39, 40, 41, 42],
)
def test_each_invariant_of_a_scheduler_is_a_law(invariant: int) -> None:
    assert [law for law in ALL_LAWS if law.name.startswith(f"S{invariant}_")]


# Published faults, as stories.

PREEMPTS: list[Operation] = [
    Arrive(length=5, completion=9),
    Arrive(pattern=1, length=5, completion=9),
    Arrive(pattern=2, length=5, completion=9),
    *[Step()] * 12,
]
STORIES: dict[str, tuple[World, list[Operation], list[str]]] = {
    "B014: completions of one prompt are preempted without swap space": (
        World(num_blocks=8, groups=True, budget=6),
        [Arrive(length=4, completion=10, n=4), Arrive(length=2, completion=5), *[Step()] * 9],
        ["forked", "preempted"],
    ),
    "B016: a request that can never fit stands between two others": (
        World(max_model_len=30),
        [Arrive(length=4, completion=4), Misfit("long"), Arrive(length=4, completion=4)],
        [],
    ),
    "B017: a prompt is seven times as long as the budget": (
        World(budget=3, max_model_len=24, num_blocks=12),
        [Arrive(length=20, completion=2)],
        [],
    ),
    "B018: the policy lets a request go first, then give way to another": (
        World(num_blocks=7, wishful=True),
        [
            Arrive(length=5, completion=8),
            Step(),
            Arrive(pattern=1, length=5, completion=8),
            *[Step(Wish(order=(0,), victims=(0,)))] * 6,
        ],
        ["preempted"],
    ),
    "B019: victims are recomputed whole": (World(), PREEMPTS, ["preempted"]),
    "B019: victims are recomputed in chunks": (
        World(budget=4, chunk=2),
        PREEMPTS,
        ["preempted"],
    ),
    "B019: victims are swapped": (
        World(num_host_blocks=8, mode="swap"),
        PREEMPTS,
        ["preempted", "swapped out", "swapped in"],
    ),
    "B021: an id is used twice, and again when the first has ended": (
        World(),
        [Arrive(length=4, completion=6), Step(), Misfit("twice"), Step(abort=0, renew=True)],
        [],
    ),
    "B022: aborts of a waiting request, in mid prompt, while decoding, in flight": (
        World(budget=3, seats=3),
        [
            *[Arrive(length=5, completion=6)] * 5,
            Abort(4),
            Step(),
            Abort(0),
            *[Step()] * 3,
            Abort(0),
            Step(abort=0),
        ],
        [],
    ),
    "B022: abort of a swapped request": (
        World(num_host_blocks=8, mode="swap"),
        [*PREEMPTS[:3], *[Step()] * 7, Abort(2), Abort(1)],
        ["swapped out"],
    ),
    "B022: abort of a request whose blocks others share": (
        World(groups=True),
        [Arrive(length=5, completion=6, n=3), *[Step()] * 3, Abort(0), Step(), Abort(1)],
        ["forked"],
    ),
    "four completions diverge": (
        World(num_blocks=12, budget=8, groups=True, caching=True),
        [Arrive(length=5, completion=8, n=4)],
        ["forked"],
    ),
}


@pytest.mark.parametrize("scheduler", [QueueScheduler, PlainScheduler])
@pytest.mark.parametrize("story", STORIES)
def test_published_faults_do_not_show(scheduler: type[Scheduler], story: str) -> None:
    world, operations, occurs = STORIES[story]
    tale, seen = tell(scheduler, world, operations)
    assert not tale.live
    assert all(seen[one] for one in occurs), seen
    args = subject_of(scheduler), world, tale.operations
    assert difference(tale.log, told_again(*args, OTHERWISE)) is None


@pytest.mark.parametrize(
    ("mutant", "law", "story"),
    [
        ("leak_on_abort", "B8_no_leak", "B022: abort of a request whose blocks others share"),
        ("leak_on_abort_of_swapped", "B8_no_leak", "B022: abort of a swapped request"),
        ("resumed_with_prompt_only", "S16_resumption", "B019: victims are recomputed whole"),
        ("swap_in_reads_anothers_blocks", "B14_contents", "B019: victims are swapped"),
        ("swap_out_not_copied", "B14_contents", "B019: victims are swapped"),
        ("prompt_of_any_length_taken", "S10_arrivals", "B016: a request that can never fit "),
        ("id_in_use_taken", "S10_arrivals", "B021: an id is used twice"),
        ("old_plan_for_a_new_request", "errors", "B021: an id is used twice"),
        ("preempted_and_scheduled", "S20_not_both", "B018: the policy lets a request go first"),
        ("tail_written_while_shared", "B3_private", "four completions diverge"),
        ("fork_not_told", "forks", "four completions diverge"),
        ("chunk_off_by_one", "S3_shares", "B019: victims are recomputed in chunks"),
    ],
)
def test_the_same_stories_show_the_faults(mutant: str, law: str, story: str) -> None:
    (part,) = [one.part for one in MUTANTS if one.name == mutant]
    (name,) = [one for one in STORIES if one.startswith(story)]
    with pytest.raises(AssertionError, match=f"^{law}: "):
        tell(part, *STORIES[name][:2])


# What may differ between two tellings.


def test_another_telling_has_other_ids_tokens_and_times() -> None:
    told, other = Telling(), OTHERWISE
    arrive = Arrive(pattern=2, length=6, completion=5, stops=True)
    requests = [one.request(one.name(3), arrive, 6, 11, 3, one.start) for one in (told, other)]
    first, second = requests
    assert first.request_id != second.request_id
    assert other.name(4) < other.name(3)
    assert told.name(4) > told.name(3)
    assert (first.arrival_time, second.arrival_time) == (0.0, 4096.0)
    assert [one + 11 for one in first.prompt_token_ids] == second.prompt_token_ids
    assert [one + 11 for one in told.alone(first)] == other.alone(second)
    assert {one + 11 for one in first.stop_token_ids} == second.stop_token_ids


def test_logs_of_other_ids_are_told_in_the_usual_ones() -> None:
    other = Telling(renamed=True)

    def log(telling: Telling) -> list[object]:
        plan = StepPlan(
            3,
            (ScheduledRequest(telling.name(1), 0, 4, True),),
            preempted=(telling.name(12),),
            prefix_hits=((telling.name(1), 2),),
            clipped=(f"pause names {telling.name(0)!r}, which is not running",),
        )
        return [plan, ("finish", telling.name(1)), [(telling.name(2), "stop")], ("add", 3, 8)]

    assert [other.back(entry) for entry in log(other)] == log(Telling())
    assert log(other) != log(Telling())


def test_clocks_leap_while_a_telling_says_so() -> None:
    real = time.monotonic, time.time_ns
    with Telling(leaps=True).clocks():
        first, second = time.monotonic(), time.monotonic()
        assert second - first >= 1000.0
        assert time.time_ns() - time.time_ns() <= -(10**12)
    assert (time.monotonic, time.time_ns) == real
    with Telling().clocks():
        assert (time.monotonic, time.time_ns) == real


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        ("slow_steps_admit_nobody", "S35_clock"),
        ("absolute_time_matters", "S39_shift"),
        ("batch_in_order_of_ids", "S39_names"),
        ("batch_in_order_of_tokens", "token_values"),
    ],
)
def test_one_difference_at_a_time_shows_what_matters(mutant: str, law: str) -> None:
    (part,) = [one.part for one in MUTANTS if one.name == mutant]
    world = World(budget=3, seats=3)
    arrivals = [Arrive(pattern, 3, 6, later=pattern == 2) for pattern in (0, 1, 2, 1)]
    tale, _ = tell(part, world, [*arrivals, Step(), Step(), Arrive(1, 2, 6)])
    args = subject_of(part), world, tale.operations
    differing = [
        one.name
        for one, telling in TELLINGS.items()
        if difference(tale.log, told_again(*args, telling)) is not None
    ]
    assert differing == [law]


def test_a_request_is_a_completion_of_its_own() -> None:
    request = Telling().request("r0", Arrive(n=3), 4, 9, 0, 0.0)
    assert isinstance(request, Request)
    assert request.params == SamplingParams(n=3)
    assert request.output_token_ids == []
