"""Chooses parts: what is asked for by name is what runs, or an error says why not.

Only ``auto`` chooses, among all registered attention backends, third parties' included, and says
what it chose and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from pydantic import ValidationError

from ..core.attention import AttentionBackend, AttentionSpec, KVCacheSpec
from ..core.block_manager import BlockManager
from ..core.errors import ConfigError, PluginError, UnsupportedError
from ..core.model import Model
from ..core.options import NoOptions, PartOptions
from ..core.scheduler import Scheduler
from ..core.scheduling_policy import SchedulingPolicy
from .discovery import PluginHost, tell
from .registry import Origin, PartEntry, PartKind
from .validation import did_you_mean, problems

AUTO = "auto"
PartT = TypeVar("PartT")


@dataclass(frozen=True)
class Selection(Generic[PartT]):
    """A part that was chosen.

    Attributes:
        kind: what it is.
        name: its name.
        cls: its class.
        options: its validated options, to be handed to the constructor.
        why: one sentence.
        origin: who registered it.
        rejected: for ``auto``: the other candidates and why each was not taken.
        block_size: for an attention backend: the block size in tokens; 0 for other kinds.
    """

    kind: PartKind
    name: str
    cls: type[PartT]
    options: PartOptions
    why: str
    origin: Origin
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    block_size: int = 0


@dataclass(frozen=True)
class Candidate:
    """An attention backend, judged for a model on a device.

    Attributes:
        entry: who it is.
        block_size: the one asked for, or the backend's preferred one; 0 if it is broken.
        priority: its ``auto_priority``.
        reasons: why it cannot serve the model; empty if it can.
        cls: its class; None if it is broken.
        error: what broke it.
    """

    entry: PartEntry
    block_size: int
    priority: int
    reasons: tuple[str, ...]
    cls: type[AttentionBackend] | None
    error: Exception | None = None

    @property
    def broken(self) -> bool:
        """Whether it could not even be loaded or asked."""
        return self.cls is None

    @property
    def usable(self) -> bool:
        """Whether it can serve the model."""
        return not self.reasons


def find_part(host: PluginHost, kind: PartKind, name: str) -> PartEntry:
    """The part of this name.

    Raises:
        PluginError: no plugin registers it, several do, or a plugin that ``JACKFIELD_PLUGINS``
            lists could not be loaded. An unknown name comes with close matches, all names, the
            installed plugins, and reason and traceback of every plugin that failed to load.
    """
    host.check_requested()
    entry = host.registry.get(kind, name)
    if entry is not None:
        return entry
    names = host.registry.names(kind)
    installed = ", ".join(str(plugin.origin) for plugin in host.plugins.values()) or "none"
    message = (
        f"{kind.value}={name!r}: no plugin registers this name as {kind.label}"
        f"{did_you_mean(name, names) or '.'} Available: {', '.join(names) or 'none'}. "
        f"Installed plugins: {installed}."
    )
    if host.left_out:
        message += f" Left out by JACKFIELD_PLUGINS: {', '.join(host.left_out)}."
    if host.failures:
        failures = tell(list(host.failures.values()))
        message += f" These plugins failed to load and may provide it:\n{failures}"
    raise PluginError(message)


def validate_options(
    kind: PartKind, name: str, cls: type[Any], values: Mapping[str, object] | None
) -> PartOptions:
    """The options of a part, as its own typed model.

    Raises:
        ConfigError: a field is unknown, missing or wrong: it is named, with what is allowed.
    """
    model: type[PartOptions] = getattr(cls, "Options", NoOptions)
    try:
        return model.model_validate(dict(values or {}))
    except ValidationError as error:
        what = "; ".join(problems(error, model))
        raise ConfigError(f"{kind.value}_options of {kind.label} {name!r}: {what}") from None


def select_scheduler(
    host: PluginHost, name: str, options: Mapping[str, object] | None = None
) -> Selection[Scheduler]:
    """The scheduler of this name. Raises as ``find_part``, ``load`` and ``validate_options``."""
    return _select(host, PartKind.SCHEDULER, name, options)


def select_scheduling_policy(
    host: PluginHost, name: str, options: Mapping[str, object] | None = None
) -> Selection[SchedulingPolicy]:
    """The policy of this name. Raises as ``find_part``, ``load`` and ``validate_options``."""
    return _select(host, PartKind.SCHEDULING_POLICY, name, options)


def select_block_manager(
    host: PluginHost, name: str, options: Mapping[str, object] | None = None
) -> Selection[BlockManager]:
    """The manager of this name. Raises as ``find_part``, ``load`` and ``validate_options``."""
    return _select(host, PartKind.BLOCK_MANAGER, name, options)


def select_model(host: PluginHost, architecture: str) -> Selection[Model]:
    """The model class for an architecture. Raises as ``find_part`` and ``PartEntry.load``."""
    return _select(host, PartKind.MODEL, architecture, None)


def judge_attention_backends(
    host: PluginHost,
    specs: Sequence[AttentionSpec],
    device: torch.device,
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> list[Candidate]:
    """All registered attention backends, by name, each with every reason against it.

    Args:
        host: the plugins.
        specs: the specs of the model's layers; at least one.
        device: where the model runs.
        block_size: in tokens; None takes what each backend prefers.
        kv_dtype: of the cache; None is each spec's own dtype.
    """
    entries = host.registry.entries(PartKind.ATTENTION_BACKEND)
    return [judge(entry, specs, device, block_size, kv_dtype) for entry in entries]


def judge(
    entry: PartEntry,
    specs: Sequence[AttentionSpec],
    device: torch.device,
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Candidate:
    """One attention backend, with every reason against it. Arguments as in
    ``judge_attention_backends``. A backend that cannot be asked is broken, with the reason."""
    try:
        cls: type[AttentionBackend] = entry.load()
    except PluginError as error:
        return Candidate(entry, 0, 0, (str(error),), None, error)
    try:
        can = cls.capabilities(device)
        size = can.preferred_block_size if block_size is None else block_size
        reasons = layer_reasons(cls.unsupported, specs, device, size, kv_dtype)
        return Candidate(entry, size, can.auto_priority, reasons, cls)
    except Exception as error:
        reason = f"its capabilities cannot be told: {type(error).__name__}: {error}"
        return Candidate(entry, 0, 0, (reason,), None, error)


def select_attention_backend(
    host: PluginHost,
    name: str,
    specs: Sequence[AttentionSpec],
    device: torch.device,
    block_size: int | None = None,
    options: Mapping[str, object] | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Selection[AttentionBackend]:
    """The attention backend for a model: the named one, or the best for ``auto``.

    Args:
        host: the plugins.
        name: of a backend, or ``auto``.
        specs: the specs of the model's layers; at least one. One backend serves all of them.
        device: where the model runs.
        block_size: in tokens; None follows the chosen backend.
        options: of the backend. ``auto`` takes none: they belong to a backend that is named.
        kv_dtype: of the cache; None is each spec's own dtype.

    Raises:
        PluginError: the named backend is unknown, contested or broken.
        UnsupportedError: it cannot serve the model, with every reason and what could; or, for
            ``auto``, none can, with the reasons of each.
        ConfigError: an option is wrong, or options were given to ``auto``.
    """
    if name != AUTO:
        entry = find_part(host, PartKind.ATTENTION_BACKEND, name)
        entry.load()
        candidate = judge(entry, specs, device, block_size, kv_dtype)
        if candidate.broken:
            raise PluginError(
                f"attention_backend={name!r} of plugin {entry.origin} is broken: "
                f"{candidate.reasons[0]}"
            ) from candidate.error
        if candidate.reasons:
            others = judge_attention_backends(host, specs, device, block_size, kv_dtype)
            raise _refusal(candidate, [other for other in others if other.usable])
        return _chosen(candidate, "asked for by name", options, {})
    if options:
        raise ConfigError(
            "attention_backend_options belong to one backend; name it with attention_backend, "
            "'auto' takes none"
        )
    host.check_requested()
    return _auto(host, judge_attention_backends(host, specs, device, block_size, kv_dtype))


def layer_reasons(
    ask: Callable[[AttentionSpec, KVCacheSpec, torch.device], Sequence[str]],
    specs: Sequence[AttentionSpec],
    device: torch.device,
    block_size: int,
    kv_dtype: torch.dtype | None,
) -> tuple[str, ...]:
    """Every reason against any of a model's layers, each once.

    Args:
        ask: ``unsupported`` of a backend or of its capabilities.
        specs: of the layers.
        device: where the model runs.
        block_size: in tokens.
        kv_dtype: of the cache; None is each spec's own dtype.
    """
    reasons: dict[str, None] = {}
    for spec in dict.fromkeys(specs):
        cache = KVCacheSpec(
            num_blocks=1,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            v_head_size=spec.v_head_size,
            dtype=kv_dtype or spec.dtype,
        )
        reasons.update(dict.fromkeys(ask(spec, cache, device)))
    return tuple(reasons)


def auto_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """What ``auto`` may take, best first: by declared priority, then by name."""
    eligible = (one for one in candidates if one.usable and one.priority > 0)
    return sorted(eligible, key=lambda one: (-one.priority, one.entry.name))


def _auto(host: PluginHost, candidates: Sequence[Candidate]) -> Selection[AttentionBackend]:
    order = auto_order(candidates)
    rejected = {one.entry.name: one.reasons for one in candidates if not one.usable}
    for kind, name in host.registry.conflicts():
        if kind is PartKind.ATTENTION_BACKEND:
            rejected[name] = (host.registry.conflict(kind, name),)
    for one in candidates:
        if one.usable and one.priority <= 0:
            reason = f"auto_priority={one.priority}: it is used only when asked for by name"
            rejected[one.entry.name] = (reason,)
    if not order:
        reasons = [f"{name}: {', '.join(why)}" for name, why in sorted(rejected.items())]
        reasons += [str(failure) for failure in host.failures.values()]
        raise UnsupportedError(
            "attention_backend='auto' finds no backend for this model here",
            reasons or ["no plugin registers an attention backend"],
        )
    best, *others = order
    total = len(order) + len(rejected)
    for one in others:
        rejected[one.entry.name] = (
            f"auto_priority={one.priority} is {best.entry.name!r}'s too, which comes first by name"
            if one.priority == best.priority
            else f"auto_priority={one.priority} is below {best.priority} of {best.entry.name!r}",
        )
    why = (
        f"auto: auto_priority={best.priority} is the highest of {len(order)} usable among {total} "
        "registered"
        if rejected
        else "auto: the only one registered"
    )
    return _chosen(best, why, None, rejected)


def _chosen(
    candidate: Candidate,
    why: str,
    options: Mapping[str, object] | None,
    rejected: Mapping[str, tuple[str, ...]],
) -> Selection[AttentionBackend]:
    entry = candidate.entry
    cls: type[AttentionBackend] = entry.load()
    return Selection(
        kind=entry.kind,
        name=entry.name,
        cls=cls,
        options=validate_options(entry.kind, entry.name, cls, options),
        why=why,
        origin=entry.origin,
        rejected=rejected,
        block_size=candidate.block_size,
    )


def _refusal(candidate: Candidate, usable: Sequence[Candidate]) -> UnsupportedError:
    names = ", ".join(f"{one.entry.name!r} (block_size {one.block_size})" for one in usable)
    way_out = (
        f"usable here: {names}, or attention_backend='auto'"
        if usable
        else "no registered backend is usable with these settings"
    )
    return UnsupportedError(
        f"attention_backend={candidate.entry.name!r} of plugin {candidate.entry.origin} cannot "
        f"serve this model here ({way_out})",
        candidate.reasons,
    )


def _select(
    host: PluginHost, kind: PartKind, name: str, options: Mapping[str, object] | None
) -> Selection[Any]:
    entry = find_part(host, kind, name)
    cls = entry.load()
    return Selection(
        kind=kind,
        name=name,
        cls=cls,
        options=validate_options(kind, name, cls, options),
        why="asked for by name" if kind is not PartKind.MODEL else "the checkpoint's architecture",
        origin=entry.origin,
    )
