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
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.core.attention import AttentionSpec, KVCacheSpec

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
LISTS = {"items": "*i32", "table": "*i32", "arrivals": "*i32", "slots": "*i64"}
NUMBERS = {"lse", "sinks", "slopes", "partial_out", "partial_sums"}
KERNELS = {
    "prefill": prefill_kernel.prefill_kernel,
    "decode": decode_kernel.decode_kernel,
    "store": store_kernel.store_kernel,
}
LAYER = AttentionSpec(28, 4, 128, 128, 0.1, torch.bfloat16)
#: Name, layer, block size.
LAYERS: list[tuple[str, AttentionSpec, int]] = [
    ("block size 16", LAYER, 16),
    ("block size 8", LAYER, 8),
    ("block size 128", LAYER, 128),
    ("float32", replace(LAYER, dtype=torch.float32), 16),
    ("padded", replace(LAYER, head_size=80, v_head_size=72, dtype=torch.float16), 32),
    (
        "every feature",
        replace(LAYER, sliding_window=9, logits_soft_cap=5.0, sinks=True, causal=False),
        32,
    ),
]
#: What is compiled to machine code, which takes seconds; all else to the compiler's first form.
TO_THE_END = {("block size 16", "prefill"), ("block size 16", "decode")}


def source_of(kind: str, spec: AttentionSpec, block_size: int) -> tuple[Any, dict[str, int]]:
    """The source of a kernel with the kinds of arguments that the backend gives, and options."""
    sizes = (spec.num_kv_heads, spec.head_size, spec.v_head_size)
    cache = KVCacheSpec(64, block_size, *sizes, spec.dtype)
    constants = layer_constants(spec, cache, torch.device("cpu"), TritonOptions(), False)
    compiled = {**getattr(constants, kind), "unit": 8}
    compiled |= {"convert": False} if kind == "store" else {"one_layout": True}
    options = {
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
        elif name in ("factor", "cap"):
            signature[name] = "fp32"
        elif name in LISTS or name in NUMBERS:
            signature[name] = LISTS.get(name, "*fp32")
        elif name in ("query", "key", "value", "k_cache", "v_cache", "out"):
            signature[name] = POINTERS[spec.dtype]
        else:
            signature[name] = "i32"
        if signature[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, compiled, aligned), options


def main() -> None:
    """Compile them all."""
    backend = triton.compiler.make_backend(TARGET)
    for name, spec, block_size in LAYERS:
        for kind in KERNELS:
            source, options = source_of(kind, spec, block_size)
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
