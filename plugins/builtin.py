"""The built-in parts: a plugin like any other, found through the same entry-point group."""

from __future__ import annotations

from .hookspecs import Register, hookimpl

JACKFIELD_API_VERSION = "1.0"


@hookimpl
def jackfield_attention_backends(register: Register) -> None:
    """Attention backends that come with Jackfield."""
    register("torch_sdpa", "jackfield.backends.torch_sdpa:TorchSdpaBackend")
    register("triton", "jackfield.backends.triton_paged.backend:TritonBackend")
    register("flex", "jackfield.backends.flex:FlexBackend")
    register("flashinfer", "jackfield.backends.flashinfer:FlashInferBackend")
    register("xformers", "jackfield.backends.xformers:XformersBackend")
    register("xformers_cutlass", "jackfield.backends.xformers:XformersCutlassBackend")
    register("torch_varlen", "jackfield.backends.torch_varlen:TorchVarlenBackend")
    register("flash_attn", "jackfield.backends.flash_attn:FlashAttnBackend")
    register("flash_attn_4", "jackfield.backends.flash_attn_4:FlashAttn4Backend")


@hookimpl
def jackfield_schedulers(register: Register) -> None:
    """Schedulers that come with Jackfield."""
    register("queue", "jackfield.schedulers.queue_scheduler:QueueScheduler")


@hookimpl
def jackfield_scheduling_policies(register: Register) -> None:
    """Scheduling policies that come with Jackfield."""
    register("fcfs", "jackfield.schedulers.fcfs:FcfsPolicy")


@hookimpl
def jackfield_block_managers(register: Register) -> None:
    """Block managers that come with Jackfield."""
    register("paged", "jackfield.core.block_managers.paged:PagedBlockManager")
    register("radix", "jackfield.core.block_managers.radix:RadixBlockManager")
    register("contiguous", "jackfield.core.block_managers.contiguous:ContiguousBlockManager")


@hookimpl
def jackfield_models(register: Register) -> None:
    """Models that come with Jackfield."""
    register("LlamaForCausalLM", "jackfield.models.llama:LlamaForCausalLM")
    register("Qwen2ForCausalLM", "jackfield.models.llama:Qwen2ForCausalLM")
