"""flashinfer, fa2: ``last_page_len`` above the page size is accepted.

The first sequence then reads keys of the second one's page. Seen in version 0.6.13.

Exit status: 1 if the fault shows, 0 if not, 2 if the library or a GPU is missing or the library
cannot run here.
"""

import importlib
import sys

import torch

DEVICE = "cuda"
PAGE, HEAD_SIZE = 16, 64


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
    # Scores of 0, and values of 0 in the first page, 1 in the second.
    query = torch.zeros(2, 1, HEAD_SIZE, dtype=dtype, device=DEVICE)
    keys = torch.zeros(2, PAGE, 1, HEAD_SIZE, dtype=dtype, device=DEVICE)
    values = torch.arange(2, device=DEVICE).view(2, 1, 1, 1).expand_as(keys).to(dtype).contiguous()
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    rows, pages, blocks, last = (
        torch.tensor(one, dtype=torch.int32)
        for one in ([0, 1, 2], [0, 1, 2], [0, 1], [PAGE + 8, PAGE])
    )
    try:
        wrapper.plan(
            rows, pages, blocks, last, 1, 1, HEAD_SIZE, PAGE, HEAD_SIZE, causal=False, sm_scale=1.0,
            q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype,
        )  # fmt: skip
        result = float(wrapper.run(query, (keys, values))[0, 0, 0])
    except (RuntimeError, ValueError) as error:
        if "CUDA error" in str(error):
            print(f"the kernel failed: {error}")
            return 1
        print(f"refused, as it should be: {error}")
        return 0
    print(f"accepted; the mean of a page of zeros is {result:.4f}")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
