"""From a configuration to a model over its KV cache: which kernels, which number formats, how many blocks.

                CPU with AVX2, kernels built           elsewhere, and engine.attention=reference
products        native/ (packed, five formats)         torch (oneDNN, cuBLAS), quantized matrices by their plain twin
attention       native/, over blocks in place          attention/, over gathered copies
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.schema import EngineConfig, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.engine.attention.kv_cache import AttentionBackend, KVCache
from replicas.engine.attention.paged import PagedAttention
from replicas.engine.attention.reference import ReferenceAttention
from replicas.engine.capacity import Capacity, plan_block_capacity
from replicas.engine.cuda_graphs import GraphedDecode
from replicas.engine.device import choose_device, choose_dtype, dtype_name, kv_cache_budget_bytes
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.models.fp8 import supports_fp8
from replicas.engine.models.llama import LlamaModel
from replicas.engine.models.model_weights import ModelWeights
from replicas.engine.native.cache import NativeKVCache, bytes_per_block
from replicas.engine.native.library import Library, load
from replicas.engine.native.model import NativeModel, refusal
from replicas.engine.step_model import StepModel
from replicas.engine.torch_model import TorchModel
from replicas.engine.weights import open_checkpoint
from replicas.errors import ConfigError
from replicas.model_source import architecture, resolve

logger = logging.getLogger(__name__)

_NATIVE_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`description` names the kernels and formats, for the log."""

    model: StepModel
    capacity: Capacity
    description: str


def load_model(model: ModelConfig, engine: EngineConfig, *, num_threads: int, replicas_on_node: int) -> LoadedModel:
    """Load the weights and allocate the KV cache.

    Raises ConfigError if the model isn't one we compute or the formats aren't possible here, CapacityError if it doesn't fit.
    """
    device = choose_device(engine.device)
    config = architecture(model)
    library = _native_library(engine, device, model.dtype, config)
    budget = _Budget(model, engine, device, replicas_on_node, config)
    if library is None:
        return _load_torch(model, engine, device, choose_dtype(model.dtype, device), budget)
    # The kernels read bf16 at full speed on every CPU, also where torch would emulate it.
    dtype = "bf16" if model.dtype == "auto" else model.dtype
    return _load_native(model, engine, library, dtype, num_threads, budget)


@dataclass(frozen=True, slots=True)
class _Budget:
    model: ModelConfig
    engine: EngineConfig
    device: torch.device
    replicas_on_node: int
    architecture: ArchitectureConfig

    def capacity(self, block_bytes: int) -> Capacity:
        """Ask after the weights are loaded: on a GPU, what they take is gone by then."""
        engine = self.engine
        return plan_block_capacity(
            kv_bytes=engine.kv_cache_bytes
            or kv_cache_budget_bytes(self.device, engine.gpu_memory_share, self.replicas_on_node),
            bytes_per_block=block_bytes,
            block_size=BLOCK_SIZE,
            max_model_len=self.model.max_model_len,
            max_context_len=self.architecture.max_context_len,
        )


def _native_library(engine: EngineConfig, device: torch.device, dtype: str, config: ArchitectureConfig) -> Library | None:
    """The kernels, where they serve here. Raises ConfigError if they must (engine.kernels=native) and can't."""
    if engine.kernels == "torch":
        return None
    reason = None
    if device.type != "cpu":
        reason = f"they are for CPUs, and engine.device is {device.type}"
    elif engine.attention != "auto":
        reason = f"engine.attention is {engine.attention}"
    elif dtype not in ("auto", *_NATIVE_DTYPES):
        reason = f"model.dtype {dtype} is none of theirs ({', '.join(_NATIVE_DTYPES)})"
    else:
        reason = refusal(config)
    library = load() if reason is None else None
    if reason is None and library is None:
        reason = "they are not built, or this CPU has no AVX2"
    if library is None and engine.kernels == "native":
        raise ConfigError(f"engine.kernels=native: {reason}")
    return library


