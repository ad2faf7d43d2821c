"""flashinfer, fa2: ``out`` and ``lse`` of ``run`` are written as if they were packed.

Slices of larger tensors are accepted, and rows are stored at places that follow from the shape, not
from the strides. Seen in version 0.6.13.

Exit status: 1 if the fault shows, 0 if not, 2 if the library or a GPU is missing or the library
cannot run here.
"""

import importlib
import sys

import torch

DEVICE = "cuda"
ROWS, HEADS, HEAD_SIZE = 4, 2, 64


def main() -> int:
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        print(f"flashinfer is not here: {error}")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    dtype = torch.float16
    query = torch.randn(ROWS, HEADS, HEAD_SIZE, dtype=dtype, device=DEVICE)
    keys, values = torch.randn(2, 1, 16, HEADS, HEAD_SIZE, dtype=dtype, device=DEVICE)
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    borders = ([0, ROWS], [0, 1], [0], [16])
    arrays = [torch.tensor(one, dtype=torch.int32) for one in borders]
    wrapper.plan(
        *arrays, HEADS, HEADS, HEAD_SIZE, 16, HEAD_SIZE, sm_scale=0.125,
        q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip
    expected = wrapper.run(query, (keys, values), return_lse=True)
    out = torch.zeros(ROWS, 2 * HEADS, HEAD_SIZE, dtype=dtype, device=DEVICE)[:, :HEADS]
    lse = torch.zeros(ROWS, 2 * HEADS, device=DEVICE)[:, :HEADS]
    try:
        wrapper.run(query, (keys, values), out=out, lse=lse, return_lse=True)
    except (RuntimeError, ValueError) as error:
        print(f"refused, as it should be: {error}")
        return 0
    wrong_out = float((out - expected[0]).abs().max())
    wrong_lse = float((lse - expected[1]).abs().max())
    print(f"off by {wrong_out:.4f} in a slice for the output, {wrong_lse:.4f} in one for the LSE")
    return 0 if wrong_out < 1e-2 and wrong_lse < 1e-2 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
