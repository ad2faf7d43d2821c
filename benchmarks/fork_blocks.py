"""What sharing blocks saves when one prompt has several continuations.

    python benchmarks/fork_blocks.py --output benchmarks/results/fork_blocks.json

**Groups.** A prompt with ``n=4``, sampled, against four requests with the same prompt, prefix
caching off: the most blocks that were in use in any step, and the blocks that were copied because
one of several holders was about to write (copy-on-write). The completions must be those of the
block manager ``contiguous``, which shares nothing.

**Beams.** What beam search does: a request that has been decoding for a while is forked into four
that go on with different tokens, and ends itself; after some steps one of the four is forked in the
same way, and the others are dropped. This uses the block manager, batch assembler and model runner
of an engine without its scheduler, which forks at the end of a prompt only. After every round each
branch must have the tokens and the cache contents, in all layers, of the same tokens computed alone
by another engine; at the end all blocks must be free.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reporting import write_report
from torch import Tensor

from jackfield import LLM, LLMEngine, SamplingParams
from jackfield.core.batch import BatchAssembler
from jackfield.core.request import Request
from jackfield.core.scheduler import KVMove, MoveKind, ScheduledRequest, StepPlan

WIDTH = 4
MAX_MODEL_LEN = 1024
MANAGERS = ("paged", "radix")
#: Largest difference of a number in the cache: another batch size sums in another order.
TOLERANCE = 1e-3


def options(model: str, block_manager: str) -> dict[str, Any]:
    """Settings of all engines: room for five requests of full length, on the CPU, in float32."""
    return {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "block_manager": block_manager,
        "block_size": 16,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": WIDTH,
        "num_gpu_blocks_override": (WIDTH + 1) * MAX_MODEL_LEN // 16,
    }


def make_prompt(num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids without meaning, the same at every call."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows: list[int] = torch.randint(
        vocab_size // 10, vocab_size // 2, (num_tokens,), generator=generator
    ).tolist()
    return rows


@dataclass(frozen=True)
class Generation:
    """What came out of an engine that did nothing else: completions, most blocks used in a step,
    blocks copied within the device, and blocks in use afterwards."""

    completions: list[list[int]]
    peak_blocks: int
    copies: int
    blocks_left: int


def generate(
    model: str, block_manager: str, prompts: Sequence[list[int]], params: SamplingParams
) -> Generation:
    """Complete prompts on an engine of their own."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "decisions.jsonl"
        llm = LLM(**options(model, block_manager), decision_log=str(log))
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    stats = llm.engine.stats()
    return Generation(
        [list(one.token_ids) for output in outputs for one in output.outputs],
        round(stats.peak_block_usage * stats.blocks.total),
        sum(record.get("copies", 0) for record in records),
        stats.blocks.used,
    )


