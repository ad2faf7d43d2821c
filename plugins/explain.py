"""Tells which parts would serve a model and why; loads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ..core.attention import AttentionSpec, dtype_name
from ..core.capabilities import kv_cache_dtype_of
from ..core.config import EngineOptions
from ..core.errors import JackfieldError, PluginError
from ..core.model import ModelConfig
from ..core.options import NoOptions
from .discovery import PluginHost
from .explain_elsewhere import Elsewhere, in_short, is_out_of_place, judge_on_cuda
from .registry import Origin, PartEntry, PartKind
from .selection import (
    AUTO,
    Candidate,
    auto_order,
    find_part,
    judge_attention_backends,
    select_attention_backend,
    validate_options,
)
from .validation import FieldHelp, fields_of

#: The kinds that a setting chooses by name.
_NAMED_KINDS = (PartKind.SCHEDULER, PartKind.SCHEDULING_POLICY, PartKind.BLOCK_MANAGER)


class Verdict(Enum):
    """What becomes of a part."""

    CHOSEN = "chosen"
    USABLE = "usable"
    REFUSED = "refused"
    BROKEN = "broken"


@dataclass(frozen=True)
class PartVerdict:
    """One registered part, judged.

    Attributes:
        kind: what it is.
        name: its name.
        verdict: chosen: it would run; usable: it could; refused: it cannot serve this model with
            these settings; broken: it cannot be loaded, or its name is contested.
        reasons: why, one sentence each.
        origin: who registered it.
        target: its class, as ``package.module:ClassName``.
        options: the fields of its options.
        conformance: what published conformance reports say about it, one line each; empty if
            nobody looked.
        elsewhere: for an attention backend that is refused because of this machine: whether it
            would serve the model on a CUDA device.
    """

    kind: PartKind
    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    origin: Origin
    target: str
    options: tuple[FieldHelp, ...] = ()
    conformance: tuple[str, ...] = ()
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True)
class SettingValue:
    """A setting, its value and where that comes from."""

    name: str
    value: object
    origin: str


@dataclass(frozen=True)
class Explanation:
    """Which parts would serve a model.

    Attributes:
        architecture: of the checkpoint.
        device: where it would run.
        dtypes: of its attention layers.
        block_size: of the KV cache, in tokens; None if no attention backend is chosen.
        attention: the distinct attention specs, in words, each with its number of layers.
        note: where these are from, if not from the model's definition, or why there are none.
        parts: all registered parts, judged, by kind and name.
        settings: all settings.
        problems: why an engine with these settings would not start; empty if it would get past
            the choice of its parts.
        failures: plugins that were not loaded, one sentence each.
    """

    architecture: str
    device: str
    dtypes: tuple[str, ...]
    block_size: int | None
    attention: tuple[str, ...]
    note: str
    parts: tuple[PartVerdict, ...]
    settings: tuple[SettingValue, ...]
    problems: tuple[str, ...]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether all parts can be had as asked for."""
        return not self.problems


