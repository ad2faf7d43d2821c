"""The suite inside a test suite: a contract class for pytest, and one function for everything else.

class TestMyBackend(AttentionContract):
    backend = MyBackend
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ...core.attention import AttentionBackend, dtype_name
from ...core.options import PartOptions
from ..results import PropertyResult, Report, Status
from .laws import Law
from .subject import Subject
from .suite import (
    ALL_LAWS,
    SuiteObserver,
    SuiteOptions,
    SuiteRun,
    run_suite,
    why_unusable,
)

Property = tuple[Law, torch.dtype]


def assert_conforms(
    backend: type[AttentionBackend],
    *,
    device: str = "cpu",
    options: PartOptions | None = None,
    profile: str = "quick",
    seed: int = 0,
    only: Mapping[str, Sequence[str]] | None = None,
    laws: Sequence[str] = (),
    scale: str | None = None,
    reproducers: Path | None = None,
) -> Report:
    """Try every law on a backend.

    Args:
        backend: the class.
        device: where it runs.
        options: passed to its constructor.
        profile, seed, only, laws, scale, reproducers: as in ``SuiteOptions``.

    Returns:
        The report.

    Raises:
        AssertionError: a law does not hold, or something that is declared was not exercised; the
            message holds the smallest failing case of each law.
        ConfigError: an argument is unknown, or the backend cannot run on the device.
    """
    suite_options = SuiteOptions(
        profile=profile,
        seed=seed,
        only=dict(only or {}),
        laws=tuple(laws),
        scale=scale,
        reproducers=reproducers,
        command=f"assert_conforms({backend.__name__})",
    )
    report = run_suite(Subject(backend, torch.device(device), options), suite_options)
    if not report.ok:
        failures = [failure_text(one) for one in report.results if one.status is Status.FAILED]
        failures += [f"declared, but in no example: {one}" for one in report.uncovered]
        raise AssertionError(f"{backend.__name__} does not conform:\n\n" + "\n\n".join(failures))
    return report


def failure_text(result: PropertyResult) -> str:
    """A failed law with its smallest case, in words."""
    parts = [f"{result.law} ({result.variant}): {result.title}", result.reason, result.case]
    if result.reproducer:
        parts.append(f"reproducer: {result.reproducer}")
    return "\n".join(part for part in parts if part)


class AttentionContract:
    """Every law of the suite as a test of its own; a subclass names the backend.

    Where the backend cannot run on the device, all tests are skipped with the reason. To collect
    the tests, the backend is asked for its capabilities and nothing else.

    Class attributes:
        backend: the class under test.
        device: where it runs.
        options: passed to its constructor.
        profile, seed, only, laws, scale, reproducers: as in ``SuiteOptions``.
    """

    backend: ClassVar[type[AttentionBackend] | None] = None
    device: ClassVar[str] = "cpu"
    options: ClassVar[PartOptions | None] = None
    profile: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    only: ClassVar[Mapping[str, Sequence[str]]] = {}
    laws: ClassVar[Sequence[str]] = ()
    scale: ClassVar[str | None] = None
    reproducers: ClassVar[Path | None] = None
    _prepared: ClassVar[SuiteRun | None] = None

    @classmethod
    def suite_run(cls) -> SuiteRun:
        """The run that the tests of this class share."""
        subject, options = cls._settings()
        run = cls._prepared
        # A subclass finds its parent's run here, which is its own only if all settings are.
        if run is None or (run.subject, run.options) != (subject, options):
            run = SuiteRun.prepare(subject, options)
            cls._prepared = run
        return run

    @classmethod
    def _settings(cls) -> tuple[Subject, SuiteOptions]:
        if cls.backend is None:
            raise TypeError(f"{cls.__name__} has to set `backend` to an attention backend class")
        options = SuiteOptions(
            profile=cls.profile,
            seed=cls.seed,
            only=dict(cls.only),
            laws=tuple(cls.laws),
            scale=cls.scale,
            reproducers=cls.reproducers,
        )
        return Subject(cls.backend, torch.device(cls.device), cls.options), options

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each law and dtype; for each law, if the backend cannot run."""
        if "law_and_dtype" not in metafunc.fixturenames:
            return
        subject, options = type(self)._settings()
        if why_unusable(subject) is not None:
            names = list(options.laws) or [law.name for law in ALL_LAWS]
            metafunc.parametrize("law_and_dtype", [None] * len(names), ids=names)
            return
        properties = list(SuiteRun.unprobed(subject, options).properties())
        names = [f"{law.name}-{dtype_name(dtype)}" for law, dtype in properties]
        metafunc.parametrize("law_and_dtype", properties, ids=names)

    def test_law(self, law_and_dtype: Property | None) -> None:
        """One law with one dtype."""
        self._skip_if_unusable()
        assert law_and_dtype is not None
        law, dtype = law_and_dtype
        result = type(self).suite_run().property(law, dtype, SuiteObserver())
        if result.status is Status.NOT_CLAIMED:
            pytest.skip(result.reason)
        if result.status is Status.FAILED:
            pytest.fail(failure_text(result), pytrace=False)

    def test_everything_declared_is_exercised(self) -> None:
        """No declared capability is without an example, the fixed ones alone counted."""
        self._skip_if_unusable()
        if self.laws:
            pytest.skip("only some laws are tried")
        uncovered = type(self).suite_run().uncovered_by_directed_cases()
        assert not uncovered, f"declared, but in no example: {', '.join(uncovered)}"

    def _skip_if_unusable(self) -> None:
        reason = why_unusable(type(self)._settings()[0])
        if reason is not None:
            pytest.skip(reason)
