"""flash-attn 2: packed queries over a paged cache, one sequence of which has no keys.

The LSE of that sequence's rows is stored where it would be in a padded batch, which here is the
place of another sequence's rows. That sequence is early in a large batch, so that its own LSE is
there already. Seen in version 2.8.3.post2.

Exit status: 1 if the fault shows, 0 if not, 2 if the library or a GPU is missing or the library
cannot run here.
"""

import importlib
import math
import sys

import torch

DEVICE = "cuda"
SEQUENCES, KEYLESS, ROWS, HEADS, PAGE = 4096, 2048, 2, 2, 256


def main() -> int:
    try:
        flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError as error:
        print(f"flash-attn is not here: {error}")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    # Scores of 0: the LSE of a row is the logarithm of the number of its keys, all in one page.
    query = torch.zeros(SEQUENCES * ROWS, HEADS, 64, dtype=torch.float16, device=DEVICE)
    keys = torch.zeros(1, PAGE, HEADS, 64, dtype=torch.float16, device=DEVICE)
    table = torch.zeros(SEQUENCES, 1, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32, device=DEVICE)
    key_starts = (starts - (starts > KEYLESS).int()) * PAGE
    lse = flash_attn.flash_attn_varlen_func(
        query, keys, keys, starts * ROWS, key_starts, ROWS, PAGE,
        return_attn_probs=True, block_table=table,
    )[1].cpu()  # fmt: skip
    wrong = ~((lse - math.log(PAGE)).abs() < 1e-3)
    wrong[:, KEYLESS * ROWS : (KEYLESS + 1) * ROWS] = False
    for head, row in wrong.nonzero().tolist():
        print(f"head {head}, row {row}: LSE {lse[head, row]:.4f}, not {math.log(PAGE):.4f}")
    return 1 if bool(wrong.any()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
