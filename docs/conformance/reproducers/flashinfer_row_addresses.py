"""flashinfer, fa2: a query row is looked for at ``row * stride`` in 32 bits.

Rows that are 2**31 elements apart: the third one is taken for the first. Seen in version 0.6.13.
Takes 9 GB of the GPU's memory.

Exit status: 1 if the fault shows, 0 if not, 2 if the library, a GPU or memory is missing.
"""

import importlib
import sys

import torch

DEVICE = "cuda"
ROWS, HEAD_SIZE, APART = 3, 64, 2**31


def main() -> int:
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        print(f"flashinfer is not here: {error}")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    needed = 2 * (2 * APART + HEAD_SIZE)
    if torch.cuda.mem_get_info()[0] < needed + (1 << 29):
        print(f"{needed / 1e9:.1f} GB of free memory are needed")
        return 2
    dtype = torch.float16
    far = torch.empty(needed // 2, dtype=dtype, device=DEVICE)
    query = far.as_strided((ROWS, 1, HEAD_SIZE), (APART, HEAD_SIZE, 1))
    query.copy_(torch.randn(query.shape, dtype=dtype, device=DEVICE))
    keys, values = torch.randn(2, 1, 16, 1, HEAD_SIZE, dtype=dtype, device=DEVICE)
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    rows, pages, last = (torch.tensor(one, dtype=torch.int32) for one in ([0, ROWS], [0, 1], [16]))
    block = torch.zeros(1, dtype=torch.int32)
    wrapper.plan(
        rows, pages, block, last, 1, 1, HEAD_SIZE, 16, HEAD_SIZE, causal=False, sm_scale=1.0,
        q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype,
    )  # fmt: skip
    expected = wrapper.run(query.contiguous(), (keys, values)).float()
    result = wrapper.run(query, (keys, values)).float()
    wrong = 0
    for row in range(ROWS):
        off = float((result[row] - expected[row]).abs().max())
        wrong += not off < 1e-2
        print(f"row {row}: off by {off:.4f} from the same row in a packed copy")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
