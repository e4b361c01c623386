"""What a model takes of a memory in each number format, and how many users the rest holds. Pure: no torch, no weight loaded.

    memory of a device = weights + reserve + KV cache
    reserve            = activations + logits + rotary table + gathered KV + plain twin + runtime      (see RESERVE_FORMULAS)

As our own engine keeps them: by its native kernels on a CPU, by torch on a GPU. Sizes are in bytes; a KV block has
replicas.blocks.BLOCK_SIZE tokens. The kernels pad a matrix to rows that 64 divides, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gguf.constants import GGML_QUANT_SIZES

from replicas.blocks import BLOCK_SIZE
from replicas.engine.capacity import Capacity, check_context, fit_blocks, num_blocks_of
from replicas.engine.models.config import ArchitectureConfig
from replicas.errors import ConfigError
from replicas.gguf_file import GgufTensor

GIB = 2**30
CONTEXTS = (2048, 4096, 32768)
AS_SHIPPED = "shipped"
# Python, torch and their libraries: 0.23 GiB measured on a CPU. A CUDA context comes on top.
RUNTIME_BYTES = GIB // 2

_FP32_BYTES, _HALF_BYTES = 4, 2
_SCALE_BYTES = 4  # of a row of int8, and of the keys or the values of one head in a block of an int8 cache
_GROUP = 32  # columns that share a scale (and a minimum) of two bytes each
# torch's attention gathers at most this many blocks of one layer at a time (replicas/engine/attention/)
_MAX_GATHERED_BLOCKS = 8192

_MATRIX_BYTES: Mapping[str, Callable[[int, int], int]] = {
    "fp32": lambda rows, columns: 4 * rows * columns,
    "bf16": lambda rows, columns: 2 * rows * columns,
    "int8": lambda rows, columns: rows * (columns + _SCALE_BYTES),
    "int4": lambda rows, columns: rows * (columns // 2 + 2 * _HALF_BYTES * (columns // _GROUP)),
    "int8_g32": lambda rows, columns: rows * (columns + _HALF_BYTES * (columns // _GROUP)),
}
_GROUPED = ("int4", "int8_g32")


@dataclass(frozen=True, slots=True)
class WeightPrecision:
    """`linear` and `vocabulary` (embedding and head) name formats of matrices; norms and biases are fp32 in all of them.

    `itemsize` is of the numbers that torch computes with, in bytes.
    """

    name: str
    linear: str
    vocabulary: str
    itemsize: int = _HALF_BYTES
    is_quantized: bool = True


@dataclass(frozen=True, slots=True)
class KvPrecision:
    """`scale_bytes` for the keys and again for the values of each head in each block."""

    name: str
    itemsize: int
    scale_bytes: int = 0

    def bytes_per_block(self, architecture: ArchitectureConfig) -> int:
        scales = 2 * architecture.num_layers * architecture.num_kv_heads * self.scale_bytes
        return BLOCK_SIZE * architecture.kv_bytes_per_token(self.itemsize) + scales


# Half precision is called bf16 here; fp16 takes the same.
WEIGHT_PRECISIONS = (
    WeightPrecision("fp32", "fp32", "fp32", itemsize=_FP32_BYTES, is_quantized=False),
    WeightPrecision("bf16", "bf16", "bf16", is_quantized=False),
    WeightPrecision("int8", "int8", "int8"),
    WeightPrecision("int4", "int4", "int8_g32"),
)
KV_PRECISIONS = (KvPrecision("fp32", 4), KvPrecision("bf16", 2), KvPrecision("int8", 1, _SCALE_BYTES))
# A GGUF's formats that are kept as they are; other matrices are computed, and counted, in bf16.
_KEPT = ("Q4_1", "Q8_0")
# Tensors of a GGUF that become one matrix, which has one format.
_FUSED = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: int
    columns: int
    count: int
    is_vocabulary: bool = False


def matrices(shape: ArchitectureConfig) -> Iterator[Matrix]:
    """All of a model's matrices, those that share an input as one; a tied head once."""
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield Matrix(shape.vocab_size, shape.hidden_size, 1 if shape.tied_embeddings else 2, is_vocabulary=True)
    yield Matrix(query + 2 * key_value, shape.hidden_size, shape.num_layers)
    yield Matrix(shape.hidden_size, query, shape.num_layers)
    yield Matrix(2 * shape.intermediate_size, shape.hidden_size, shape.num_layers)
    yield Matrix(shape.hidden_size, shape.intermediate_size, shape.num_layers)


def num_vector_elements(shape: ArchitectureConfig, *, norms_of_heads: int) -> int:
    """Numbers of norms and biases. The weights that norm queries and keys are two vectors in a file, which the engine
    repeats for each head: `norms_of_heads` says how many there are."""
    biases = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim if shape.family.qkv_bias else 0
    head_norms = norms_of_heads * shape.head_dim if shape.family.qk_norm else 0
    return shape.num_layers * (2 * shape.hidden_size + biases + head_norms) + shape.hidden_size


