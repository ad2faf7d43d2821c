"""flash-attn 2: ALiBi in a causal layer without a window.

Documented is a bias of ``-slope * |i + keys - queries - j|``. Added is ``slope * j``, which gives
the same weights, rounded more, and another LSE. Seen in the sources of version 2.8.3.post2.

Exit status: 1 if the fault shows, 0 if not, 2 if the library, its ALiBi or a GPU is missing.
"""

import importlib
import sys

import torch

DEVICE = "cuda"
ROWS, SLOPE = 32, 0.5


def main() -> int:
    try:
        flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError as error:
        print(f"flash-attn is not here: {error}")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    # Scores of 0: what is left is the bias.
    query = torch.zeros(ROWS, 1, 64, dtype=torch.float16, device=DEVICE)
    starts = torch.tensor([0, ROWS], dtype=torch.int32, device=DEVICE)
    slopes = torch.tensor([SLOPE], dtype=torch.float32, device=DEVICE)
    try:
        lse = flash_attn.flash_attn_varlen_func(
            query, query, query, starts, starts, ROWS, ROWS,
            causal=True, alibi_slopes=slopes, return_attn_probs=True,
        )[1].cpu()[0]  # fmt: skip
    except RuntimeError as error:
        print(f"this build of flash-attn has no ALiBi: {error}")
        return 2
    rows, keys = torch.arange(ROWS)[:, None], torch.arange(ROWS)[None]
    bias = -SLOPE * (rows - keys).abs().double()
    expected = torch.logsumexp(bias.masked_fill(keys > rows, -torch.inf), dim=-1)
    off = (lse.double() - expected).abs()
    row = int(off.argmax())
    print(f"row {row}: the LSE is {float(lse[row]):.4f}; by the definition {expected[row]:.4f}")
    return 1 if not float(off.max()) < 1e-2 else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