def explain(
    host: PluginHost,
    config: ModelConfig,
    specs: Sequence[AttentionSpec],
    options: EngineOptions,
    origins: Mapping[str, str],
    device: torch.device,
    conformance: Mapping[tuple[PartKind, str], tuple[str, ...]] | None = None,
    note: str = "",
    cuda_specs: Sequence[AttentionSpec] = (),
    absent: str = "",
) -> Explanation:
    """Judge every registered part for a model with these settings.

    Args:
        host: the plugins.
        config: of the checkpoint.
        specs: the attention spec of each layer; empty if the architecture is unknown.
        options: the settings.
        origins: where each setting comes from.
        device: where the model would run.
        conformance: what published reports say about parts, by kind and name.
        note: where ``specs`` are from, if not from the model's definition, or why there are none.
        cuda_specs: the specs with the dtype that the model would have on a CUDA device; empty if
            it is the same.
        absent: why ``device``, a CUDA device, is not on this machine; empty if it is. No backend
            can run then; each is judged for such a device.
    """
    problems: list[str] = []
    attention, block_size = _attention(host, specs, options, device, absent, problems)
    there = cuda_specs or specs
    attention = [_elsewhere(host, part, there, options, device, absent) for part in attention]
    parts = [*attention]
    for kind in _NAMED_KINDS:
        wanted = getattr(options, kind.value)
        values = getattr(options, f"{kind.value}_options")
        parts += _named(host, kind, wanted, values, problems)
    parts += _models(host, config.architecture, problems)
    parts += _contested(host)
    told = conformance or {}
    parts = [replace(part, conformance=told.get((part.kind, part.name), ())) for part in parts]
    values = options.model_dump()
    return Explanation(
        architecture=config.architecture,
        device=str(device),
        dtypes=tuple(sorted({dtype_name(spec.dtype) for spec in specs})),
        block_size=block_size,
        attention=tuple(_spec_in_words(spec, specs) for spec in dict.fromkeys(specs)),
        note=note,
        parts=tuple(sorted(parts, key=lambda part: (_KIND_ORDER[part.kind], part.name))),
        settings=tuple(
            SettingValue(name, values[name], origins.get(name, "default")) for name in values
        ),
        problems=tuple(dict.fromkeys(problems)),
        failures=tuple(map(str, host.failures.values())),
    )


_KIND_ORDER = {kind: index for index, kind in enumerate(PartKind)}


def _attention(
    host: PluginHost,
    specs: Sequence[AttentionSpec],
    options: EngineOptions,
    device: torch.device,
    absent: str,
    problems: list[str],
) -> tuple[list[PartVerdict], int | None]:
    kind, wanted = PartKind.ATTENTION_BACKEND, options.attention_backend
    if absent:
        problems.append(absent)
    unjudged = absent or "the architecture is unknown, so there is nothing to judge it by"
    if absent or not specs:
        _check_asked_for(host, options, problems)
        entries = host.registry.entries(kind)
        return [_part(entry, Verdict.REFUSED, (unjudged,)) for entry in entries], None
    kv_dtype = kv_cache_dtype_of(options.kv_cache_dtype)
    candidates = judge_attention_backends(host, specs, device, options.block_size, kv_dtype)
    chosen, why, rejected, block_size = None, "", {}, None
    try:
        selection = select_attention_backend(
            host,
            wanted,
            specs,
            device,
            options.block_size,
            options.attention_backend_options,
            kv_dtype,
        )
    except JackfieldError as error:
        problems.append(str(error))
    else:
        chosen, why, block_size = selection.name, selection.why, selection.block_size
        rejected = dict(selection.rejected)
    order = {one.entry.name: place for place, one in enumerate(auto_order(candidates), start=1)}
    parts = []
    reasons: tuple[str, ...]
    for one in candidates:
        name = one.entry.name
        if name == chosen:
            verdict, reasons = Verdict.CHOSEN, (why, f"block_size={block_size}")
        elif one.usable:
            verdict, reasons = Verdict.USABLE, _usable(one, order, rejected)
        else:
            verdict = Verdict.BROKEN if one.broken else Verdict.REFUSED
            reasons = one.reasons
        parts.append(_part(one.entry, verdict, reasons))
    return parts, block_size


def _check_asked_for(host: PluginHost, options: EngineOptions, problems: list[str]) -> None:
    """Whether a backend that is asked for by name is there and takes its options."""
    kind, wanted = PartKind.ATTENTION_BACKEND, options.attention_backend
    if wanted == AUTO:
        return
    try:
        entry = find_part(host, kind, wanted)
        validate_options(kind, wanted, entry.load(), options.attention_backend_options)
    except JackfieldError as error:
        problems.append(str(error))


