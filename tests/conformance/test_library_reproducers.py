"""The reproducers of faults in libraries: what they say where they cannot run, and what they find.

In place of the libraries stand functions that have the fault, and the same functions without it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import flashinfer_double, flashinfer_kernels_double
from support.flash_attn_cpu import double as flash_attn_library  # noqa: F401 - a fixture
from support.flashinfer_cases import library as flashinfer_library  # noqa: F401 - a fixture
from torch import Tensor

from jackfield.conformance.attention.subject import Subject
from jackfield.conformance.attention.suite import SuiteOptions, run_suite
from jackfield.conformance.results import Status
from jackfield.core.attention import AttentionSpec, Capabilities, KVCacheSpec

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "conformance" / "reproducers").glob("*.py"))
#: The top-level module that each file may import, by the beginning of its name.
LIBRARIES = {"flash_attn": "flash_attn", "flashinfer": "flashinfer", "xformers": "xformers"}


def test_the_page_names_every_file() -> None:
    page = (DOCS / "backends.md").read_text(encoding="utf-8")
    named = re.findall(r"conformance/reproducers/(\w+\.py)", page)
    assert sorted(set(named)) == [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_stands_alone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    imported |= set(re.findall(r'import_module\("(\w+)', text))
    own = {module for name, module in LIBRARIES.items() if path.stem.startswith(name)}
    assert imported - {"importlib", "inspect", "math", "sys", "typing"} == {"torch"} | own


def test_without_a_library_or_a_gpu_the_status_is_2() -> None:
    code = (
        "import runpy, sys, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "for name in ('flash_attn', 'flashinfer', 'xformers'): sys.modules[name] = None\n"
        f"for path in {[str(path) for path in FILES]}:\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end: print('status', end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["status 2"] * len(FILES)
    for line in lines[::2]:
        assert re.search(r"is not here: |torch finds no GPU$|takes no pages$", line)


def status_of(
    name: str, monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any], **constants: int
) -> int:
    """What a file's ``main`` returns on a CPU with doubles of some modules."""
    path = DOCS / "conformance" / "reproducers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for constant, value in {"DEVICE": "cpu", **constants}.items():
        monkeypatch.setattr(module, constant, value)
    for one, double in modules.items():
        package = one
        while package := package.rpartition(".")[0]:
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, one, double)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    return int(module.main())


both = pytest.mark.parametrize("faulty", [True, False], ids=["faulty", "sound"])


@both
def test_the_lse_of_rows_without_keys(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, rows: int, *_: Any,
        return_attn_probs: bool, block_table: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads = q.shape[1]
        lse = key_starts.diff().float().log().repeat_interleave(rows).repeat(heads, 1)
        if faulty:
            for index in (key_starts.diff() == 0).nonzero().flatten().tolist():
                for head in range(heads):
                    first = (index * heads + head) * rows
                    lse.view(-1)[first : first + rows] = torch.inf
        return q, lse

    double = SimpleNamespace(flash_attn_varlen_func=varlen)
    modules = {"flash_attn.flash_attn_interface": double}
    assert status_of("flash_attn_keyless_lse", monkeypatch, modules) == int(faulty)


@both
def test_the_lse_of_alibi(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(q: Tensor, *_: Any, alibi_slopes: Tensor, **__: Any) -> tuple[Tensor, Tensor]:
        row, key = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
        bias = alibi_slopes * (key if faulty else key - row)
        return q, torch.logsumexp(bias.masked_fill(key > row, -torch.inf), dim=-1)[None]

    double = SimpleNamespace(flash_attn_varlen_func=varlen)
    modules = {"flash_attn.flash_attn_interface": double}
    assert status_of("flash_attn_alibi_lse", monkeypatch, modules) == int(faulty)


def test_a_build_without_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(*_: Any, **__: Any) -> None:
        raise RuntimeError("This flash attention build does not support alibi.")

    double = SimpleNamespace(flash_attn_varlen_func=varlen)
    modules = {"flash_attn.flash_attn_interface": double}
    assert status_of("flash_attn_alibi_lse", monkeypatch, modules) == 2


@both
def test_the_value_of_masks(faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not faulty:
        monkeypatch.setattr(flashinfer_kernels_double, "INFINITY", 1e30)
    modules = {"flashinfer": flashinfer_double.make_double(tmp_path)}
    assert status_of("flashinfer_mask_value", monkeypatch, modules) == int(faulty)


@pytest.fixture
def with_changed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Any, list[Any]], None]], dict[str, Any]]:
    """The double of flashinfer with another ``paged_run``, which is given the one it replaces."""
    real = flashinfer_kernels_double.KernelModuleDouble.paged_run

    def changed(run: Callable[[Any, list[Any]], None]) -> dict[str, Any]:
        def paged_run(module: Any, *arguments: Any) -> None:
            run(lambda changed: real(module, *changed), list(arguments))

        kind = flashinfer_kernels_double.KernelModuleDouble
        monkeypatch.setattr(kind, "paged_run", paged_run)
        return {"flashinfer": flashinfer_double.make_double(tmp_path)}

    return changed


#: Where ``paged_run`` has its tensors.
_QUERY, _OUT, _LSE = 3, 10, 11


