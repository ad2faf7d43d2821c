"""The parts that a run is made of: whether they can be built, and what they are in words."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

from ...core.errors import ConfigError
from ...core.options import PartOptions
from ..block_manager.powers import check_powers
from .replay import quiet
from .world import Subject, World


def check_parts(subject: Subject) -> None:
    """Refuse parts with which no story could be told; the scheduler is tried in stories.

    Raises:
        ConfigError: with the part and what is wrong with it.
    """
    for kind, part in (
        ("scheduler", subject.scheduler),
        ("block manager", subject.manager),
        ("scheduling policy", subject.policy),
    ):
        missing = sorted(getattr(part, "__abstractmethods__", ()))
        if inspect.isabstract(part):
            raise ConfigError(
                f"{kind} {part.__name__} is abstract: it does not define {', '.join(missing)}"
            )
    check_powers(subject.manager)
    for world in _corners(subject):
        config = world.manager_config()
        _built(subject.manager, config, subject.manager_options)
    _built(subject.policy, subject.policy_options)


def reserves_everything(subject: Subject) -> bool:
    """Whether an admission takes all blocks that a request can ever need."""
    world = World()
    with quiet():
        manager = subject.manager(world.manager_config(), subject.manager_options)
        manager.allocate("probe", [0], 1)
        before = manager.usage().available
        manager.append("probe", min(world.max_model_len, manager.largest_request()))
    return manager.usage().available == before


def described(part: type[Any], options: PartOptions | None) -> str:
    """A part with the options that were set."""
    told = described_options(options)
    return f"{part.name} ({told})" if told else str(part.name)


def described_options(options: PartOptions | None) -> str:
    """Options that were set, in words."""
    if options is None:
        return ""
    values = options.model_dump(mode="json", exclude_unset=True)
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _corners(subject: Subject) -> Iterator[World]:
    powers = subject.manager.powers
    caching = (False, True) if "prefix_caching" in powers else (False,)
    hosts = (0, 4) if "swap" in powers else (0,)
    for some, host in product(caching, hosts):
        yield World(caching=some, num_host_blocks=host)


def _built(part: type[Any], *arguments: Any) -> None:
    try:
        with quiet():
            part(*arguments)
    except Exception as error:
        shown = " and ".join(str(one) for one in arguments if one is not None) or "nothing"
        raise ConfigError(
            f"{part.name!r} cannot be tried: it has to be built from {shown}, and says "
            f"{type(error).__name__}: {error}"
        ) from error
