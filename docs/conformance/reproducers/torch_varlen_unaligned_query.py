"""torch, varlen_attn: query rows that begin at odd addresses are read 16 bytes at a time.

Nothing between the function and the kernel looks at the distance of rows. Seen in torch 2.11.

Exit status: 1 if the fault shows, 0 if not, 2 if the function or a GPU is missing.
"""

import importlib
import sys

import torch

DEVICE = "cuda"
ROWS, HEADS, HEAD_SIZE = 32, 2, 64


def main() -> int:
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        print(f"this torch has no varlen_attn: {error}")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    dtype, row = torch.float16, HEADS * HEAD_SIZE
    keys, values = torch.randn(2, ROWS, HEADS, HEAD_SIZE, dtype=dtype, device=DEVICE)
    rows = torch.randn(ROWS * (row + 1), dtype=dtype, device=DEVICE)
    query = rows.as_strided((ROWS, HEADS, HEAD_SIZE), (row + 1, HEAD_SIZE, 1))
    starts = torch.tensor([0, ROWS], dtype=torch.int32, device=DEVICE)

    def attend(one: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = varlen.varlen_attn(one, keys, values, starts, starts, ROWS, ROWS)
        return result.float().cpu()

    expected = attend(query.contiguous())
    try:
        result = attend(query)
    except (RuntimeError, ValueError) as error:
        fault = "CUDA error" in str(error)
        text = str(error).splitlines()[0]
        print(f"the kernel failed: {text}" if fault else f"refused, as it should be: {text}")
        return 1 if fault else 0
    off = float((result - expected).abs().max())
    print(f"off by {off:.4f} from the same rows in a packed copy")
    return 1 if not off < 1e-2 else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
