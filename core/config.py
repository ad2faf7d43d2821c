"""The settings of an engine: one typed model that command line, environment, TOML file and Python
share, with one name for each setting."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_BYTE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTE_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: object) -> object:
    """``"512MiB"``, ``"4G"`` or a number of bytes, as an int; anything else is left as it is.

    Raises:
        ValueError: a text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", value.lower())
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 1073741824, 512MiB or 4G")
    return int(float(match[1]) * _BYTE_UNITS[match[2] or ""])


def parse_sizes(value: object) -> object:
    """``"1,2,8"`` or a list as a tuple, ascending and without repetitions; anything else is left
    as it is.

    Raises:
        ValueError: a text that is no list of numbers, or a number below 1.
    """
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"{value!r} is no list of whole numbers such as 1,2,4,8")
        value = [int(part) for part in parts]
    if not isinstance(value, list | tuple) or not all(type(size) is int for size in value):
        return value
    if not value or min(value) < 1:
        raise ValueError(f"{list(value)} must be numbers of at least 1, and at least one of them")
    return tuple(sorted(set(value)))


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Sizes = Annotated[tuple[int, ...], BeforeValidator(parse_sizes)]
Part = dict[str, Any]


class EngineOptions(BaseModel):
    """Every setting of an engine. Command line ``--max-model-len``, environment
    ``JACKFIELD_MAX_MODEL_LEN``, TOML ``max_model_len`` and ``LLM(max_model_len=...)`` are one
    setting; the first of these that names it decides."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(
        default="demo",
        description="Hugging Face id, local directory, GGUF file, or 'demo' "
        "(SmolLM2-135M-Instruct).",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Hugging Face id or directory of the tokenizer; default: the model's own.",
    )
    skip_tokenizer_init: bool = Field(
        default=False, description="Load no tokenizer: prompts and completions are token ids only."
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a Hugging Face id; default: its main branch.",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        default="auto",
        description="Where weights come from; 'dummy' fills them with random numbers from --seed.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Dtype of weights and activations; 'auto' is float32 on a CPU and the "
        "checkpoint's own on a GPU (float16 for a float32 checkpoint there).",
    )
    kv_cache_dtype: Literal[
        "auto", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8", "float8_e4m3fn"
    ] = Field(
        default="auto",
        description="Dtype of the KV cache; 'auto' is the dtype of the activations. 'fp8_e4m3' "
        "('fp8' and 'float8_e4m3fn' are the same) takes one byte per number, with the scales of "
        "the checkpoint where it has some, else with a scale of 1.",
    )
    device: str = Field(
        default="auto",
        description="'cpu', 'cuda' or 'cuda:N'; 'auto' is cuda where there is a GPU.",
    )
    seed: int = Field(
        default=0, description="Seed of requests that bring none, and of dummy weights."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and completion together; default: the checkpoint's.",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per block of the KV cache; default: what the attention backend "
        "prefers, 16 for most.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory that this engine may use; the KV cache gets what "
        "weights and a profiling run leave of it.",
    )
    kv_cache_memory: Bytes | None = Field(
        default=None,
        gt=0,
        description="Size of the KV cache, such as 4GiB. Default: on a CPU, what is needed for "
        "max_num_seqs full requests, at most a quarter of the free memory; on a GPU, from "
        "gpu_memory_utilization.",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None,
        ge=1,
        description="Number of KV blocks, whatever memory there is (on any device).",
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="Most requests that are computed side by side."
    )
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Most tokens of one step, all requests together."
    )
    enable_chunked_prefill: bool = Field(
        default=True,
        description="Compute long prompts over several steps, beside decoding requests.",
    )
    long_prefill_token_threshold: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens of one request in one step (its chunk size).",
    )
    watermark: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of the KV blocks that admitting new requests leaves.",
    )
    enable_prefix_caching: bool = Field(
        default=False,
        description="Keep the KV blocks of computed tokens, and share them with requests that "
        "begin with the same tokens.",
    )
    swap_space: Bytes | None = Field(
        default=None,
        ge=0,
        description="Host memory for the KV blocks of preempted requests, such as 4GiB; 0 is none. "
        "Default: 4GiB on a GPU if preemption_mode is 'swap' or 'auto' and the block manager can "
        "swap, else 0.",
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        default="recompute",
        description="What becomes of a request that must give up its KV blocks, where the "
        "scheduling policy leaves it open: it is computed anew, its blocks go to host memory and "
        "come back, or ('auto') the latter if most of them are its own.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Launch every kernel of every step. By default decoding steps on a GPU are "
        "replayed from CUDA graphs, where the attention backend can.",
    )
    cuda_graph_sizes: Sizes | None = Field(
        default=None,
        description="Numbers of requests whose decoding steps are captured as CUDA graphs; a step "
        "is padded to the next of them, and one with more requests than the last is not captured. "
        "Default: 1, 2, 4, 8, 16, 24 and so on to max_num_seqs.",
    )
    attention_backend: str = Field(
        default="auto", description="Attention backend by name, or 'auto'."
    )
    attention_backend_options: Part = Field(
        default_factory=dict, description="Options of the attention backend, as JSON."
    )
    scheduler: str = Field(default="queue", description="Scheduler by name.")
    scheduler_options: Part = Field(
        default_factory=dict, description="Options of the scheduler, as JSON."
    )
    scheduling_policy: str = Field(default="fcfs", description="Scheduling policy by name.")
    scheduling_policy_options: Part = Field(
        default_factory=dict, description="Options of the scheduling policy, as JSON."
    )
    strict_policy: bool = Field(
        default=False,
        description="Stop when a scheduling policy proposes the impossible, not clip it.",
    )
    decision_log: str | None = Field(
        default=None,
        description="File that gets one line of JSON per step: who was scheduled, preempted, "
        "swapped, forked and finished. Equal seeds and arrivals give equal files.",
    )
    block_manager: str = Field(default="paged", description="Block manager by name.")
    block_manager_options: Part = Field(
        default_factory=dict, description="Options of the block manager, as JSON."
    )