def _load_native(
    model: ModelConfig, engine: EngineConfig, library: Library, dtype: str, num_threads: int, budget: _Budget
) -> LoadedModel:
    config = budget.architecture
    quantization = _quantization(engine, model.dtype, has_kernels=True)
    if quantization == "fp8":
        raise ConfigError("engine.quantization=fp8 is for GPUs that have it; on a CPU int8 takes the same memory")
    kv_format = engine.kv_cache_dtype if engine.kv_cache_dtype != "auto" else dtype
    if kv_format == "int8" and engine.speculation.method:
        raise ConfigError(
            "engine.kv_cache_dtype=int8 shares a scale among the tokens of a block, and a draft token that is refused would "
            "leave its mark on those before it; choose bf16, or no engine.speculation.method"
        )
    loaded = NativeModel(
        library,
        config,
        ModelWeights(config, open_checkpoint(resolve(model), config), quantization),
        max_positions=config.max_context_len,
        dtype=dtype,
        num_threads=num_threads,
    )
    capacity = budget.capacity(bytes_per_block(kv_format, config.num_layers, config.num_kv_heads, config.head_dim))
    loaded.use_cache(
        NativeKVCache(
            library,
            format=kv_format,
            num_layers=config.num_layers,
            num_blocks=capacity.num_blocks,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
    )
    formats = f"weights {dtype if quantization == 'none' else quantization} ({loaded.weight_bytes / 2**20:.0f} MiB)"
    kernels = f"native kernels ({library.instructions})"
    return LoadedModel(loaded, capacity, f"{kernels}, {num_threads} threads, {formats}, KV {kv_format}")


def _load_torch(
    model: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype, budget: _Budget
) -> LoadedModel:
    config = budget.architecture
    name = dtype_name(dtype)
    if engine.kv_cache_dtype not in ("auto", name):
        raise ConfigError(
            f"engine.kv_cache_dtype={engine.kv_cache_dtype} needs the native kernels; torch keeps keys and values as "
            f"model.dtype ({name})"
        )
    quantization = _quantization(engine, model.dtype, has_kernels=False)
    if quantization == "fp8" and not (supports_fp8(device) and dtype is torch.bfloat16):
        raise ConfigError(f"engine.quantization=fp8 needs a GPU that multiplies fp8, and bf16; this is {name} on {device}")
    loaded = LlamaModel(
        config,
        open_checkpoint(resolve(model), config),
        # Positions beyond the context can't be planned, so the rotary table is as long as that.
        max_positions=config.max_context_len,
        device=device,
        dtype=dtype,
        quantization=quantization,
    )
    capacity = budget.capacity(BLOCK_SIZE * config.kv_bytes_per_token(dtype.itemsize))
    has_graphs = device.type == "cuda" and engine.attention == "auto"
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=capacity.num_blocks + has_graphs,  # one for what graphs compute for nobody
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        device=device,
        dtype=dtype,
    )
    attention = _ATTENTION[engine.attention](cache, config.num_heads)
    graphed = None
    if has_graphs:
        graphed = GraphedDecode(
            loaded,
            cache,
            max_seqs=engine.max_num_seqs,
            max_model_len=capacity.max_model_len,
            padding_block=capacity.num_blocks,
        )
        graphed.capture_all()
    weights = name if quantization == "none" else quantization
    if quantization in ("int8", "int4"):
        weights += " by the plain twin, slowly"
    return LoadedModel(
        TorchModel(loaded, cache, attention, graphed), capacity, f"torch on {device}, weights {weights}, KV {name}"
    )


def _quantization(engine: EngineConfig, dtype: str, *, has_kernels: bool) -> str:
    """One of model_weights.py's. A file's own quantized weights are served as they are unless somebody asked for numbers."""
    if engine.quantization != "auto":
        return engine.quantization
    return "file" if has_kernels and dtype == "auto" else "none"


_ATTENTION: dict[str, Callable[[KVCache, int], AttentionBackend]] = {
    "auto": PagedAttention,
    "reference": lambda cache, _: ReferenceAttention(cache),
}
