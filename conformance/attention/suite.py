"""Runs all laws on a backend and reports what held."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

import torch

from ...core.attention import Capabilities, dtype_name, dtype_names
from ...core.errors import ConfigError
from ..choices import named
from ..environment import device_name, origin_of, versions
from ..results import PropertyResult, Report, Status, uncovered
from .axes import SCALES, Axes, value_name
from .cases import AttentionCase
from .coverage import Coverage
from .laws import Law, NotTried
from .laws_bitwise import BITWISE_LAWS
from .laws_composition import COMPOSITION_LAWS
from .laws_meaning import MEANING_LAWS
from .laws_memory import MEMORY_LAWS
from .refusals import CAPABILITY_LAWS
from .reproducer import reproducer_name, write_reproducer
from .search import Search, search
from .strategies import directed_cases, few_cases, plain_case
from .subject import LawViolation, Subject, attend

T = TypeVar("T")

#: Every law, in the order in which they are tried.
ALL_LAWS: tuple[Law, ...] = (
    *CAPABILITY_LAWS,
    *MEANING_LAWS,
    *MEMORY_LAWS,
    *BITWISE_LAWS,
    *COMPOSITION_LAWS,
)


@dataclass(frozen=True)
class Profile:
    """Size of a run.

    Attributes:
        examples: random cases of each law and dtype.
        seconds: no new random case of a law and dtype is begun after that long.
        scale: size of the cases.
    """

    examples: int
    seconds: float
    scale: str


PROFILES: Mapping[str, Profile] = {
    "quick": Profile(examples=50, seconds=0.8, scale="small"),
    "full": Profile(examples=400, seconds=15.0, scale="large"),
    "soak": Profile(examples=20_000, seconds=3600.0, scale="large"),
}
#: Most processes that a run takes unasked.
MAX_JOBS = 4
#: A backend that takes longer than this for a batch of three short sequences gets tiny cases.
SLOW_SECONDS = 0.15


@dataclass(frozen=True)
class SuiteOptions:
    """What to run.

    Attributes:
        profile: one of ``PROFILES``.
        seed: of all random cases.
        only: axis to values that it is narrowed to.
        laws: names of the laws to try; empty is all.
        scale: one of ``SCALES``; None is the profile's, or tiny for a slow backend.
        jobs: processes that laws are shared among; 0 takes as many as there are cores, at most
            ``MAX_JOBS``, if there is work enough for them.
        reproducers: directory for the files that show failures; None writes none.
        command: what the user typed, for the report.
    """

    profile: str = "quick"
    seed: int = 0
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    laws: tuple[str, ...] = ()
    scale: str | None = None
    jobs: int = 1
    reproducers: Path | None = None
    command: str = ""


class SuiteObserver:
    """Is told how a run goes on; does nothing by itself."""

    def started(self, law: str, variant: str, planned: int) -> None:
        """A law is about to be tried on ``planned`` random cases."""

    def progressed(self, law: str, variant: str, examples: int) -> None:
        """So many cases have been tried."""

    def finished(self, result: PropertyResult) -> None:
        """A law has been tried."""


def run_suite(
    subject: Subject, options: SuiteOptions, observer: SuiteObserver | None = None
) -> Report:
    """Try every law on a backend, dtype by dtype.

    Raises:
        ConfigError: a profile, scale, law, axis or value is unknown; or the backend cannot run on
            the device at all.
    """
    observer = observer or SuiteObserver()
    run = SuiteRun.unprobed(subject, options)
    jobs = options.jobs or run.sensible_jobs()
    if jobs > 1:
        from .parallel import run_parallel

        run, results = run_parallel(run, jobs, observer)
    else:
        run = run.probed()
        results = [run.property(law, dtype, observer) for law, dtype in run.properties()]
    return run.report(results)


@dataclass(frozen=True)
class SuiteRun:
    """A run that is ready to go.

    Attributes:
        subject, options: what to run on what.
        profile: sizes.
        axes: what cases may vary in.
        laws: laws to try.
        coverage: counts examples; shared by all properties of the process.
    """

    subject: Subject
    options: SuiteOptions
    profile: Profile
    axes: Axes
    laws: tuple[Law, ...]
    coverage: Coverage

    @staticmethod
    def prepare(subject: Subject, options: SuiteOptions) -> SuiteRun:
        """Check the options and find out how fast the backend is.

        Raises:
            ConfigError: as ``run_suite`` says.
        """
        return SuiteRun.unprobed(subject, options).probed()

    def probed(self) -> SuiteRun:
        """The run with tiny cases if the backend is slow and no scale was asked for."""
        slow = self.options.scale is None and _seconds_of_probe(self) > SLOW_SECONDS
        return self.at_scale("tiny") if slow else self

    def at_scale(self, scale: str) -> SuiteRun:
        """The same run with cases of another size; nothing that was covered is kept."""
        run = SuiteRun.unprobed(self.subject, replace(self.options, scale=scale))
        return replace(run, options=self.options)

    @staticmethod
    def unprobed(subject: Subject, options: SuiteOptions) -> SuiteRun:
        """Check the options; the backend is asked for its capabilities and nothing else.

        Raises:
            ConfigError: as ``run_suite`` says.
        """
        capabilities = subject.capabilities
        unusable = why_unusable(subject)
        if unusable is not None:
            raise ConfigError(unusable)
        profile = named("profile", options.profile, PROFILES)
        by_name = {law.name: law for law in ALL_LAWS}
        laws = tuple(named("law", name, by_name) for name in options.laws)
        scale = options.scale or profile.scale
        narrowed = Axes.of(capabilities, named("scale", scale, SCALES)).narrowed(options.only)
        axes = narrowed.matched()
        if not axes.dtype:
            raise ConfigError(
                f"no dtype of the query ({dtype_names(narrowed.dtype)}) is one of the cache "
                f"({dtype_names(narrowed.kv_dtype)}), and this backend declares no "
                "different_kv_dtype: change --only dtype=... or kv_dtype=..., or what it declares"
            )
        return SuiteRun(
            subject=subject,
            options=options,
            profile=replace(profile, scale=scale),
            axes=axes,
            laws=laws or ALL_LAWS,
            coverage=Coverage(axes, capabilities),
        )

    def sensible_jobs(self) -> int:
        """Processes to share the laws among; a process takes a few seconds to start."""
        if len(list(self.properties())) < 10:
            return 1
        return min(MAX_JOBS, os.cpu_count() or 1)

    def properties(self) -> Iterator[tuple[Law, torch.dtype]]:
        """Every law with every dtype; those that do not depend on the dtype once."""
        for law in self.laws:
            for dtype in self.axes.dtype:
                yield law, dtype
                if not law.every_dtype:
                    break

    def property(self, law: Law, dtype: torch.dtype, observer: SuiteObserver) -> PropertyResult:
        """Try one law with one dtype."""
        variant = dtype_name(dtype)
        try:
            result = self._try(law, dtype, variant, observer)
        except NotTried as why:
            result = PropertyResult(
                law.name, law.title(), variant, Status.NOT_CLAIMED, reason=str(why)
            )
        observer.finished(result)
        return result

    def _try(
        self, law: Law, dtype: torch.dtype, variant: str, observer: SuiteObserver
    ) -> PropertyResult:
        """The result of a law that is tried, or ``NotTried``."""
        reason = law.not_claimed(self.subject.capabilities, dtype)
        if reason is not None:
            raise NotTried(reason)
        axes = replace(self.axes, dtype=(dtype,))
        planned = 0 if law.once else self.profile.examples * law.weight
        started = time.perf_counter()
        observer.started(law.name, variant, planned)
        tried = 0

        def seen(case: AttentionCase) -> None:
            nonlocal tried
            tried += 1
            if law.attends:
                self.coverage.add(case, law.name)
            observer.progressed(law.name, variant, tried)

        found = search(
            law,
            self.subject,
            axes,
            examples=planned,
            seconds=self.profile.seconds * law.weight,
            seed=zlib.crc32(f"{self.options.seed} {law.name} {variant}".encode()),
            first=first_cases(law, axes),
            seen=seen,
        )
        if self.subject.device.type == "cuda":
            # Processes that share a device would keep the memory of their largest case.
            torch.cuda.empty_cache()
        return self._result(law, variant, found, time.perf_counter() - started)

    def uncovered_by_directed_cases(self) -> tuple[str, ...]:
        """Declared values that no fixed case has that the backend takes, as ``axis=value``."""
        coverage = Coverage(self.axes, self.subject.capabilities)
        for dtype in self.axes.dtype:
            for case in directed_cases(replace(self.axes, dtype=(dtype,))):
                if not self.subject.refuses(case):
                    coverage.add(case, "lse")
        return uncovered(coverage.table())

    def _result(self, law: Law, variant: str, found: Search, seconds: float) -> PropertyResult:
        measured = found.max_error if found.max_error > 0 else None
        if not found.failed or found.case is None or found.violation is None:
            return PropertyResult(
                law=law.name,
                title=law.title(),
                variant=variant,
                status=Status.PASSED,
                examples=found.examples,
                max_error=measured,
                seconds=seconds,
                worst_case="" if found.worst is None else str(found.worst),
            )
        reason, reproducer = _reason(found), ""
        try:
            reproducer = self._reproducer(law, variant, found.case, found.violation)
        except OSError:
            raise
        except Exception as error:
            # After some failures nothing can be computed on the device any more.
            reason += f" (no reproducer: {type(error).__name__}: {error})"
        return PropertyResult(
            law=law.name,
            title=law.title(),
            variant=variant,
            status=Status.FAILED,
            examples=found.examples,
            seconds=seconds,
            reason=reason,
            case=str(found.case),
            reproducer=reproducer,
        )

    def _reproducer(
        self, law: Law, variant: str, case: AttentionCase, violation: Exception | SystemExit
    ) -> str:
        directory = self.options.reproducers
        if directory is None:
            return ""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / reproducer_name(law, self.subject.backend.name, case.spec.dtype, case)
        if not isinstance(violation, LawViolation):
            violation = LawViolation(
                f"{type(violation).__name__}: {violation}", self.subject.build(case)
            )
        write_reproducer(path, law, self.subject, case, violation)
        return str(path)

    def report(self, results: Sequence[PropertyResult]) -> Report:
        """All results, with what they depend on."""
        options = self.options
        only = {axis: tuple(values) for axis, values in options.only.items()}
        if options.laws:
            only["law"] = options.laws
        return Report(
            suite="attention",
            part=self.subject.backend.name,
            origin=origin_of(self.subject.backend),
            profile=f"{options.profile}, {self.profile.scale} cases",
            device=device_name(self.subject.device),
            seed=options.seed,
            only=only,
            command=options.command,
            versions=versions(),
            results=tuple(results),
            coverage={} if options.laws else self.coverage.table(),
            capabilities=described(self.subject.capabilities),
        )


def first_cases(law: Law, axes: Axes) -> list[AttentionCase]:
    """The fixed cases that a law is tried on before the random ones."""
    if law.once:
        return [plain_case(axes)]
    return [*few_cases(axes), *(directed_cases(axes) if law.directed else ())]


def why_unusable(subject: Subject) -> str | None:
    """Why the backend cannot run on the device at all; None if it can."""
    name, device = subject.backend.name, subject.device
    capabilities = subject.capabilities
    if capabilities.missing is not None:
        return f"attention backend {name!r} cannot run here: {capabilities.missing}"
    if device.type not in capabilities.device_types:
        supported = ", ".join(sorted(capabilities.device_types))
        return (
            f"attention backend {name!r} does not support --device {device.type} "
            f"(supported: {supported})"
        )
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return f"attention backend {name!r} cannot run on --device {device}: torch finds no GPU"
    needed, found = capabilities.compute_capability, torch.cuda.get_device_capability(device)
    if needed is not None and found < needed:
        return (
            f"attention backend {name!r} needs compute capability {needed[0]}.{needed[1]}; "
            f"--device {device} has {found[0]}.{found[1]}"
        )
    return None


def _seconds_of_probe(run: SuiteRun) -> float:
    """Time of one plain batch, compilation not counted; 0 if the backend fails at it."""
    subject, case = run.subject, plain_case(run.axes)
    try:
        data = subject.build(case)
        instance = subject.instance(data)
        attend(instance, data)
        started = time.perf_counter()
        attend(instance, data)
    except (Exception, SystemExit):
        # A law will say what is wrong; the time does not matter then.
        return 0.0
    return time.perf_counter() - started


def _reason(found: Search) -> str:
    violation = found.violation
    text = str(violation)
    if not isinstance(violation, LawViolation):
        text = f"{type(violation).__name__}: {violation}"
    if found.flaky:
        text += " (the failure did not repeat: the backend is not deterministic)"
    return text


def described(capabilities: Capabilities) -> dict[str, str]:
    """The declared capabilities in words, for reports."""
    words = {}
    for one in fields(capabilities):
        value = getattr(capabilities, one.name)
        if isinstance(value, frozenset):
            value = ", ".join(sorted(value_name(item) for item in value)) or "none"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        words[one.name] = str(value)
    return words
