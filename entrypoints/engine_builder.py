"""Puts an engine together from settings. The only place where parts meet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

from ..core.attention import AttentionBackend, AttentionSpec, KVCacheSpec, dtype_name
from ..core.batch import BatchAssembler
from ..core.block_manager import BlockManager, BlockManagerConfig
from ..core.capabilities import kv_cache_dtype_of
from ..core.decision_log import DecisionLog
from ..core.decode_graphs import DecodeGraphs, graph_memory
from ..core.engine import Engine
from ..core.errors import CapacityError
from ..core.kv_movement import KVMover, host_block_bytes, staging_bytes
from ..core.layer_attention import LayerAttention, bind_layers, kv_cache_spec
from ..core.memory import (
    DeviceMemory,
    StepLimits,
    bytes_per_block,
    format_bytes,
    free_host_memory,
    gpu_kv_cache_bytes,
    host_kv_cache_bytes,
    measure_peak,
)
from ..core.model import Model
from ..core.model_runner import ModelRunner
from ..core.request_intake import EngineLimits
from ..core.scheduler import Scheduler, SchedulerConfig
from ..models.loader import Checkpoint, load_checkpoint
from ..models.locate import locate
from ..plugins.discovery import PluginHost
from ..plugins.selection import (
    Selection,
    select_attention_backend,
    select_block_manager,
    select_model,
    select_scheduler,
    select_scheduling_policy,
)
from .engine_description import EngineDescription
from .graph_setup import capture, choose_graph_sizes
from .resolve import (
    attention_specs_of,
    check_exclusive,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from .settings import Settings
from .swap_setup import choose_num_host_blocks

logger = logging.getLogger("jackfield")

EngineT = TypeVar("EngineT", bound=Engine)


class EngineBuilder:
    """The steps from settings to an engine, in order.

    Args:
        settings: of the engine.
        host: whose parts are to be had.
    """

    def __init__(self, settings: Settings, host: PluginHost) -> None:
        self._options = settings.options
        self._host = host

    def build(self, cls: type[EngineT]) -> tuple[EngineT, EngineDescription]:
        """An engine of this class, with its model loaded, and what it is made of.

        Raises as ``LLM``.
        """
        options = self._options
        check_exclusive(options)
        self._device = resolve_device(options.device)
        before = DeviceMemory.now(self._device) if self._device.type == "cuda" else None
        # Names are looked up before anything heavy is loaded.
        scheduler_choice = select_scheduler(
            self._host, options.scheduler, options.scheduler_options
        )
        policy_choice = select_scheduling_policy(
            self._host, options.scheduling_policy, options.scheduling_policy_options
        )
        manager_choice = select_block_manager(
            self._host, options.block_manager, options.block_manager_options
        )
        files = locate(options.model, options.load_format, options.revision)
        checkpoint = load_checkpoint(files, options.tokenizer)
        self._config = checkpoint.config
        self._dtype = resolve_dtype(options.dtype, self._config, self._device)
        self._kv_dtype = kv_cache_dtype_of(options.kv_cache_dtype) or self._dtype
        self._max_model_len = resolve_max_model_len(options.max_model_len, self._config)
        model_class = select_model(self._host, self._config.architecture).cls
        self._specs = attention_specs_of(model_class, self._config, self._dtype)
        self._backend_choice = select_attention_backend(
            self._host,
            options.attention_backend,
            self._specs,
            self._device,
            options.block_size,
            options.attention_backend_options,
            self._kv_dtype,
        )
        self._block_size = self._backend_choice.block_size
        self._num_host_blocks = choose_num_host_blocks(
            options,
            self._device,
            manager_choice.cls,
            scheduler_choice.cls,
            policy_choice.cls,
            self._host_block_bytes,
            free_host_memory,
        )
        self._graph_sizes = choose_graph_sizes(options, self._backend_choice, self._device)
        model = self._load_model(model_class, checkpoint)
        self._kv_scales = self._read_kv_scales(checkpoint)
        num_blocks = self._num_blocks(model, before)
        manager = self._make_block_manager(manager_choice, num_blocks)
        scheduler = scheduler_choice.cls(
            SchedulerConfig(
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_num_seqs=options.max_num_seqs,
                max_model_len=self._max_model_len,
                long_prefill_token_threshold=options.long_prefill_token_threshold,
                enable_chunked_prefill=options.enable_chunked_prefill,
                strict_policy=options.strict_policy,
                preemption_mode=options.preemption_mode,
            ),
            manager,
            policy_choice.cls(policy_choice.options),
            scheduler_choice.options,
        )
        engine = self._assemble(cls, model, manager, scheduler, num_blocks, checkpoint)
        description = EngineDescription(
            model=files.name,
            num_parameters=self._num_parameters,
            device=str(self._device),
            dtype=dtype_name(self._dtype),
            kv_cache_dtype=dtype_name(self._kv_dtype),
            attention_backend=self._backend_choice.name,
            scheduler=scheduler_choice.name,
            scheduling_policy=policy_choice.name,
            block_manager=manager_choice.name,
            block_size=self._block_size,
            num_blocks=num_blocks,
            bytes_per_block=self._bytes_per_block,
            max_model_len=self._max_model_len,
            num_host_blocks=self._num_host_blocks,
            prefix_caching=options.enable_prefix_caching,
        )
        logger.info("%s", description.summary())
        logger.info("attention backend %s: %s", self._backend_choice.name, self._backend_choice.why)
        return engine, description

    @property
    def _bytes_per_block(self) -> int:
        """Bytes of a block of all layers on the device."""
        return bytes_per_block(self._specs, self._block_size, self._kv_dtype)

    @property
    def _host_block_bytes(self) -> int:
        """Bytes of a block of all layers in host memory."""
        return host_block_bytes(
            [kv_cache_spec(spec, 1, self._block_size, self._kv_dtype) for spec in self._specs]
        )

    def _load_model(self, model_class: type[Model], checkpoint: Checkpoint) -> Model:
        model = model_class(self._config, self._dtype, self._device)
        # Counted before the model packs its weights, which may free them.
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        checkpoint.load_into(model, self._options.seed)
        return model.eval()

    def _read_kv_scales(self, checkpoint: Checkpoint) -> tuple[tuple[float, float], ...] | None:
        """The scales of each layer for a cache of 8 bits; None if all are 1."""
        if self._kv_dtype.itemsize > 1:
            return None
        scales = checkpoint.kv_scales()
        where = "from the checkpoint"
        if scales is None:
            where = "1: the checkpoint has no k_scale and v_scale, so numbers above 448 are cut off"
        logger.info("KV cache of %s; scales %s", dtype_name(self._kv_dtype), where)
        return scales

    def _graphs(self, model: Model, layers: list[LayerAttention]) -> DecodeGraphs:
        """Not captured yet."""
        max_blocks = -(-self._max_model_len // self._block_size)
        return DecodeGraphs(model, layers, self._graph_sizes, max_blocks, self._device)

    def _bind(self, num_blocks: int) -> list[LayerAttention]:
        choice = self._backend_choice

        def make(spec: AttentionSpec, cache: KVCacheSpec) -> AttentionBackend:
            return choice.cls(spec, cache, self._device, choice.options)

        return bind_layers(
            self._specs,
            make,
            num_blocks,
            self._block_size,
            self._kv_dtype,
            self._device,
            self._kv_scales,
        )

    def _num_blocks(self, model: Model, before: DeviceMemory | None) -> int:
        options = self._options
        if options.num_gpu_blocks_override is not None:
            return options.num_gpu_blocks_override
        longest = -(-self._max_model_len // self._block_size)
        if options.kv_cache_memory is not None:
            size = options.kv_cache_memory
        elif before is not None:
            limits = StepLimits(
                options.max_num_batched_tokens, options.max_num_seqs, self._max_model_len
            )
            peak = measure_peak(model, self._bind, self._block_size, limits, self._device, before)
            peak += staging_bytes(self._host_block_bytes, self._num_host_blocks)
            if self._graph_sizes:
                graphs = self._graphs(model, self._bind(1))
                peak += graph_memory(graphs, lambda: DeviceMemory.now(self._device).used)
            size = gpu_kv_cache_bytes(
                before.total, before.used, peak, options.gpu_memory_utilization
            )
        else:
            wanted = options.max_num_seqs * longest * self._bytes_per_block
            size = host_kv_cache_bytes(free_host_memory(), wanted)
        num_blocks = size // self._bytes_per_block
        if num_blocks < 1:
            raise CapacityError(
                f"{format_bytes(size)} for the KV cache hold no block of "
                f"{format_bytes(self._bytes_per_block)}; raise kv_cache_memory or "
                "gpu_memory_utilization"
            )
        return num_blocks

    def _make_block_manager(self, choice: Selection[BlockManager], num_blocks: int) -> BlockManager:
        manager = choice.cls(
            BlockManagerConfig(
                num_blocks=num_blocks,
                block_size=self._block_size,
                max_model_len=self._max_model_len,
                watermark=self._options.watermark,
                num_host_blocks=self._num_host_blocks,
                enable_prefix_caching=self._options.enable_prefix_caching,
            ),
            choice.options,
        )
        largest = manager.largest_request()
        if largest < self._max_model_len:
            needed = -(-self._max_model_len // self._block_size) * self._bytes_per_block
            raise CapacityError(
                f"max_model_len={self._max_model_len} does not fit: {num_blocks} KV blocks of "
                f"{self._block_size} tokens hold a request of {largest} tokens at most; set "
                f"max_model_len={largest} or less, or give the KV cache {format_bytes(needed)} or "
                "more (kv_cache_memory, gpu_memory_utilization or num_gpu_blocks_override)"
            )
        return manager

    def _assemble(
        self,
        cls: type[EngineT],
        model: Model,
        manager: BlockManager,
        scheduler: Scheduler,
        num_blocks: int,
        checkpoint: Checkpoint,
    ) -> EngineT:
        tokenizer = None if self._options.skip_tokenizer_init else checkpoint.tokenizer
        eos = set(self._config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        log = self._options.decision_log
        decision_log = None if log is None else DecisionLog(Path(log))
        layers = self._bind(num_blocks)
        mover = KVMover([layer.cache for layer in layers], self._num_host_blocks)
        graphs = self._graphs(model, layers) if self._graph_sizes else None
        if graphs is not None:
            capture(graphs)
        return cls(
            model_runner=ModelRunner(model, layers, graphs, mover),
            scheduler=scheduler,
            block_manager=manager,
            assembler=BatchAssembler(
                self._options.max_num_seqs, self._max_model_len, self._block_size, self._device
            ),
            tokenizer=tokenizer,
            limits=EngineLimits(
                max_model_len=self._max_model_len,
                vocab_size=self._config.vocab_size,
                eos_token_ids=frozenset(eos),
                seed=self._options.seed,
            ),
            observers=(self._host.observers,),
            decision_log=decision_log,
        )
