"""Comparing greedy completions with Hugging Face transformers, token for token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from jackfield import LLM, RequestOutput, SamplingParams

#: Where the two largest logits are closer than this, rounding may decide.
NEAR_TIE = 1e-3

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Reference:
    """Greedy completions of transformers.

    Attributes:
        tokens: the new tokens of each prompt.
        closest: at each of them the tokens with the largest logits, each with its distance to the
            largest.
    """

    tokens: list[list[int]]
    closest: list[list[dict[int, float]]]

    def pick(self, indices: Sequence[int], num_tokens: int | None = None) -> Reference:
        """Of these prompts, in this order, the first ``num_tokens`` tokens; None is all."""
        return Reference(
            [self.tokens[index][:num_tokens] for index in indices],
            [self.closest[index][:num_tokens] for index in indices],
        )


@cache
def transformers_model(gguf_file: Path) -> Any:
    """A GGUF file as transformers reads it, in float32. Reading takes long, so modules share it."""
    return AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
    )


def reference_greedy(
    model: Any, prompts: Prompts, num_tokens: int, batch: int = 8, kept: int = 4
) -> Reference:
    """What transformers' ``generate`` yields, in left-padded batches of similar lengths.

    Args:
        model: of transformers.
        prompts: token ids.
        num_tokens: new ones of each.
        batch: prompts at a time.
        kept: tokens whose distance to the largest logit is kept.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    tokens: list[list[int]] = [[] for _ in prompts]
    closest: list[list[dict[int, float]]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        longest = max(len(prompts[index]) for index in indices)
        padding = [longest - len(prompts[index]) for index in indices]
        ids = [[0] * pad + list(prompts[i]) for pad, i in zip(padding, indices, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        with torch.inference_mode():
            result = model.generate(
                torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=GenerationConfig(
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=-1,  # None would fall back to the checkpoint's own
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                ),
            )
        tops = [logits.topk(min(kept, logits.shape[-1]), dim=-1) for logits in result.logits]
        distances = [(top.values[:, :1] - top.values).tolist() for top in tops]
        ids = [top.indices.tolist() for top in tops]
        for row, index in enumerate(indices):
            tokens[index] = result.sequences[row, longest:].tolist()
            closest[index] = [
                dict(zip(near[row], far[row], strict=True))
                for near, far in zip(ids, distances, strict=True)
            ]
    return Reference(tokens, closest)


def generate_greedy(llm: LLM, prompts: Prompts, num_tokens: int) -> list[RequestOutput]:
    """The same from Jackfield, all prompts in one call."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    return llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)


def assert_equal_greedy(
    outputs: Sequence[RequestOutput], reference: Reference, near_tie: float = NEAR_TIE
) -> int:
    """Each completion equals the reference up to its first near-tie that turns out differently.

    Args:
        outputs: of Jackfield.
        reference: of transformers, for the same prompts.
        near_tie: where the logit of our token is that close to the largest one in the reference,
            rounding may decide.

    Returns:
        How many tokens were compared.
    """
    compared = 0
    for index, output in enumerate(outputs):
        assert output.error is None, f"prompt {index}: {output.error}"
        ours, theirs = list(output.outputs[0].token_ids), reference.tokens[index]
        assert len(ours) == len(theirs), f"prompt {index}: {len(ours)} of {len(theirs)} tokens"
        for position, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                known = reference.closest[index][position]
                distance = known.get(our, math.inf)
                assert distance <= near_tie, (
                    f"prompt {index} ({len(output.prompt_token_ids)} tokens) differs at new token "
                    f"{position}: {our} instead of {their}, whose logits are {distance:.5f} apart "
                    f"(of the {len(known)} largest)"
                )
                break
            compared += 1
    return compared


def logits_noise(exact: Any, rounded: Any, prompts: Prompts, reference: Reference) -> float:
    """How far rounding moves logits: the largest difference of two models on the same tokens.

    Args:
        exact: the model of transformers in float32.
        rounded: the same in another dtype.
        prompts: as for the reference.
        reference: whose tokens follow the prompts.
    """
    largest = 0.0
    for prompt, tokens in zip(prompts, reference.tokens, strict=True):
        ids = torch.tensor([[*prompt, *tokens]], device=exact.device)
        with torch.inference_mode():
            difference = exact(ids).logits.float() - rounded(ids).logits.float()
        largest = max(largest, float(difference[0, len(prompt) - 1 :].abs().max()))
    return largest