def measure_group(
    model: str, block_manager: str, prompt: list[int], num_new: int
) -> dict[str, Any]:
    """A group against independent requests.

    Raises:
        RuntimeError: the group's completions are not those of a manager that shares nothing.
    """
    # With a few candidates only: among thousands of nearly equal ones, the rounding of another
    # batch size would decide now and then.
    common: dict[str, Any] = {"max_tokens": num_new, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(temperature=1.0, top_k=8, seed=1, n=WIDTH, **common)
    group = generate(model, block_manager, [prompt], params)
    unshared = generate(model, "contiguous", [prompt], params)
    copies = generate(model, block_manager, [prompt] * WIDTH, SamplingParams(**common))
    if group.completions != unshared.completions:
        raise RuntimeError("completions that share their prompt differ from unshared ones")
    return {
        "block_manager": block_manager,
        "prompt_tokens": len(prompt),
        "new_tokens": num_new,
        "n": WIDTH,
        "different_completions": len({tuple(one) for one in group.completions}),
        "peak_blocks": group.peak_blocks,
        "peak_blocks_independent": copies.peak_blocks,
        "copies": group.copies,
        "copies_independent": copies.copies,
        "blocks_left": group.blocks_left,
    }


class Branches:
    """Greedy decoding by hand on the parts of an engine, with forks at any time.

    Attributes:
        requests: the live ones, by name.
        peak_blocks: most blocks in use in any step since this was last set.
        copies: blocks copied because another request held them too, since this was last set.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.requests: dict[str, Request] = {}
        self.peak_blocks = 0
        self.copies = 0
        self.engine = engine
        self._manager = engine.block_manager
        self._assembler = BatchAssembler(
            2 * WIDTH, MAX_MODEL_LEN, self._manager.config.block_size, torch.device("cpu")
        )
        self._num_steps = 0

    @property
    def blocks_used(self) -> int:
        """Blocks that requests hold now."""
        return self._manager.usage().used

    def start(self, name: str, token_ids: Sequence[int]) -> None:
        """A new request without anything computed."""
        if self._manager.allocate(name, token_ids, len(token_ids)) is None:
            raise RuntimeError(f"no room for {name}")
        self.requests[name] = _request(name, token_ids, len(self.requests))

    def fork(self, parent: str, child: str, next_token: int) -> None:
        """A new request that has computed what the parent has, and goes on with another token."""
        known = self.requests[parent]
        self._manager.fork(parent, child)
        request = _request(child, known.prompt_token_ids, len(self.requests))
        request.output_token_ids = [*known.output_token_ids[:-1], next_token]
        request.num_computed_tokens = known.num_computed_tokens
        self.requests[child] = request

    def end(self, name: str) -> None:
        """Give back what a request holds."""
        self._assembler.release(name)
        self._manager.free(name)
        del self.requests[name]

    def step(self) -> None:
        """Each request computes what it has not computed yet, and gets its next token."""
        moves, scheduled = [], []
        for name, request in self.requests.items():
            copies = self._manager.append(name, request.num_tokens)
            if copies is None:
                raise RuntimeError(f"no room for {name}")
            if copies:
                moves.append(KVMove(MoveKind.COPY, copies))
            computed, new = request.num_computed_tokens, request.num_tokens_to_compute
            scheduled.append(ScheduledRequest(name, computed, new, samples=True))
        plan = StepPlan(self._num_steps, tuple(scheduled), moves=tuple(moves))
        self._num_steps += 1
        self.copies += plan.num_copies(MoveKind.COPY)
        self.peak_blocks = max(self.peak_blocks, self.blocks_used)
        inputs = self._assembler.assemble(plan, self.requests.get, self._manager)
        tokens = self.engine.model_runner.execute(inputs, plan.moves)
        self._assembler.record(inputs, tokens)
        for name, token in zip(inputs.sampled_ids, tokens, strict=True):
            request = self.requests[name]
            self._manager.commit(name, request.token_ids, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
            request.append_token(token)

    def contents(self, name: str) -> list[Tensor]:
        """Keys and values of a request's computed tokens in each layer, ``[tokens, K, H]``."""
        table = torch.from_numpy(self._manager.block_table(name).copy()).long()
        count = self.requests[name].num_computed_tokens
        return [
            tensor[table].flatten(0, 1)[:count]
            for layer in self.engine.model_runner.layers
            for tensor in (layer.cache.k, layer.cache.v)
        ]


def _request(name: str, token_ids: Sequence[int], index: int) -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(name, list(token_ids), params, 0.0, index, MAX_MODEL_LEN)


def difference_from_alone(branches: Branches, reference: LLMEngine, num_forced: int) -> float:
    """Compare each live branch with its tokens computed alone.

    Args:
        branches: after some steps.
        reference: an idle engine of the same model.
        num_forced: leading tokens that are given; those after them must be generated again.

    Returns:
        The largest difference of a number in the cache.

    Raises:
        RuntimeError: other tokens were generated, or a number differs by more than ``TOLERANCE``.
    """
    largest = 0.0
    for name, request in branches.requests.items():
        alone = Branches(reference)
        alone.start(name, request.token_ids[:num_forced])
        while alone.requests[name].num_tokens < request.num_tokens:
            alone.step()
        if alone.requests[name].token_ids != request.token_ids:
            raise RuntimeError(f"{name} has other tokens than when it is computed alone")
        for ours, theirs in zip(branches.contents(name), alone.contents(name), strict=True):
            largest = max(largest, float((ours - theirs).abs().max()))
        alone.end(name)
    if not largest <= TOLERANCE:
        raise RuntimeError(f"the cache differs by {largest} from that of the same tokens alone")
    return largest


def measure_beams(
    model: str, block_manager: str, prompt: list[int], steps: Sequence[int]
) -> tuple[list[dict[str, Any]], int]:
    """Rounds of forking one branch into four.

    Args:
        model: as for ``LLM``.
        block_manager: its name.
        prompt: of the first request.
        steps: decoding steps before the first fork, and after each one.

    Returns:
        A row for each round, and the blocks in use when all branches have ended.

    Raises:
        RuntimeError: contents are wrong, or blocks are left at the end.
    """
    branches = Branches(LLMEngine.from_options(**options(model, block_manager)))
    reference = LLMEngine.from_options(**options(model, "paged"))
    vocab_size = reference.limits.vocab_size
    branches.start("0", prompt)
    for _ in range(1 + steps[0]):
        branches.step()
    rows = []
    for number, count in enumerate(steps[1:], start=1):
        parent = list(branches.requests)[-1]
        request, dropped = branches.requests[parent], list(branches.requests)
        at_fork, next_token = request.num_computed_tokens, request.token_ids[-1]
        for index in range(WIDTH):
            branches.fork(parent, f"{number}.{index}", (next_token + index) % vocab_size)
        for name in dropped:
            branches.end(name)
        branches.peak_blocks = branches.copies = 0
        for _ in range(count):
            branches.step()
        rows.append(
            {
                "block_manager": block_manager,
                "round": number,
                "computed_at_fork": at_fork,
                "computed_at_end": at_fork + count,
                "branches": len(branches.requests),
                "different_branches": len({tuple(r.token_ids) for r in branches.requests.values()}),
                "peak_blocks": branches.peak_blocks,
                "copies": branches.copies,
                "largest_difference": difference_from_alone(branches, reference, at_fork + 1),
            }
        )
    for name in list(branches.requests):
        branches.end(name)
    blocks_left = branches.blocks_used
    if blocks_left:
        raise RuntimeError(f"{blocks_left} blocks are left when all branches have ended")
    return rows, blocks_left


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="as for jackfield --model")
    parser.add_argument("--prompt-lens", nargs="+", type=int, default=[512, 520])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--beam-steps",
        nargs="+",
        type=int,
        default=[20, 20, 40, 20],
        help="decoding steps before the first fork and after each one",
    )
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write down."""
    arguments = parse_arguments()
    vocab_size = LLMEngine.from_options(**options(arguments.model, "paged")).limits.vocab_size
    prompts = [make_prompt(length, vocab_size) for length in arguments.prompt_lens]
    groups, beams, blocks_left = [], [], 0
    for manager in MANAGERS:
        for prompt in prompts:
            groups.append(measure_group(arguments.model, manager, prompt, arguments.new_tokens))
            print(groups[-1], flush=True)
        rows, left = measure_beams(arguments.model, manager, prompts[0], arguments.beam_steps)
        blocks_left += left
        beams.extend(rows)
        print(*rows, sep="\n", flush=True)
    report = {
        "model": arguments.model,
        "dtype": "float32",
        "block_size": 16,
        "tolerance": TOLERANCE,
        "groups": groups,
        "beams": beams,
        "blocks_left_after_beams": blocks_left,
    }
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