@both
def test_results_that_are_not_packed(
    faulty: bool, with_changed_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(real: Callable[[list[Any]], None], arguments: list[Any]) -> None:
        wanted = arguments[_OUT], arguments[_LSE]
        for place, one in zip((_OUT, _LSE), wanted, strict=True):
            if one is not None:
                arguments[place] = torch.empty(one.shape, dtype=one.dtype)
                if faulty:
                    strides = arguments[place].stride()
                    arguments[place] = one.as_strided(one.shape, strides)
        real(arguments)
        for place, one in zip((_OUT, _LSE), wanted, strict=True):
            if one is not None and not faulty:
                one.copy_(arguments[place])

    modules = with_changed_run(run)
    assert status_of("flashinfer_packed_results", monkeypatch, modules) == int(faulty)


@both
def test_rows_that_are_far_apart(
    faulty: bool, with_changed_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = 1 << 10

    def run(real: Callable[[list[Any]], None], arguments: list[Any]) -> None:
        query = arguments[_QUERY]
        if faulty and query.stride(0) == apart:
            arguments[_QUERY] = query[[0, 1, 0]]
        real(arguments)

    modules = with_changed_run(run)
    found = status_of("flashinfer_row_addresses", monkeypatch, modules, APART=apart)
    assert found == int(faulty)


@both
def test_a_last_page_that_is_too_long(
    faulty: bool, with_changed_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(real: Callable[[list[Any]], None], arguments: list[Any]) -> None:
        if not faulty:
            raise ValueError("last_page_len is larger than page_size")
        arguments[_OUT].fill_(1 / 3)

    modules = with_changed_run(run)
    assert status_of("flashinfer_last_page_len", monkeypatch, modules) == int(faulty)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of rows ``[R, N, H]`` without a mask."""
    q, k, v = (one.transpose(0, 1).float() for one in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(0, 1)


def odd_rows(kind: str, query: Tensor) -> Tensor:
    """The query as a kernel sees it that reads rows at odd addresses in some way."""
    if query.stride(0) % 8 == 0:
        return query
    if kind == "crash":
        raise RuntimeError("CUDA error: misaligned address\nCUDA kernel errors might be ...")
    if kind == "refusal":
        raise RuntimeError("query is not correctly aligned")
    return query.flip(0) if kind == "wrong" else query


kinds = pytest.mark.parametrize(
    ("kind", "status"), [("crash", 1), ("wrong", 1), ("refusal", 0), ("sound", 0)]
)


@kinds
def test_odd_rows_in_xformers(kind: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(inputs: Any, needs_gradient: bool) -> tuple[Tensor, None]:
        q = odd_rows(kind, inputs.query[0])
        return dense(q, inputs.key[0], inputs.value[0], inputs.scale)[None], None

    fmha = SimpleNamespace(Inputs=SimpleNamespace, cutlass=SimpleNamespace(FwOp=SimpleNamespace))
    fmha.cutlass.FwOp = SimpleNamespace(apply=apply)
    modules = {"xformers.ops.fmha": fmha}
    assert status_of("xformers_unaligned_query", monkeypatch, modules) == status


@kinds
def test_odd_rows_in_torch(kind: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return dense(odd_rows(kind, q), k, v, 0.125)

    modules = {"torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen_attn)}
    assert status_of("torch_varlen_unaligned_query", monkeypatch, modules) == status


@pytest.mark.parametrize(("kind", "status"), [("unwritten", 1), ("sound", 0), ("refusal", 0)])
def test_pages_and_splits_in_torch(kind: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *_: Any,
        seqused_k: Tensor, block_table: Tensor, num_splits: int,
    ) -> Tensor:  # fmt: skip
        if kind == "refusal":
            raise RuntimeError("num_splits > 1 is not supported with a block_table")
        out = torch.zeros_like(q)
        for index, first in enumerate(starts[:-1].tolist()):
            rows = slice(first, int(starts[index + 1]))
            keys, values = (one[block_table[index].long()].flatten(0, 1) for one in (k, v))
            if index == 0 or kind == "sound":
                out[rows] = dense(q[rows], keys, values, 0.125).to(q.dtype)
        return out

    modules = {"torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen_attn)}
    assert status_of("torch_varlen_paged_splits", monkeypatch, modules) == status


def on_a_cpu(lifted: Any) -> Any:
    """A backend of the page, declared for the CPU, where the double of its library is."""

    class OnCpu(lifted):  # type: ignore[misc]
        @classmethod
        def capabilities(cls, device: torch.device) -> Capabilities:
            real: Capabilities = super().capabilities(torch.device("cuda"))
            return replace(real, device_types=frozenset({"cpu"}), missing=None)

        @classmethod
        def unsupported(
            cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device
        ) -> list[str]:
            return cls.capabilities(device).unsupported(spec, cache, device)

    return OnCpu


@pytest.mark.parametrize("name", ["UnlimitedScores", "BareAlibi"])
@pytest.mark.usefixtures("flash_attn_library", "flashinfer_library")
def test_the_suite_shows_what_a_lifted_refusal_kept_away(name: str, tmp_path: Path) -> None:
    page = (DOCS / "backends.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# lifted\.py\n.*?)```", page, re.DOTALL)
    (command,) = re.findall(rf"^jackfield .*lifted:{name} .*$", page, re.MULTILINE)
    words = shlex.split(command)
    only = dict(words[place + 1].split("=") for place, one in enumerate(words) if one == "--only")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    options = SuiteOptions(
        laws=(words[words.index("--law") + 1],),
        only={axis: (value,) for axis, value in only.items()} | {"dtype": ("bfloat16",)},
        scale="tiny",
        jobs=1,
        reproducers=tmp_path,
    )
    report = run_suite(Subject(on_a_cpu(namespace[name]), torch.device("cpu")), options)
    (result,) = report.results
    assert result.status is Status.FAILED
    assert "where rounding explains" in result.reason
    assert Path(result.reproducer).parent == tmp_path
