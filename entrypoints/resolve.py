"""What settings leave open or may contradict, decided by the device and the checkpoint."""

from __future__ import annotations

import torch

from ..core.attention import AttentionSpec
from ..core.config import EngineOptions
from ..core.errors import ConfigError
from ..core.model import Model, ModelConfig


def check_exclusive(options: EngineOptions) -> None:
    """Refuse settings of which one would make the other ignored.

    Raises:
        ConfigError: both are named.
    """
    if options.num_gpu_blocks_override is not None and options.kv_cache_memory is not None:
        raise ConfigError(
            f"num_gpu_blocks_override={options.num_gpu_blocks_override} and kv_cache_memory="
            f"{options.kv_cache_memory} both set the size of the KV cache: leave one unset"
        )
    if options.skip_tokenizer_init and options.tokenizer is not None:
        raise ConfigError(
            f"skip_tokenizer_init=True loads no tokenizer, and tokenizer={options.tokenizer!r} "
            "asks for one: leave one unset"
        )


def resolve_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is a GPU.

    Raises:
        ConfigError: no such device here.
    """
    found = parse_device(device)
    absent = absence_of(found)
    if absent:
        raise ConfigError(absent)
    return found


def parse_device(device: str) -> torch.device:
    """The device that is asked for, whether or not it is on this machine.

    Raises:
        ConfigError: there is no such kind of device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return torch.device(device)


def absence_of(device: torch.device) -> str:
    """Why a device cannot be used here, in a sentence; empty if it is there."""
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) < count:
        return ""
    return f"device={str(device)!r} is not there: {count} CUDA devices were found"


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU; on a GPU the checkpoint's own, float16 for float32."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)  # EngineOptions admits names of dtypes only
        return dtype
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.torch_dtype is torch.float32 else config.torch_dtype


def resolve_max_model_len(asked: int | None, config: ModelConfig) -> int:
    """The checkpoint's length, or a smaller one that was asked for.

    Raises:
        ConfigError: more was asked for than the checkpoint was made for.
    """
    longest = config.max_position_embeddings
    if asked is not None and asked > longest:
        raise ConfigError(
            f"max_model_len={asked} is above the {longest} tokens that this checkpoint was made "
            "for (max_position_embeddings in its configuration)"
        )
    return longest if asked is None else asked


def attention_specs_of(
    model_class: type[Model], config: ModelConfig, dtype: torch.dtype
) -> list[AttentionSpec]:
    """The spec of each layer, found without allocating the model."""
    with torch.device("meta"):
        skeleton = model_class(config, dtype, torch.device("meta"))
    return list(skeleton.attention_specs())
