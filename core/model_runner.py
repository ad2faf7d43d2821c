"""The model runner: carries out one assembled step on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import StepInputs
from .decode_graphs import DecodeGraphs
from .kv_movement import KVMover
from .layer_attention import LayerAttention, StepAttention, plan_step
from .model import Model
from .sampler import sample
from .scheduler import KVMove


class ModelRunner:
    """Model, caches and sampler together.

    Args:
        model: with its weights loaded.
        layers: what serves each attention layer, in order.
        graphs: captured decoding steps on the same model and layers; None runs every step launch
            by launch.
        mover: moves blocks of the same layers; None is one without host memory.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[LayerAttention],
        graphs: DecodeGraphs | None = None,
        mover: KVMover | None = None,
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.graphs = graphs
        self.mover = mover or KVMover([layer.cache for layer in self.layers])

    def padded_size(self, num_seqs: int) -> int:
        """How many sequences a step of this many, one token each, is best padded to."""
        return num_seqs if self.graphs is None else self.graphs.padded_size(num_seqs)

    @torch.inference_mode()
    def move_blocks(self, moves: Sequence[KVMove]) -> None:
        """Carry out the moves of a step in which nothing is computed."""
        self.mover.execute(moves)

    @torch.inference_mode()
    def execute(self, inputs: StepInputs, moves: Sequence[KVMove] = ()) -> list[int]:
        """Run a step.

        Args:
            inputs: the assembled step.
            moves: contents of blocks to be moved first, in this order.

        Returns:
            The new token of each sampling row. Fetching them is the step's only wait for the
            device.
        """
        self.mover.execute(moves)
        hidden_states = self._hidden_states(inputs)
        if inputs.sampling is None:
            return []
        rows = hidden_states.index_select(0, inputs.sample_indices)
        logits = self.model.compute_logits(rows)
        return list(sample(logits, inputs.sampling).tolist())

    def _hidden_states(self, inputs: StepInputs) -> Tensor:
        if self.graphs is not None and self.graphs.can_run(inputs):
            return self.graphs.run(inputs)
        batch = inputs.attention
        attention = StepAttention(self.layers, plan_step(self.layers, batch), batch.slot_mapping)
        hidden_states: Tensor = self.model(inputs.input_ids, inputs.positions, attention)
        return hidden_states
