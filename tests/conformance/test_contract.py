"""The contract class for pytest, and the function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.odd_backends import CUDAOnlyBackend, MissingBackend, NarrowBackend, WrongBackend

from jackfield.conformance.attention.contract import AttentionContract, assert_conforms
from jackfield.conformance.attention.suite import SuiteRun
from jackfield.core.errors import ConfigError

ONLY = {"dtype": ("float16",), "batch": ("decode",), "head_size": ("8",)}


class Parent(AttentionContract):
    backend = NarrowBackend
    scale = "tiny"
    laws: ClassVar[Sequence[str]] = ("meaning",)


class Same(Parent):
    pass


class OtherLaws(Parent):
    laws = ("repeat", "write_kv")


class OtherSettings(Parent):
    seed = 5
    profile = "full"
    only = ONLY
    reproducers = Path("found")


def test_a_subclass_has_settings_of_its_own() -> None:
    run = Parent.suite_run()
    assert Parent.suite_run() is run
    assert Same.suite_run() is run
    assert [law.name for law in OtherLaws.suite_run().laws] == ["repeat", "write_kv"]
    other = OtherSettings.suite_run()
    assert (other.options.seed, other.options.profile) == (5, "full")
    assert other.options.reproducers == Path("found")
    assert other.axes.dtype == (torch.float16,)
    assert Parent.suite_run() is run


def test_settings_may_change_before_the_first_test() -> None:
    class Changed(AttentionContract):
        backend = NarrowBackend
        scale = "tiny"

    first = Changed.suite_run()
    Changed.seed = 9
    assert Changed.suite_run() is not first
    assert Changed.suite_run().options.seed == 9


def test_a_class_without_a_backend_is_refused() -> None:
    class Nothing(AttentionContract):
        pass

    with pytest.raises(TypeError, match="Nothing has to set `backend`"):
        Nothing.suite_run()


class TestMissing(AttentionContract):
    backend = MissingBackend
    laws = ("meaning", "repeat")
    only: ClassVar[Mapping[str, Sequence[str]]] = {"dtype": ("float16",)}

    @classmethod
    def suite_run(cls) -> SuiteRun:
        raise AssertionError("a backend that is missing is run")


class WithoutGPU(AttentionContract):
    backend = CUDAOnlyBackend
    device = "cuda"


def test_without_a_gpu_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception, match="torch finds no GPU"):
        WithoutGPU().test_law(None)


class TestElsewhere(AttentionContract):
    backend = CUDAOnlyBackend
    laws = ("meaning", "repeat")

    @classmethod
    def suite_run(cls) -> SuiteRun:
        raise AssertionError("a backend is run on a device that it does not support")


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        (TestMissing, "cannot run here: the library absent_kernels is not installed"),
        (TestElsewhere, r"does not support --device cpu \(supported: cuda\)"),
    ],
)
def test_what_cannot_run_is_skipped_with_the_reason(
    contract: type[AttentionContract], reason: str
) -> None:
    with pytest.raises(pytest.skip.Exception, match=reason):
        contract().test_law(None)
    with pytest.raises(pytest.skip.Exception, match=reason):
        contract().test_everything_declared_is_exercised()


class Metafunc:
    """What pytest gives to ``pytest_generate_tests``, as far as it is used."""

    fixturenames = ("law_and_dtype",)

    def parametrize(self, name: str, values: list[object], ids: list[str]) -> None:
        """Keep the names."""
        assert len(values) == len(ids)
        self.ids = ids


def collected(contract: type[AttentionContract]) -> list[str]:
    metafunc = Metafunc()
    contract().pytest_generate_tests(metafunc)  # type: ignore[arg-type]
    return metafunc.ids


def test_collection_runs_nothing_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable(NarrowBackend):
        def __init__(self, *args: object) -> None:
            raise AssertionError("constructed")

    class Slow(AttentionContract):
        backend = Untouchable
        laws = ("meaning", "refusals")
        only: ClassVar[Mapping[str, Sequence[str]]] = {"dtype": ("float32", "float16")}

    assert collected(Slow) == ["meaning-float32", "meaning-float16", "refusals-float32"]
    assert collected(TestMissing) == ["meaning", "repeat"]


def test_unknown_settings_are_an_error_and_not_skipped() -> None:
    class Misspelt(Parent):
        laws = ("meanings",)

    with pytest.raises(ConfigError, match="--law 'meanings' is unknown"):
        collected(Misspelt)


class TestNarrow(AttentionContract):
    """The contract as it is used: two laws on a right backend."""

    backend = NarrowBackend
    scale = "tiny"
    only = ONLY
    laws = ("write_kv", "repeat")


def test_the_function_takes_a_scale_and_writes_reproducers(tmp_path: Path) -> None:
    report = assert_conforms(NarrowBackend, scale="tiny", only=ONLY, laws=["write_kv"])
    assert report.profile == "quick, tiny cases"
    with pytest.raises(AssertionError, match=r"WrongBackend does not conform:\n\nmeaning") as error:
        assert_conforms(
            WrongBackend, scale="tiny", only=ONLY, laws=["meaning"], reproducers=tmp_path
        )
    (file,) = tmp_path.iterdir()
    assert re.search(r"reproducer: .*\.py", str(error.value))
    assert file.name in str(error.value)
    with pytest.raises(ConfigError, match="absent_kernels"):
        assert_conforms(MissingBackend)
