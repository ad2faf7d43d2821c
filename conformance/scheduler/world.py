"""Tiny worlds, and what happens in them; all of it plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from ...core.block_manager import BlockManager, BlockManagerConfig
from ...core.options import PartOptions
from ...core.scheduler import Scheduler, SchedulerConfig
from ...core.scheduling_policy import SchedulingPolicy

#: Most requests of a story.
MAX_REQUESTS = 6


@dataclass(frozen=True)
class Subject:
    """A scheduler class under test, with the parts that it is given.

    Attributes:
        scheduler, manager, policy: the classes.
        options, manager_options, policy_options: passed to their constructors.
    """

    scheduler: type[Scheduler]
    manager: type[BlockManager]
    policy: type[SchedulingPolicy]
    options: PartOptions | None = None
    manager_options: PartOptions | None = None
    policy_options: PartOptions | None = None

    @property
    def powers(self) -> frozenset[str]:
        """What the laws may depend on: the block manager's powers, and the kind of policy."""
        fcfs = {"fcfs"} if getattr(self.policy, "name", "") == "fcfs" else set[str]()
        return frozenset(self.manager.powers) | fcfs


@dataclass(frozen=True)
class World:
    """Sizes of a story; the fields are as in ``BlockManagerConfig`` and ``SchedulerConfig``.

    Attributes:
        lookahead: slots that each scheduled request has beyond its share.
        groups: whether prompts may have several completions.
        wishful: whether the policy proposes odd things, and fails, in some steps.
    """

    num_blocks: int = 8
    block_size: int = 2
    max_model_len: int = 16
    watermark: float = 0.0
    num_host_blocks: int = 0
    caching: bool = False
    lookahead: int = 0
    budget: int = 8
    seats: int = 4
    chunk: int | None = None
    chunked: bool = True
    mode: Literal["recompute", "swap", "auto"] = "recompute"
    strict: bool = False
    groups: bool = False
    wishful: bool = False

    def manager_config(self) -> BlockManagerConfig:
        """For the block manager."""
        return BlockManagerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            watermark=self.watermark,
            num_host_blocks=self.num_host_blocks,
            enable_prefix_caching=self.caching,
            num_lookahead_tokens=self.lookahead,
        )

    def scheduler_config(self) -> SchedulerConfig:
        """For the scheduler."""
        return SchedulerConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.seats,
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=self.chunk,
            enable_chunked_prefill=self.chunked,
            strict_policy=self.strict,
            preemption_mode=self.mode,
        )


@dataclass(frozen=True)
class Arrive:
    """Requests for ``n`` completions of a prompt, cut to what fits.

    Attributes:
        pattern, length: of the prompt.
        completion: most tokens to generate.
        n: completions.
        salt: of the prefix cache.
        stops: whether a stop token ends them.
        later: whether time passes before.
    """

    pattern: int = 0
    length: int = 1
    completion: int = 1
    n: int = 1
    salt: str = ""
    stops: bool = False
    later: bool = False


@dataclass(frozen=True)
class Misfit:
    """A request that has to be refused: ``long``, ``twice``, ``rejected`` or ``failing``."""

    kind: str = "long"


@dataclass(frozen=True)
class Abort:
    """The end of a live request from outside, counted modulo their number."""

    index: int = 0


@dataclass(frozen=True)
class Wish:
    """A proposal in numbers: which of the requests, counted modulo their number; 6 is nobody."""

    admission: tuple[int, ...] | None = None
    skips: int = 0
    admissions: int | None = None
    order: tuple[int, ...] = ()
    grants: tuple[tuple[int, int], ...] = ()
    token_budget: int | None = None
    prefill_budget: int | None = None
    pause: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    resume: tuple[int, ...] | None = None
    swaps: bool | None = None
    victims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Step:
    """One step: planned, computed, taken note of.

    Attributes:
        wish: what the policy proposes.
        fails: method of the policy that raises, or ``admission_order``; "" is none.
        abort: live request that ends while the step is computed; -1 is none.
        renew: whether a request with the id of that one arrives at once.
        forgets: whether ``update`` is first called without the tokens.
    """

    wish: Wish = Wish()
    fails: str = ""
    abort: int = -1
    renew: bool = False
    forgets: bool = False


Operation = Arrive | Misfit | Abort | Step


def code(value: Any) -> str:
    """A world, an operation or a wish as Python, defaults left out."""
    parts = []
    for field in fields(value):
        here = getattr(value, field.name)
        if here != field.default:
            shown = code(here) if isinstance(here, Wish) else repr(here)
            parts.append(f"{field.name}={shown}")
    return f"{type(value).__name__}({', '.join(parts)})"
