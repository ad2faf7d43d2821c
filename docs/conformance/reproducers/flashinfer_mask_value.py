"""flashinfer, fa2: -50,000, before the scale, stands for minus infinity.

With a small scale, keys that causality hides get weight. And a row whose scores are all below
-50,000 before the scale comes out as zero. Seen in version 0.6.13.

Exit status: 1 if the fault shows, 0 if not, 2 if the library or a GPU is missing or the library
cannot run here.
"""

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda"
ROWS, HEAD_SIZE = 16, 64


def attend(library: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> float:
    """The first element of the first row, which sees the first key only."""
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    borders = ([0, ROWS], [0, 1], [0], [ROWS])
    arrays = [torch.tensor(one, dtype=torch.int32) for one in borders]
    dtype = torch.float16
    wrapper.plan(
        *arrays, 1, 1, HEAD_SIZE, ROWS, HEAD_SIZE, causal=True, sm_scale=scale, q_data_type=dtype,
        kv_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip
    return float(wrapper.run(query, (keys[None], values[None]))[0, 0, 0])


def main() -> int:
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        print(f"flashinfer is not here: {error}")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    zeros = torch.zeros(ROWS, 1, HEAD_SIZE, dtype=torch.float16, device=DEVICE)
    hidden = torch.ones_like(zeros)
    hidden[0] = 0
    leaked = attend(library, zeros, zeros, hidden, 1e-4)
    print(f"scale 0.0001: hidden keys contribute {leaked:.4f} to a row that is 0")
    low = attend(library, zeros + 100, zeros - 100, torch.ones_like(zeros), HEAD_SIZE**-0.5)
    print(f"scores of -80,000: a mean of ones is {low:.4f}")
    return 0 if abs(leaked) < 1e-3 and abs(low - 1) < 1e-3 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
