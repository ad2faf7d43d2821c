"""Calls of a block manager as data: made, compared, made again, and written as Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.block_manager import BlockManager, BlockManagerConfig
from ...core.options import PartOptions

#: Methods that only tell something.
PROBES = frozenset(
    {
        "can_allocate",
        "match_prefix",
        "usage",
        "block_table",
        "largest_request",
        "reclaimable",
        "prefix_stats",
        "is_swapped",
    }
)


@dataclass(frozen=True)
class Subject:
    """A block manager class under test.

    Attributes:
        manager: the class.
        options: passed to its constructor.
    """

    manager: type[BlockManager]
    options: PartOptions | None = None

    def build(self, config: BlockManagerConfig) -> BlockManager:
        """A new manager."""
        if self.options is None:
            return self.manager(config)
        return self.manager(config, self.options)


@dataclass(frozen=True)
class Outcome:
    """What came of a call.

    Attributes:
        value: what was returned.
        error: what was raised; None if nothing was.
        table: block table of the request afterwards; None if it has none.
    """

    value: Any = None
    error: Exception | None = None
    table: tuple[int, ...] | None = None

    @property
    def refused(self) -> bool:
        """Whether the call was turned down; then it must not have changed anything."""
        return self.error is not None or self.value is None or self.value is False

    def told(self) -> tuple[Any, ...]:
        """What two runs of the same call must agree on."""
        error = None if self.error is None else type(self.error).__name__
        return (self.value, error, self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: an error may not be made to travel, its name and text are."""
        error = None if self.error is None else (type(self.error).__name__, str(self.error))
        return _arrived, (self.value, error, self.table)


def _arrived(value: Any, error: tuple[str, str] | None, table: tuple[int, ...] | None) -> Outcome:
    raised = None if error is None else type(error[0], (Exception,), {})(error[1])
    return Outcome(value, raised, table)


@dataclass(frozen=True)
class Call:
    """A call of a method.

    Attributes:
        method: its name.
        arguments: by position.
        keywords: by name.
    """

    method: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_probe(self) -> bool:
        """Whether the method only tells something."""
        return self.method in PROBES

    @property
    def subject(self) -> str:
        """The request whose table may be another afterwards."""
        return str(self.arguments[1 if self.method == "fork" else 0])

    def code(self, manager: str = "manager") -> str:
        """The call as Python."""
        arguments = [python(one) for one in self.arguments]
        arguments += [f"{name}={python(value)}" for name, value in self.keywords.items()]
        return f"{manager}.{self.method}({', '.join(arguments)})"


@dataclass(frozen=True)
class Made:
    """A call and what came of it."""

    call: Call
    outcome: Outcome

    @property
    def idle(self) -> bool:
        """Whether the call must not have changed anything, because it was refused or is a probe."""
        returns_nothing = self.call.method in ("commit", "fork", "free")
        if returns_nothing:
            return self.outcome.error is not None
        return self.call.is_probe or self.outcome.refused


def make(manager: BlockManager, call: Call) -> Outcome:
    """Make a call and look at the table of the request that it is about."""
    value: Any = None
    error: Exception | None = None
    try:
        value = getattr(manager, call.method)(*call.arguments, **call.keywords)
    except Exception as raised:
        error = raised
    if call.method == "block_table" and error is None:
        return Outcome(None, None, tuple(int(one) for one in value))
    if call.is_probe or call.method == "reset_prefix_cache":
        return Outcome(value, error)
    return Outcome(value, error, table_of(manager, call.subject))


def table_of(manager: BlockManager, request_id: str) -> tuple[int, ...] | None:
    """A request's block table; None if it has none."""
    try:
        return tuple(manager.block_table(request_id).tolist())
    except KeyError:
        return None


def replay(
    manager: BlockManager, story: Sequence[Made], *, without_idle: bool = False
) -> list[Outcome]:
    """Make the calls of a story again, those that must not change anything or not."""
    return [make(manager, made.call) for made in story if not (without_idle and made.idle)]


def python(value: Any) -> str:
    """A value as Python: as it is written by hand."""
    if isinstance(value, tuple) and len(value) > 3 and len(set(value)) == 1:
        return f"[{value[0]!r}] * {len(value)}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(repr, value))}]"
    return repr(value)
