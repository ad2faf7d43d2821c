"""The model runner: carries out one assembled step on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import StepInputs
from .block_manager import BlockCopy
from .decode_graphs import DecodeGraphs
from .layer_attention import LayerAttention, StepAttention, plan_step
from .model import Model
from .sampler import sample


class ModelRunner:
    """Model, caches and sampler together.

    Args:
        model: with its weights loaded.
        layers: what serves each attention layer, in order.
        graphs: captured decoding steps on the same model and layers; None runs every step launch
            by launch.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[LayerAttention],
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.graphs = graphs

    def padded_size(self, num_seqs: int) -> int:
        """How many sequences a step of this many, one token each, is best padded to."""
        return num_seqs if self.graphs is None else self.graphs.padded_size(num_seqs)

    @torch.inference_mode()
    def execute(self, inputs: StepInputs, copies: Sequence[BlockCopy] = ()) -> list[int]:
        """Run a step.

        Args:
            inputs: the assembled step.
            copies: block copies to be done first.

        Returns:
            The new token of each sampling row. Fetching them is the step's only wait for the
            device.
        """
        self._copy_blocks(copies)
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

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        device = self.layers[0].cache.k.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        destinations = torch.tensor([copy.destination for copy in copies], device=device)
        for layer in self.layers:
            for tensor in (layer.cache.k, layer.cache.v):
                tensor[destinations] = tensor[sources]
