"""Comparing greedy completions with Hugging Face transformers, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from jackfield import LLM, RequestOutput, SamplingParams

#: Where the two largest logits are closer than this, rounding may decide.
NEAR_TIE = 1e-3

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Reference:
    """Greedy completions of transformers.

    Attributes:
        tokens: the new tokens of each prompt.
        gaps: distance of the two largest logits at each of them.
    """

    tokens: list[list[int]]
    gaps: list[list[float]]


def reference_greedy(model: Any, prompts: Prompts, num_tokens: int, batch: int = 8) -> Reference:
    """What transformers' ``generate`` yields, in left-padded batches of similar lengths."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    tokens: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
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
        top = [logits.topk(2, dim=-1).values for logits in result.logits]
        for row, index in enumerate(indices):
            tokens[index] = result.sequences[row, longest:].tolist()
            gaps[index] = [float(values[row, 0] - values[row, 1]) for values in top]
    return Reference(tokens, gaps)


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
        near_tie: where the two largest logits are closer than this, rounding may decide.

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
                gap = reference.gaps[index][position]
                assert gap <= near_tie, (
                    f"prompt {index} ({len(output.prompt_token_ids)} tokens) differs at new token "
                    f"{position}: {our} instead of {their}, where the logits are {gap:.5f} apart"
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
