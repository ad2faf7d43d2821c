"""Jackfield, an LLM inference engine made of plugins.

Names are fetched when first asked for, so that ``import jackfield`` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jackfield.core.attention import (
        AttentionBackend,
        AttentionBatch,
        AttentionPlan,
        AttentionSpec,
        Capabilities,
        KVCache,
        KVCacheSpec,
        KVLayout,
        SizeSet,
        allocate_kv_cache,
    )
    from jackfield.core.block_manager import (
        Allocation,
        AllocationStatus,
        BlockCopy,
        BlockManager,
        BlockManagerConfig,
        BlockTable,
        BlockUsage,
        check_num_tokens,
    )
    from jackfield.core.config import (
        EngineOptions,
    )
    from jackfield.core.engine import (
        EngineStats,
    )
    from jackfield.core.errors import (
        CapacityError,
        ConfigError,
        EngineDeadError,
        JackfieldError,
        ModelError,
        PluginError,
        RequestError,
        UnsupportedError,
    )
    from jackfield.core.model import (
        AttentionStep,
        Model,
        ModelConfig,
    )
    from jackfield.core.options import (
        NoOptions,
        PartOptions,
    )
    from jackfield.core.request import (
        CompletionOutput,
        FinishReason,
        Request,
        RequestMetrics,
        RequestOutput,
        SchedulingHints,
    )
    from jackfield.core.sampling_params import (
        RequestOutputKind,
        SamplingParams,
    )
    from jackfield.core.scheduler import (
        ScheduledRequest,
        Scheduler,
        SchedulerConfig,
        SchedulerStats,
        StepPlan,
    )
    from jackfield.core.scheduling_policy import (
        ACCEPT,
        PreemptionMode,
        Progress,
        Proposal,
        RequestView,
        SchedulerView,
        SchedulingPolicy,
        Verdict,
        reject,
    )
    from jackfield.core.tokenizer import (
        Tokenizer,
    )
    from jackfield.entrypoints.llm import (
        LLM,
    )
    from jackfield.entrypoints.llm_engine import (
        LLMEngine,
    )
    from jackfield.plugins.hookspecs import (
        API_VERSION,
        Register,
        hookimpl,
    )

__version__ = "0.1.0"

_HOMES = {
    "core.attention": [
        "AttentionBackend",
        "AttentionBatch",
        "AttentionPlan",
        "AttentionSpec",
        "Capabilities",
        "KVCache",
        "KVCacheSpec",
        "KVLayout",
        "SizeSet",
        "allocate_kv_cache",
    ],
    "core.block_manager": [
        "Allocation",
        "AllocationStatus",
        "BlockCopy",
        "BlockManager",
        "BlockManagerConfig",
        "BlockTable",
        "BlockUsage",
        "check_num_tokens",
    ],
    "core.config": ["EngineOptions"],
    "core.engine": ["EngineStats"],
    "core.errors": [
        "CapacityError",
        "ConfigError",
        "EngineDeadError",
        "JackfieldError",
        "ModelError",
        "PluginError",
        "RequestError",
        "UnsupportedError",
    ],
    "core.model": ["AttentionStep", "Model", "ModelConfig"],
    "core.options": ["NoOptions", "PartOptions"],
    "core.request": [
        "CompletionOutput",
        "FinishReason",
        "Request",
        "RequestMetrics",
        "RequestOutput",
        "SchedulingHints",
    ],
    "core.sampling_params": ["RequestOutputKind", "SamplingParams"],
    "core.scheduler": [
        "ScheduledRequest",
        "Scheduler",
        "SchedulerConfig",
        "SchedulerStats",
        "StepPlan",
    ],
    "core.scheduling_policy": [
        "ACCEPT",
        "PreemptionMode",
        "Progress",
        "Proposal",
        "RequestView",
        "SchedulerView",
        "SchedulingPolicy",
        "Verdict",
        "reject",
    ],
    "core.tokenizer": ["Tokenizer"],
    "entrypoints.llm": ["LLM"],
    "entrypoints.llm_engine": ["LLMEngine"],
    "plugins.hookspecs": ["API_VERSION", "Register", "hookimpl"],
}
_HOME = {name: f"jackfield.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "__version__",
    "ACCEPT",
    "API_VERSION",
    "Allocation",
    "AllocationStatus",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionPlan",
    "AttentionSpec",
    "AttentionStep",
    "BlockCopy",
    "BlockManager",
    "BlockManagerConfig",
    "BlockTable",
    "BlockUsage",
    "Capabilities",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "JackfieldError",
    "KVCache",
    "KVCacheSpec",
    "KVLayout",
    "LLM",
    "LLMEngine",
    "Model",
    "ModelConfig",
    "ModelError",
    "NoOptions",
    "PartOptions",
    "PluginError",
    "PreemptionMode",
    "Progress",
    "Proposal",
    "Register",
    "Request",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestView",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SchedulerView",
    "SchedulingHints",
    "SchedulingPolicy",
    "SizeSet",
    "StepPlan",
    "Tokenizer",
    "UnsupportedError",
    "Verdict",
    "allocate_kv_cache",
    "check_num_tokens",
    "hookimpl",
    "reject",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
