"""torch, varlen_attn: pages together with more than one split (pytorch/pytorch#194167).

The rows of all sequences but the first are left unwritten. Reported for torch 2.13.

Exit status: 1 if the fault shows, 0 if not, 2 if the function, its pages or a GPU is missing.
"""

import importlib
import inspect
import sys

import torch

DEVICE = "cuda"
SEQUENCES, QUERY_LEN, KEY_LEN, PAGE = 3, 2, 1024, 256


def main() -> int:
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        print(f"this torch has no varlen_attn: {error}")
        return 2
    if not {"block_table", "num_splits"} <= set(inspect.signature(varlen.varlen_attn).parameters):
        print(f"varlen_attn of torch {torch.__version__} takes no pages")
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU")
        return 2
    pages = KEY_LEN // PAGE
    # Scores of 0, and all values of a sequence its number, from 1: that is the result.
    query = torch.zeros(SEQUENCES * QUERY_LEN, 1, 64, dtype=torch.float16, device=DEVICE)
    keys = torch.zeros(SEQUENCES * pages, PAGE, 1, 64, dtype=torch.float16, device=DEVICE)
    numbers = torch.arange(SEQUENCES, device=DEVICE) + 1
    values = keys + numbers.repeat_interleave(pages)[:, None, None, None].half()
    table = torch.arange(SEQUENCES * pages, dtype=torch.int32, device=DEVICE).view(SEQUENCES, -1)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((SEQUENCES,), KEY_LEN, dtype=torch.int32, device=DEVICE)
    borders = (starts * QUERY_LEN, starts * KEY_LEN, QUERY_LEN, KEY_LEN)
    try:
        result = varlen.varlen_attn(
            query, keys, values, *borders, seqused_k=lengths, block_table=table, num_splits=4
        )
    except (RuntimeError, ValueError) as error:
        print(f"refused, as it should be: {str(error).splitlines()[0]}")
        return 0
    found = result[::QUERY_LEN, 0, 0].tolist()
    print(f"the sequences' results are {found}, and should be {numbers.tolist()}")
    return 1 if not bool((result[:, 0, 0] == numbers.repeat_interleave(QUERY_LEN)).all()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
        sys.exit(1 if "CUDA error" in str(problem) else 2)
