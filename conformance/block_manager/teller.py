"""Makes the calls of a story, and checks after each what can be seen of the manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...core.block_manager import BlockManager, BlockManagerConfig, BlockUsage, PrefixStats
from ..stateful.laws import LawBroken, StatefulLaw
from ..stateful.search import LawMachine
from . import laws
from .calls import Call, Made, Outcome, Subject, make
from .model import Cached, LiveRequest, Memory, Prefixes
from .script import UNCHANGED, story_script, story_text

#: Prompts whose prefix is looked for after every call.
MAX_PROMPTS = 5


@dataclass(frozen=True)
class Seen:
    """Everything that can be seen of a manager without changing it.

    Attributes:
        usage, stats: what it says.
        tables: request to block table, for those on the device.
        swapped: requests on the host.
        hits: what ``match_prefix`` says of the remembered prompts.
        admits: what ``can_allocate`` says of them.
    """

    usage: BlockUsage
    stats: PrefixStats
    tables: dict[str, tuple[int, ...]]
    swapped: tuple[str, ...]
    hits: tuple[int, ...]
    admits: tuple[object, ...]

    def difference(self, other: Seen) -> str:
        """What differs, in words; "" if nothing does."""
        pairs = [
            ("usage()", self.usage, other.usage),
            ("prefix_stats()", self.stats, other.stats),
            ("the block tables", self.tables, other.tables),
            ("the swapped requests", self.swapped, other.swapped),
            # Prompts may have been added in between.
            ("match_prefix of the prompts so far", *_common(self.hits, other.hits)),
            ("can_allocate of the prompts so far", *_common(self.admits, other.admits)),
        ]
        return "; ".join(
            f"{what} was {before}, is {after}" for what, before, after in pairs if before != after
        )


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, Any]:
    count = min(len(one), len(other))
    return one[:count], other[:count]


class StoryTeller(LawMachine):
    """The part of the machine that every rule stands on; a subclass has the rules.

    Class attributes:
        subject: the manager class under test.
    """

    subject: ClassVar[Subject]

    def begin(self, config: BlockManagerConfig) -> None:
        """Start a story in this world."""
        self.config = config
        self.caching = config.enable_prefix_caching
        self.story: list[Made] = []
        self.live: dict[str, LiveRequest] = {}
        self.prompts: list[tuple[tuple[int, ...], str]] = []
        self.numbering = Prefixes()
        self.cached = Cached()
        self.memory = Memory(config.num_blocks, config.num_host_blocks, config.block_size)
        self.queried = 0
        self.hit = 0
        self.num_requests = 0
        self.manager = self.new_manager()
        self.seen = self.look()
        self.inspect()

    def new_manager(self) -> BlockManager:
        """A manager for the world of this story."""
        try:
            return self.subject.build(self.config)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self.demand(laws.Errors, False, lambda: f"the constructor raised {said}")
            raise AssertionError("a manager that cannot be built has no story") from error

    # What a story is, for ``LawMachine``.

    def text(self) -> str:
        """The calls so far, in words."""
        return story_text(self.config, self.story)

    def script(self, broken: LawBroken) -> str:
        """The calls so far as a Python file."""
        return story_script(self.subject, self.config, self.story, self.prompts, broken)

    def size(self) -> tuple[int, ...]:
        """Calls, then how much is written in them."""
        return len(self.story), len(self.text())

    # Calls.

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Outcome:
        """Make a call that belongs to the story."""
        call = Call(method, arguments, keywords)
        try:
            outcome = make(self.manager, call)
        except Exception as error:
            self.story.append(Made(call, Outcome(error=error)))
            said = f"{type(error).__name__}: {error}"
            self.demand(
                laws.Errors, False, lambda: f"block_table after {call.code()} raised {said}"
            )
            raise AssertionError("unreachable") from error
        self.story.append(Made(call, outcome))
        self.num_calls += 1
        self.covered("operation", method)
        return outcome

    def right_call(self, method: str, *arguments: Any, **keywords: Any) -> Outcome:
        """A call that has no reason to raise anything."""
        outcome = self.call(method, *arguments, **keywords)
        error = outcome.error
        self.demand(
            laws.Errors,
            error is None,
            lambda: f"{self.story[-1].call.code()} raised {type(error).__name__}: {error}",
        )
        return outcome

    def wrong_call(
        self, expected: type[Exception], method: str, *arguments: Any, **keywords: Any
    ) -> None:
        """A call that has to raise this, and to change nothing."""
        outcome = self.call(method, *arguments, **keywords)
        error, code = outcome.error, self.story[-1].call.code()
        self.demand(
            laws.Errors,
            isinstance(error, expected),
            lambda: (
                f"{code} must raise {expected.__name__}, but "
                + (f"raised {type(error).__name__}: {error}" if error else "raised nothing")
            ),
            lambda: [
                "try:",
                f"    {code}",
                f"except {expected.__name__}:",
                "    pass",
                "else:",
                f'    raise AssertionError("{expected.__name__} was not raised")',
            ],
        )
        self.unchanged(laws.AllOrNothing)

    def missing(self, method: str, *arguments: Any) -> None:
        """A call about blocks that the request does not hold."""
        if method == "block_table":
            return self._no_table(arguments[0])
        return self.wrong_call(KeyError, method, *arguments)

    def _no_table(self, name: str) -> None:
        table: object
        try:
            table = self.manager.block_table(name)
        except KeyError:
            self.checked.add(laws.Errors.name)
            return
        except Exception as error:
            table = error
        self.demand(
            laws.Errors,
            False,
            lambda: (
                f"block_table({name!r}) must raise KeyError, for it holds no device blocks; "
                f"it gave {table!r}"
            ),
            lambda: [
                "try:",
                f"    manager.block_table({name!r})",
                "except KeyError:",
                "    pass",
                "else:",
                '    raise AssertionError("KeyError was not raised")',
            ],
        )

    def ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Ask for something that is not worth telling in the story."""
        try:
            return getattr(self.manager, method)(*arguments, **keywords)
        except Exception as error:
            code = Call(method, arguments, keywords).code()
            said = f"{type(error).__name__}: {error}"
            self.demand(laws.Errors, False, lambda: f"{code} raised {said}", lambda: [code])
            raise AssertionError("unreachable") from error

    def salted(self, salt: str) -> dict[str, str]:
        """The keyword, for a manager that is to be given it."""
        return {"salt": salt} if salt and self.caching else {}

    # What is seen.

    def look(self) -> Seen:
        """Ask the manager for everything, and check what it says of each table."""
        views, tables = {}, {}
        for name, request in self.live.items():
            if not request.swapped:
                views[name] = self.ask("block_table", name)
                tables[name] = self._table(name, views[name])
        hits, admits = [], []
        for tokens, salt in self.prompts:
            keywords = self.salted(salt)
            hits.append(self.ask("match_prefix", tokens, **keywords))
            admits.append(self.ask("can_allocate", tokens, len(tokens), **keywords))
        seen = Seen(
            usage=self.ask("usage"),
            stats=self.ask("prefix_stats"),
            tables=tables,
            swapped=tuple(name for name in self.live if self.ask("is_swapped", name)),
            hits=tuple(hits),
            admits=tuple(admits),
        )
        for name, view in views.items():
            self.check(
                laws.TableView,
                tuple(view.tolist()) == tables[name],
                lambda name=name, view=view: (  # type: ignore[misc]
                    f"the table of {name!r} was {list(tables[name])} and became {view.tolist()} "
                    "in the caller's hands, while nothing but probes was called"
                ),
                lambda name=name: _kept_view(name, self.live),  # type: ignore[misc]
            )
        return seen

    def _table(self, name: str, view: Any) -> tuple[int, ...]:
        right = (
            isinstance(view, np.ndarray)
            and view.dtype == np.int32
            and view.ndim == 1
            and not view.flags.writeable
        )
        self.demand(
            laws.TableView,
            right,
            lambda: (
                f"block_table({name!r}) must be a read-only int32 array of one dimension, not "
                f"{view!r}" + (" that can be written" if getattr(view, "size", 0) else "")
            ),
            lambda: [
                f"table = manager.block_table({name!r})",
                'assert table.dtype == "int32" and table.ndim == 1 and not table.flags.writeable',
            ],
        )
        return tuple(view.tolist())

    def unchanged(self, law: type[StatefulLaw]) -> None:
        """Nothing that can be seen has changed since the call before the last one."""
        seen = self.look()
        what = self.seen.difference(seen)
        code = self.story[-1].call.code() if self.story else ""
        self.demand(law, not what, lambda: f"{code} changed something: {what}", lambda: [UNCHANGED])
        self.seen = seen

    def changed(self) -> None:
        """The last call changed something: take it in and check everything."""
        self.seen = self.look()
        for name, table in self.seen.tables.items():
            self.live[name].table = table
        self.inspect()

    def inspect(self) -> None:
        """Check all that has to hold after every call; a subclass does."""

    # Words that several rules need.

    def owners(self, block: int) -> list[str]:
        """Requests that hold a device block."""
        return [name for name, request in self.live.items() if block in request.table]

    def owned(self) -> set[int]:
        """Device blocks that requests hold."""
        return {block for request in self.live.values() for block in request.table}

    def chain(self, request: LiveRequest, count: int) -> list[int]:
        """Numbers of the prefixes that end with each full block of the first ``count`` tokens."""
        size = self.config.block_size
        return request.prefixes[size - 1 : count // size * size : size]

    def chain_of(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The same for tokens of nobody."""
        numbers: list[int] = []
        self.numbering.extend(numbers, tokens, salt)
        size = self.config.block_size
        return numbers[size - 1 :: size]

    def hand_out(self, blocks: Iterable[int], before: set[int], free_before: int) -> None:
        """Blocks were handed out anew: they belonged to nobody, and were free if possible."""
        fresh = list(blocks)
        taken = sorted(set(fresh) & before)
        code = self.story[-1].call.code()
        self.check(
            laws.Holders,
            not taken,
            lambda: f"{code} handed out {taken}, which another request holds",
        )
        if self.caching:
            sure = [next(iter(one)) for one in self.cached.certain() if len(one) == 1]
            evicted = set(sure) & set(fresh) - before
            wanted = max(0, len(fresh) - free_before)
            self.check(
                laws.Eviction,
                len(evicted) <= wanted,
                lambda: (
                    f"{code} took {len(fresh)} blocks while {free_before} were free, and evicted "
                    f"{sorted(evicted)} from the prefix cache: {wanted} would have done"
                ),
            )
        self.cached.reuse(fresh)

    def remember(self, tokens: Sequence[int], salt: str) -> None:
        """Look for the prefix of these tokens from now on."""
        entry = (tuple(tokens), salt)
        if entry not in self.prompts and len(self.prompts) < MAX_PROMPTS:
            self.prompts.append(entry)
            self.seen = self.look()


def _kept_view(name: str, live: Iterable[str]) -> list[str]:
    others = [one for one in live if one != name]
    return [
        f"table = manager.block_table({name!r})",
        "before = table.tolist()",
        *(f"manager.block_table({other!r})" for other in others),
        "manager.usage()",
        "assert table.tolist() == before, (before, table.tolist())",
    ]
