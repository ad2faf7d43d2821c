"""What the built-in scheduler refuses from the start: settings, and requests that can never fit."""

from __future__ import annotations

import logging

from ..core.errors import ConfigError, RequestError
from ..core.request import Request
from ..core.scheduler import SchedulerConfig

logger = logging.getLogger("jackfield")

MORE_BLOCKS = "num_gpu_blocks_override, kv_cache_memory or gpu_memory_utilization raise that"


def check_config(config: SchedulerConfig, num_host_blocks: int) -> None:
    """Refuse limits below 1 and contradictory ones; warn of what works badly.

    Args:
        config: the limits.
        num_host_blocks: blocks of swap space.

    Raises:
        ConfigError: with the names and numbers.
    """
    threshold = config.long_prefill_token_threshold
    limits = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "long_prefill_token_threshold": 1 if threshold is None else threshold,
    }
    for name, value in limits.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if threshold is not None and not config.enable_chunked_prefill:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} splits prompts, and enable_chunked_prefill "
            "is off: turn that on, or leave long_prefill_token_threshold unset"
        )
    if config.preemption_mode not in ("recompute", "swap", "auto"):
        raise ConfigError(
            f"preemption_mode={config.preemption_mode!r} is none of 'recompute', 'swap' and 'auto'"
        )
    if config.preemption_mode == "swap" and not num_host_blocks:
        raise ConfigError(
            "preemption_mode='swap' needs swap space, and the block manager has no host blocks: "
            "set swap_space, such as 4GiB"
        )
    for sentence in _poor_relations(config):
        logger.warning("%s", sentence)


def _poor_relations(config: SchedulerConfig) -> list[str]:
    """What works badly, one sentence each."""
    budget, sentences = config.max_num_batched_tokens, []
    if not config.enable_chunked_prefill and config.max_model_len > budget:
        sentences.append(
            f"enable_chunked_prefill is off and max_num_batched_tokens={budget} is below "
            f"max_model_len={config.max_model_len}: prompts of more than {budget} tokens will be "
            "refused; raise max_num_batched_tokens"
        )
    if config.max_num_seqs > budget:
        sentences.append(
            f"max_num_batched_tokens={budget} is below max_num_seqs={config.max_num_seqs}: so many "
            f"requests cannot decode in one step; raise max_num_batched_tokens"
        )
    threshold = config.long_prefill_token_threshold
    if threshold is not None and threshold >= budget:
        sentences.append(
            f"long_prefill_token_threshold={threshold} limits nothing, as it is not below "
            f"max_num_batched_tokens={budget}; lower the one or raise the other"
        )
    if threshold == 1 < budget:
        sentences.append(
            "long_prefill_token_threshold=1 computes prompts one token per step, as slowly as "
            "completions are generated; values from 128 on cost little"
        )
    return sentences


def check_request(request: Request, config: SchedulerConfig, num_slots: int) -> None:
    """Refuse a request that can never be computed to its end.

    Args:
        request: a new one.
        config: the limits.
        num_slots: most tokens that the KV cache can hold of one request.

    Raises:
        RequestError: with both numbers and the setting that changes them.
    """
    problem = _problem(request, config, num_slots)
    if problem is not None:
        raise RequestError(f"request {request.request_id!r} {problem}")


def _problem(request: Request, config: SchedulerConfig, num_slots: int) -> str | None:
    prompt, total = request.num_prompt_tokens, request.max_total_tokens
    longest, budget = config.max_model_len, config.max_num_batched_tokens
    if prompt < 1:
        return "has an empty prompt: at least 1 token is needed"
    if request.num_computed_tokens:
        return "has been computed before: a request object serves once"
    if prompt + 1 > longest:
        return (
            f"has a prompt of {prompt} tokens, which leaves no room for a completion within "
            f"max_model_len={longest}"
        )
    if not prompt < total <= longest:
        return (
            f"has max_total_tokens={total}, which must be above the {prompt} tokens of its prompt "
            f"and at most max_model_len={longest}"
        )
    if total - 1 > num_slots:  # the last token is never computed
        return (
            f"may need {total - 1} tokens of KV cache, which has room for {num_slots}: "
            f"a smaller max_tokens lowers its need, {MORE_BLOCKS}"
        )
    if prompt > budget and not config.enable_chunked_prefill:
        return (
            f"has a prompt of {prompt} tokens, which must be computed in one step of at most "
            f"max_num_batched_tokens={budget} while enable_chunked_prefill is off"
        )
    return None