def num_parameters(shape: ArchitectureConfig) -> int:
    """As a file counts them; a tied head counts once."""
    numbers = sum(matrix.rows * matrix.columns * matrix.count for matrix in matrices(shape))
    return numbers + num_vector_elements(shape, norms_of_heads=2)


def vector_bytes(shape: ArchitectureConfig) -> int:
    return _FP32_BYTES * num_vector_elements(shape, norms_of_heads=shape.num_heads + shape.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Weights:
    """What one device keeps of a model. `remark` says what the name doesn't."""

    precision: WeightPrecision
    num_bytes: int
    remark: str = ""


def weights_in(shape: ArchitectureConfig, precision: WeightPrecision) -> Weights:
    """Raises ConfigError where a matrix's width is not made of whole groups."""
    total = vector_bytes(shape)
    for matrix in matrices(shape):
        kind = precision.vocabulary if matrix.is_vocabulary else precision.linear
        if kind in _GROUPED and matrix.columns % _GROUP:
            raise ConfigError(f"{precision.name} needs widths that {_GROUP} divides, and a matrix has {matrix.columns} columns")
        total += matrix.count * _MATRIX_BYTES[kind](matrix.rows, matrix.columns)
    return Weights(precision, total)


def weights_as_shipped(shape: ArchitectureConfig, tensors: Mapping[str, GgufTensor]) -> Weights:
    """A GGUF's tensors as the engine keeps them: those of `_KEPT` in the file's own bytes, others in bf16."""
    matrices_of: dict[tuple[str, ...], list[GgufTensor]] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1:  # norms and biases are as in every other precision
            *path, part, _ = name.split(".")
            matrices_of.setdefault((*path, _FUSED.get(part, part)), []).append(tensor)
    total, counts = 0, dict[str, int]()
    for parts in matrices_of.values():
        kinds = {tensor.kind.name for tensor in parts}
        is_kept = len(kinds) == 1 and kinds <= set(_KEPT)
        for tensor in parts:
            elements, num_bytes = GGML_QUANT_SIZES[tensor.kind]
            size = tensor.shape[0] * tensor.shape[1]
            total += size // elements * num_bytes if is_kept else size * _HALF_BYTES
            kind = tensor.kind.name if is_kept else f"{tensor.kind.name} (kept as bf16)"
            counts[kind] = counts.get(kind, 0) + 1
    precision = WeightPrecision(AS_SHIPPED, AS_SHIPPED, AS_SHIPPED)
    remark = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    return Weights(precision, total + vector_bytes(shape), f"{AS_SHIPPED}: {remark}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served in `memory_bytes` on each of `num_devices`, which share a model head by head.

    `max_model_len` (0: what the model and the memory allow) is the longest request, which must fit. `on_cpu` says whose
    sizes they are, the native kernels' or torch's.
    """

    memory_bytes: int
    num_devices: int = 1
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    runtime_bytes: int = RUNTIME_BYTES
    on_cpu: bool = True


# What each part of a Reserve is for and how it is counted, in bytes. The width of an activation is of the residual and a
# layer's result, and either gate, up and their product, or queries, keys and values with the two copies that rotating makes.
RESERVE_FORMULAS: Mapping[str, str] = {
    "activations": "4 * max_num_batched_tokens * (2 * hidden + 3 * max(intermediate, (heads + 2 * kv heads) * head_dim))",
    "logits": "4 * max_num_seqs * vocabulary",
    "rotary_table": "4 * context of the model * head_dim; in fp32 on a GPU twice that",
    "gathered_kv": "on a GPU, copies of one layer's blocks that attention reads at once: all of the cache, at most 8192",
    "plain_twin": "on a GPU, of quantized weights: 2 * vocabulary * hidden for the embedding's numbers, and 6 * numbers of the "
    "largest matrix, which each product makes anew",
    "runtime": "Python, torch and their libraries (--runtime-gb)",
}


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes beside weights and KV cache; see RESERVE_FORMULAS."""

    activations: int
    logits: int
    rotary_table: int
    gathered_kv: int
    plain_twin: int
    runtime: int

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.rotary_table + self.gathered_kv + self.plain_twin + self.runtime


def reserve(shape: ArchitectureConfig, weights: Weights, kv: KvPrecision, demand: Demand) -> Reserve:
    precision = weights.precision
    attention_width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    width = 2 * shape.hidden_size + 3 * max(shape.intermediate_size, attention_width)
    table_itemsize = _HALF_BYTES if demand.on_cpu else precision.itemsize  # the kernels keep half of a symmetric table, in fp32
    has_twin = precision.is_quantized and not demand.on_cpu and demand.num_devices == 1
    largest = max(matrix.rows * matrix.columns for matrix in matrices(shape))
    before_kv = Reserve(
        activations=_FP32_BYTES * demand.max_num_batched_tokens * width,
        logits=_FP32_BYTES * demand.max_num_seqs * shape.vocab_size,
        rotary_table=2 * shape.max_context_len * shape.head_dim * table_itemsize,
        gathered_kv=0,
        plain_twin=_HALF_BYTES * shape.vocab_size * shape.hidden_size + 6 * largest if has_twin else 0,
        runtime=demand.runtime_bytes,
    )
    if demand.on_cpu:
        return before_kv
    # A copy has the numbers that are computed with, of one layer. It takes of the room that it depends on.
    copied = BLOCK_SIZE * shape.kv_bytes_per_token(max(precision.itemsize, kv.itemsize)) // shape.num_layers
    room = max(demand.memory_bytes - weights.num_bytes - before_kv.total, 0)
    num_blocks = room // (kv.bytes_per_block(shape) + copied)
    # The longest request must fit, and with it its copy, also where the room has no place for either.
    num_blocks = max(num_blocks, num_blocks_of(max(demand.max_model_len, 1), BLOCK_SIZE))
    return replace(before_kv, gathered_kv=copied * min(num_blocks, _MAX_GATHERED_BLOCKS))


@dataclass(frozen=True, slots=True)
class Option:
    """One combination of precisions on one device. `capacity` is None where not one request fits.

    `users` has for each of CONTEXTS how many requests of that length fit at once, None where no request may be so long.
    """

    weights: Weights
    kv: KvPrecision
    reserve: Reserve
    bytes_per_block: int
    kv_bytes: int  # left for the KV cache, less than 0 where the rest alone is too much
    needed_bytes: int  # of the memory, for one request of max_model_len, or of one block
    capacity: Capacity | None
    users: Mapping[int, int | None]

    @property
    def name(self) -> str:
        return f"{self.weights.precision.name} weights, {self.kv.name} KV cache"


def options(shape: ArchitectureConfig, demand: Demand, tensors: Mapping[str, GgufTensor] | None = None) -> tuple[Option, ...]:
    """Every combination, on a CPU with `tensors` of a GGUF as one more. Without those whose groups don't divide the widths.

    Raises ConfigError for devices that can't share the model, CapacityError for a context beyond the model's own.
    """
    check_context(demand.max_model_len, shape.max_context_len)
    mine = shard(shape, demand.num_devices)
    found = [weights_as_shipped(mine, tensors)] if tensors is not None and demand.on_cpu else []
    for precision in WEIGHT_PRECISIONS:
        try:
            found.append(weights_in(mine, precision))
        except ConfigError:
            continue
    return tuple(_option(mine, weights, kv, demand) for weights in found for kv in KV_PRECISIONS)


def _option(shape: ArchitectureConfig, weights: Weights, kv: KvPrecision, demand: Demand) -> Option:
    kept = reserve(shape, weights, kv, demand)
    per_block = kv.bytes_per_block(shape)
    taken = weights.num_bytes + kept.total
    capacity = fit_blocks(
        kv_bytes=demand.memory_bytes - taken,
        bytes_per_block=per_block,
        block_size=BLOCK_SIZE,
        max_model_len=demand.max_model_len,
        max_context_len=shape.max_context_len,
    )
    longest = demand.max_model_len or shape.max_context_len
    num_blocks = 0 if capacity is None else capacity.num_blocks
    return Option(
        weights=weights,
        kv=kv,
        reserve=kept,
        bytes_per_block=per_block,
        kv_bytes=demand.memory_bytes - taken,
        needed_bytes=taken + per_block * num_blocks_of(max(demand.max_model_len, 1), BLOCK_SIZE),
        capacity=capacity,
        users={length: None if length > longest else num_blocks // num_blocks_of(length, BLOCK_SIZE) for length in CONTEXTS},
    )


def shard(shape: ArchitectureConfig, num_devices: int) -> ArchitectureConfig:
    """One device's part: its heads, its share of the wide middle and of the vocabulary. Norms are on every device.

    Key heads are repeated where there are fewer than devices. Raises ConfigError that names the numbers which divide.
    """
    if not _divides(shape, num_devices):
        possible = ", ".join(map(str, device_counts(shape)))
        raise ConfigError(
            f"{shape.num_heads} query heads, {shape.num_kv_heads} key heads and {shape.intermediate_size} columns don't divide "
            f"among {num_devices} devices; possible are {possible}"
        )
    return replace(
        shape,
        num_heads=shape.num_heads // num_devices,
        num_kv_heads=max(shape.num_kv_heads // num_devices, 1),
        intermediate_size=shape.intermediate_size // num_devices,
        vocab_size=-(-shape.vocab_size // num_devices),
    )


def device_counts(shape: ArchitectureConfig) -> Sequence[int]:
    """Numbers of devices that can share the model."""
    return [number for number in range(1, shape.num_heads + 1) if _divides(shape, number)]


def _divides(shape: ArchitectureConfig, num_devices: int) -> bool:
    larger, smaller = max(shape.num_kv_heads, num_devices), min(shape.num_kv_heads, num_devices)
    return not (shape.num_heads % num_devices or shape.intermediate_size % num_devices or larger % smaller)


def fewest_devices(shape: ArchitectureConfig, demand: Demand, weights: str, kv: str) -> int | None:
    """How many GPUs of the same memory it takes to serve these precisions; None if no number that divides the model does."""
    for number in device_counts(shape):
        if number > demand.num_devices:
            for option in options(shape, replace(demand, num_devices=number, on_cpu=False)):
                if (option.weights.precision.name, option.kv.name) == (weights, kv) and option.capacity is not None:
                    return number
    return None