def _elsewhere(
    host: PluginHost,
    part: PartVerdict,
    specs: Sequence[AttentionSpec],
    options: EngineOptions,
    device: torch.device,
    absent: str,
) -> PartVerdict:
    """The verdict, with the one for a CUDA device if this machine is what the backend lacks."""
    entry = host.registry.get(part.kind, part.name)
    if entry is None or not specs or part.verdict is not Verdict.REFUSED:
        return part
    if not absent and not is_out_of_place(entry, device):
        return part
    kv_dtype = kv_cache_dtype_of(options.kv_cache_dtype)
    found = judge_on_cuda(entry, specs, options.block_size, kv_dtype)
    if found is None:
        return part
    lacks = (found.missing,) if absent and found.missing is not None else ()
    return replace(part, reasons=(*part.reasons, *lacks), elsewhere=found)


def _usable(
    one: Candidate, order: Mapping[str, int], rejected: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    name = one.entry.name
    if name in rejected:
        return rejected[name]
    place = f"place {order[name]} of {len(order)}" if name in order else "never taken"
    return (f"auto_priority={one.priority}: {place} for {AUTO!r}",)


def _named(
    host: PluginHost,
    kind: PartKind,
    wanted: str,
    values: Mapping[str, object],
    problems: list[str],
) -> list[PartVerdict]:
    refusal = ""
    try:
        entry = find_part(host, kind, wanted)
        validate_options(kind, wanted, entry.load(), values)
    except JackfieldError as error:
        refusal = str(error)
        problems.append(refusal)
    parts = []
    for entry in host.registry.entries(kind):
        if entry.name != wanted:
            verdict, reason = Verdict.USABLE, f"{kind.value}={wanted!r} is asked for"
        elif refusal:
            verdict, reason = Verdict.REFUSED, refusal
        else:
            verdict, reason = Verdict.CHOSEN, "asked for by name"
        parts.append(_part(entry, verdict, (reason,)))
    return parts


def _models(host: PluginHost, architecture: str, problems: list[str]) -> list[PartVerdict]:
    try:
        find_part(host, PartKind.MODEL, architecture).load()
    except PluginError as error:
        problems.append(str(error))
    return [
        _part(entry, Verdict.CHOSEN, ("the checkpoint's architecture",))
        if entry.name == architecture
        else PartVerdict(
            entry.kind,
            entry.name,
            Verdict.REFUSED,
            (f"the checkpoint's architecture is {architecture}",),
            entry.origin,
            entry.path,
        )
        for entry in host.registry.entries(PartKind.MODEL)
    ]


def _contested(host: PluginHost) -> list[PartVerdict]:
    return [
        PartVerdict(
            claim.kind,
            claim.name,
            Verdict.BROKEN,
            (host.registry.conflict(claim.kind, claim.name),),
            claim.origin,
            claim.path,
        )
        for claims in host.registry.conflicts().values()
        for claim in claims
    ]


def _part(entry: PartEntry, verdict: Verdict, reasons: tuple[str, ...]) -> PartVerdict:
    """The verdict, unless the part cannot be loaded."""
    options: tuple[FieldHelp, ...] = ()
    try:
        cls = entry.load()
    except PluginError as error:
        verdict, reasons = Verdict.BROKEN, (str(error),)
    else:
        try:
            options = fields_of(getattr(cls, "Options", NoOptions))
        except Exception as error:
            verdict, reasons = Verdict.BROKEN, (f"its options cannot be told: {in_short(error)}",)
    return PartVerdict(entry.kind, entry.name, verdict, reasons, entry.origin, entry.path, options)


def _spec_in_words(spec: AttentionSpec, specs: Sequence[AttentionSpec]) -> str:
    words = [
        f"{sum(other == spec for other in specs)} layers",
        f"num_heads={spec.num_heads}",
        f"num_kv_heads={spec.num_kv_heads}",
        f"head_size={spec.head_size}",
    ]
    if spec.v_head_size != spec.head_size:
        words.append(f"v_head_size={spec.v_head_size}")
    if not spec.causal:
        words.append("not causal")
    for name in ("sliding_window", "logits_soft_cap"):
        value = getattr(spec, name)
        if value is not None:
            words.append(f"{name}={value}")
    if spec.alibi_slopes is not None:
        words.append("alibi_slopes")
    if spec.sinks:
        words.append("sinks")
    return ", ".join([*words, dtype_name(spec.dtype)])
