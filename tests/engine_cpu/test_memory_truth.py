"""The plan's figures against real ones: transformers' models, a GGUF's header, quantized tensors, allocated caches."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import transformers

from cluster.plan import read
from configs.schema import EMBEDDED_MODEL, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.models.config import from_hf_config
from replicas.engine.weights import open_checkpoint
from replicas.memory_plan import (
    KV_PRECISIONS,
    WEIGHT_PRECISIONS,
    num_parameters,
    vector_bytes,
    weights_as_shipped,
    weights_in,
)
from replicas.model_source import gguf_header, resolve
from tests.engine_cpu.tiny_models import CONFIGS, make

NUM_BLOCKS = 7
# What stays in numbers is loaded in fp32 here.
QUANTIZATION = {"fp32": "none", "int8": "int8", "int4": "int4"}


class Numbers:
    """A checkpoint that keeps nothing quantized."""

    def __init__(self, checkpoint) -> None:
        self.tensor = checkpoint.tensor

    def quantized(self, name, shape):
        return None


@pytest.fixture(scope="module")
def embedded():
    return read(EMBEDDED_MODEL)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_that_transformers_builds(name):
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    written = {**config.to_dict(), "architectures": [type(model).__name__]}
    assert num_parameters(from_hf_config(written)) == sum(parameter.numel() for parameter in model.parameters())


def test_the_embedded_model_is_planned_as_large_as_its_file_says(embedded):
    """Each tensor's bytes from where it begins to where the next does, which differ by padding alone."""
    path = resolve(ModelConfig()).path
    offsets = sorted(tensor.offset for tensor in gguf_header(path).tensors.values())
    in_file = path.stat().st_size - offsets[0]
    planned = weights_as_shipped(embedded.shape, embedded.tensors)
    assert 0 <= in_file - planned.num_bytes < 32 * len(offsets)
    assert planned.remark == "shipped: 1 x Q8_0, 210 x Q4_1"
    [int4] = [one for one in WEIGHT_PRECISIONS if one.name == "int4"]
    assert weights_in(embedded.shape, int4).num_bytes == planned.num_bytes


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("precision", [one for one in WEIGHT_PRECISIONS if one.name in QUANTIZATION], ids=lambda one: one.name)
def test_weights_take_what_the_engine_loads(tmp_path, name, precision):
    model_weights = pytest.importorskip("replicas.engine.models.model_weights")
    make(name, tmp_path)
    source = ModelConfig(source=str(tmp_path))
    shape = read(source.source).shape
    loaded = model_weights.ModelWeights(shape, Numbers(open_checkpoint(resolve(source), shape)), QUANTIZATION[precision.name])
    parts = [loaded.embedding(), loaded.head(), loaded.norm()]
    for index in range(shape.num_layers):
        layer = loaded.layer(index)
        parts += [getattr(layer, field.name) for field in fields(layer)]
    assert sum(map(tensor_bytes, parts)) == weights_in(shape, precision).num_bytes
    assert sum(part.nbytes for part in parts if is_vector(part)) == vector_bytes(shape)


def is_vector(part) -> bool:
    return isinstance(part, torch.Tensor) and (part.dim() == 1 or part.shape[-1] < 48)  # 48: norms of heads are narrower


def tensor_bytes(part) -> int:
    if part is None:
        return 0
    if isinstance(part, torch.Tensor):
        return part.nbytes
    return sum(tensor_bytes(getattr(part, name)) for name in ("data", "scale", "minimum"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_what_torchs_cache_allocates(embedded, dtype):
    shape = embedded.shape
    cache = KVCache(
        num_layers=shape.num_layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    [precision] = [one for one in KV_PRECISIONS if one.itemsize == dtype.itemsize]
    assert cache._data.nbytes == NUM_BLOCKS * precision.bytes_per_block(shape)


@pytest.mark.parametrize("precision", KV_PRECISIONS, ids=lambda one: one.name)
def test_a_block_takes_what_the_native_cache_allocates(embedded, precision):
    native_cache = pytest.importorskip("replicas.engine.native.cache")
    library = pytest.importorskip("replicas.engine.native.library").load()
    if library is None:
        pytest.skip("the native kernels are not built")
    shape = embedded.shape
    cache = native_cache.NativeKVCache(
        library,
        format=precision.name,
        num_layers=shape.num_layers,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    scales = cache._scales.nbytes if precision.scale_bytes else 0
    assert len(cache._numbers) + scales == NUM_BLOCKS * precision.bytes_per_block(shape)
