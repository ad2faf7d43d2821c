"""CUDA graphs of decoding steps: one launch instead of hundreds.

A step in which every sequence computes one token has the same launches whatever the lengths, so
that it can be captured once for a number of sequences and replayed after its inputs have been
replaced in place. A step with fewer sequences than a captured one is padded with idle sequences:
ones without tokens, whose only row sees nothing and is stored nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import AttentionBatch
from .batch import StepInputs
from .layer_attention import LayerAttention, Plans, StepAttention, plan_step
from .model import Model


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that are worth a graph: 1, 2, 4, then every eighth, at last all."""
    sizes = {size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs}
    return tuple(sorted(sizes | {max_num_seqs}))


@dataclass(frozen=True)
class _CapturedStep:
    """A graph with the memory that it reads and writes.

    Attributes:
        graph: computes ``hidden_states``.
        input_ids, positions, slot_mapping: ``[n]``, int64.
        plans: updated in place before a replay.
        hidden_states: ``[n, hidden_size]``.
    """

    graph: torch.cuda.CUDAGraph
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    plans: Plans
    hidden_states: Tensor


class DecodeGraphs:
    """The captured steps of a model.

    Args:
        model: with its weights on the device.
        layers: what serves each attention layer; all backends have CUDA graphs.
        sizes: numbers of sequences to capture, ascending.
        max_blocks: columns of the widest block table.
        device: a CUDA device.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[LayerAttention],
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self.sizes = tuple(sizes)
        self._model = model
        self._layers = list(layers)
        self._max_blocks = max_blocks
        self._device = device
        self._steps: dict[int, _CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, report: Callable[[int], object] | None = None) -> None:
        """Capture all sizes, the largest first: the others fit into the memory that it needs.

        Args:
            report: called with each size that has been captured.
        """
        for size in reversed(self.sizes):
            self.capture_size(size)
            if report is not None:
                report(size)

    @torch.inference_mode()
    def capture_size(self, size: int) -> None:
        """Capture one of the sizes."""
        batch = _idle_batch(size, self._max_blocks, self._device)
        plans = plan_step(self._layers, batch)
        ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        positions = torch.zeros_like(ids)
        slots = torch.full_like(ids, -1)
        attention = StepAttention(self._layers, plans, slots)
        # Libraries compile kernels and get workspaces in a first run, which cannot be captured.
        self._model(ids, positions, attention)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden_states = self._model(ids, positions, attention)
        self._steps[size] = _CapturedStep(graph, ids, positions, slots, plans, hidden_states)

    def padded_size(self, num_seqs: int) -> int:
        """How many sequences a decoding step of this many is padded to; as many if none fits."""
        index = bisect_left(self.sizes, num_seqs)
        return num_seqs if index == len(self.sizes) else self.sizes[index]

    def can_run(self, inputs: StepInputs) -> bool:
        """Whether this step has been captured."""
        batch = inputs.attention
        return batch.max_query_len == 1 and batch.num_seqs == batch.num_tokens in self._steps

    def run(self, inputs: StepInputs) -> Tensor:
        """Replay a step.

        Args:
            inputs: one that ``can_run``.

        Returns:
            Hidden states, ``[n, hidden_size]``; good until the next step.
        """
        batch = inputs.attention
        step = self._steps[batch.num_seqs]
        torch._foreach_copy_(
            [step.input_ids, step.positions, step.slot_mapping],
            [inputs.input_ids, inputs.positions, batch.slot_mapping],
        )
        plan_step(self._layers, batch, step.plans)
        step.graph.replay()
        return step.hidden_states


def graph_memory(graphs: DecodeGraphs, used: Callable[[], int]) -> int:
    """Bytes that capturing all sizes takes, found by capturing the two largest.

    The largest has memory for intermediate results, which the others share; each further one only
    takes what the driver keeps for a graph.

    Args:
        graphs: not captured yet; used for nothing else afterwards.
        used: bytes in use on the device.
    """
    before = used()
    graphs.capture_size(graphs.sizes[-1])
    after = used()
    first = max(0, after - before)
    if len(graphs.sizes) == 1:
        return first
    graphs.capture_size(graphs.sizes[-2])
    return first + max(0, used() - after) * (len(graphs.sizes) - 1)


def _idle_batch(size: int, max_blocks: int, device: torch.device) -> AttentionBatch:
    """Sequences of one token each, stored nowhere, with the widest block table."""
    return AttentionBatch.from_host(
        query_start_loc=torch.arange(size + 1, dtype=torch.int32),
        seq_lens=torch.ones(size, dtype=torch.int32),
        block_table=torch.zeros(size, max_blocks, dtype=torch.int32),
        slot_mapping=torch.full((size,), -1, dtype=torch.int64),
        device=device,
    )
