"""Compiles the kernels of the ``triton`` backend for a GPU that is not there; run as a script.

Triton's interpreter accepts more than its compiler does. Prints the names of what was compiled, one
a line; a failure ends the script with Triton's own message.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from jackfield.backends.triton_paged import decode_kernel, prefill_kernel, store_kernel
from jackfield.backends.triton_paged.layer import layer_constants
from jackfield.backends.triton_paged.store import KernelStore
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.core.attention import AttentionSpec, KVCacheSpec

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
LISTS = {"items": "*i32", "table": "*i32", "arrivals": "*i32", "slots": "*i64"}
NUMBERS = {"lse", "sinks", "slopes", "partial_out", "partial_sums"}
KERNELS = {
    "prefill": prefill_kernel.prefill_kernel,
    "decode": decode_kernel.decode_kernel,
    "store": store_kernel.store_kernel,
}
LAYER = AttentionSpec(28, 4, 128, 128, 0.1, torch.bfloat16)
FP8 = torch.float8_e4m3fn
#: Name, layer, block size, dtype of the cache.
LAYERS: list[tuple[str, AttentionSpec, int, torch.dtype]] = [
    ("block size 16", LAYER, 16, LAYER.dtype),
    ("block size 8", LAYER, 8, LAYER.dtype),
    ("block size 128", LAYER, 128, LAYER.dtype),
    ("float32", replace(LAYER, dtype=torch.float32), 16, torch.float32),
    (
        "padded",
        replace(LAYER, head_size=80, v_head_size=72, dtype=torch.float16),
        32,
        torch.float16,
    ),
    (
        "every feature",
        replace(LAYER, sliding_window=9, logits_soft_cap=5.0, sinks=True, causal=False),
        32,
        LAYER.dtype,
    ),
    ("8 bits", LAYER, 16, FP8),
    ("8 bits and float32", replace(LAYER, dtype=torch.float32), 32, FP8),
]
#: What is compiled to machine code, which takes seconds; all else to the compiler's first form.
TO_THE_END = {("block size 16", "prefill"), ("block size 16", "decode"), ("8 bits", "decode")}


def source_of(
    kind: str, spec: AttentionSpec, block_size: int, stored: torch.dtype
) -> tuple[Any, dict[str, int]]:
    """The source of a kernel with the kinds of arguments that the backend gives, and options."""
    sizes = (spec.num_kv_heads, spec.head_size, spec.v_head_size)
    cache = KVCacheSpec(64, block_size, *sizes, stored)
    constants = layer_constants(spec, cache, torch.device("cpu"), TritonOptions(), False)
    compiled: dict[str, Any] = {"unit": 8, "cache_unit": 8}
    if kind == "store":
        compiled |= KernelStore(cache, torch.device("cpu")).launch_options(spec.dtype)
    else:
        compiled |= {**getattr(constants, kind), "one_layout": True}
    options: dict[str, int] = {
        name: compiled.pop(name)
        for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        if name in compiled
    }
    kernel = KERNELS[kind]
    signature = {}
    aligned = {}
    for index, name in enumerate(kernel.arg_names):
        if name in compiled:
            signature[name] = "constexpr"
        elif name in ("factor", "cap", "k_scale", "v_scale"):
            signature[name] = "fp32"
        elif name in LISTS or name in NUMBERS:
            signature[name] = LISTS.get(name, "*fp32")
        elif name in ("k_cache", "v_cache"):
            signature[name] = "*u8" if (kind, stored) == ("store", FP8) else POINTERS[stored]
        elif name in ("query", "key", "value", "out"):
            signature[name] = POINTERS[spec.dtype]
        else:
            signature[name] = "i32"
        if signature[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, compiled, aligned), options


def main() -> None:
    """Compile them all."""
    backend = triton.compiler.make_backend(TARGET)
    for name, spec, block_size, stored in LAYERS:
        for kind in KERNELS:
            source, options = source_of(kind, spec, block_size, stored)
            if (name, kind) in TO_THE_END:
                assert triton.compile(source, target=TARGET, options=options).asm["cubin"]
            else:
                context = triton._C.libtriton.ir.context()
                triton._C.libtriton.ir.load_dialects(context)
                backend.load_dialects(context)
                parsed = backend.parse_options(options)
                functions = backend.get_codegen_implementation(parsed)
                module = source.make_ir(
                    TARGET, parsed, functions, backend.get_module_map(), context
                )
                assert module.verify()
            print(f"{name} {kind}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
