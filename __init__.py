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
        SizeSet,
    )
    from jackfield.core.block_manager import BlockManager
    from jackfield.core.model import Model, ModelConfig
    from jackfield.core.options import NoOptions, PartOptions
    from jackfield.core.request import (
        CompletionOutput,
        Request,
        RequestOutput,
        SchedulingHints,
    )
    from jackfield.core.sampling_params import RequestOutputKind, SamplingParams
    from jackfield.core.scheduler import Scheduler
    from jackfield.core.scheduling_policy import Proposal, SchedulingPolicy
    from jackfield.entrypoints.llm import LLM
    from jackfield.entrypoints.llm_engine import LLMEngine
    from jackfield.plugins.hookspecs import API_VERSION, hookimpl

__all__ = [
    "LLM",
    "LLMEngine",
    "SamplingParams",
    "RequestOutputKind",
    "SchedulingHints",
    "Request",
    "RequestOutput",
    "CompletionOutput",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionPlan",
    "AttentionSpec",
    "Capabilities",
    "KVCache",
    "KVCacheSpec",
    "SizeSet",
    "BlockManager",
    "Scheduler",
    "SchedulingPolicy",
    "Proposal",
    "Model",
    "ModelConfig",
    "PartOptions",
    "NoOptions",
    "API_VERSION",
    "hookimpl",
    "__version__",
]

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
        "SizeSet",
    ],
    "core.block_manager": ["BlockManager"],
    "core.model": ["Model", "ModelConfig"],
    "core.options": ["NoOptions", "PartOptions"],
    "core.request": ["CompletionOutput", "Request", "RequestOutput", "SchedulingHints"],
    "core.sampling_params": ["RequestOutputKind", "SamplingParams"],
    "core.scheduler": ["Scheduler"],
    "core.scheduling_policy": ["Proposal", "SchedulingPolicy"],
    "entrypoints.llm": ["LLM"],
    "entrypoints.llm_engine": ["LLMEngine"],
    "plugins.hookspecs": ["API_VERSION", "hookimpl"],
}
_HOME = {name: f"jackfield.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
