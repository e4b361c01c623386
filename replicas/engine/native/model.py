"""A decoder on a CPU, whose step is one call into the library. Numbers between its products are fp32.

Weights are packed once at load into one piece of memory, in the formats of `library.FORMATS`; a row's result doesn't depend
on the other rows of its step, bit for bit, in any format (csrc/linear.h and csrc/attention.h say how).
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

from replicas.engine.batch import Batch
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.models.layers import rotary_angles
from replicas.engine.models.model_weights import Matrix, ModelWeights
from replicas.engine.native.cache import NativeKVCache
from replicas.engine.native.library import FORMATS, PHASES, ROW_CLASSES, Library, Linear, Shape, StepBatch
from replicas.engine.native.packing import Packer
from replicas.engine.quantize.formats import QuantizedTensor
from replicas.engine.step_model import StepLogits

_PANEL = 16
_GROUP = 32
_MAX_HEAD_DIM = 256
_EMBEDDING, _HEAD, _QKV, _OUTPUT, _GATE_UP, _DOWN = range(6)  # csrc/api.cpp, place()
_ATTENTION_NORM, _MLP_NORM, _QK_NORM, _LAST_NORM = range(4)


def refusal(architecture: ArchitectureConfig) -> str | None:
    """Why the kernels can't compute this shape; None where they can."""
    widths = {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_heads * head_dim": architecture.num_heads * architecture.head_dim,
    }
    for name, width in widths.items():
        if width % _GROUP:
            return f"{name} {width} is no multiple of {_GROUP}"
    if architecture.head_dim % _PANEL or architecture.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {architecture.head_dim} is no multiple of {_PANEL} up to {_MAX_HEAD_DIM}"
    return None


class NativeModel:
    """`dtype` (fp32 or bf16) is how plain matrices are kept; the quantized ones of `weights` keep their format."""

    def __init__(
        self,
        library: Library,
        architecture: ArchitectureConfig,
        weights: ModelWeights,
        *,
        max_positions: int,
        dtype: str,
        num_threads: int,
    ) -> None:
        self.architecture = architecture
        self.device = torch.device("cpu")
        self.num_threads = num_threads
        self._calls = library.calls
        self._kept: list[object] = []  # what the library points into
        cos, sin = (part.contiguous() for part in rotary_angles(architecture.rope, architecture.head_dim, max_positions))
        self._kept += [cos, sin]
        shape = Shape(
            architecture.vocab_size,
            architecture.hidden_size,
            architecture.num_layers,
            architecture.num_heads,
            architecture.num_kv_heads,
            architecture.head_dim,
            architecture.intermediate_size,
            num_threads,
            architecture.rms_norm_eps,
        )
        self._model = self._calls.ts_create(shape, cos.data_ptr(), sin.data_ptr())
        weakref.finalize(self, self._calls.ts_free, self._model)
        self._packer = Packer(library, dtype)
        self._load(weights)
        self._calls.ts_tune(self._model)
        self._logits = torch.empty(0, architecture.vocab_size)
        self._cache: NativeKVCache | None = None

    def _load(self, weights: ModelWeights) -> None:
        embedding, head = weights.embedding(), weights.head()
        table = self._pack(_EMBEDDING, 0, embedding)
        if head is None:
            self._calls.ts_set_linear(self._model, 0, _HEAD, table, None, None, None)
        else:
            self._pack(_HEAD, 0, head)
        self._norm(0, _LAST_NORM, weights.norm())
        for index in range(self.architecture.num_layers):
            layer = weights.layer(index)
            self._pack(_QKV, index, layer.qkv, layer.qkv_bias)
            self._pack(_OUTPUT, index, layer.output)
            self._pack(_GATE_UP, index, self._interleaved(layer.gate_up))
            self._pack(_DOWN, index, layer.down)
            self._norm(index, _ATTENTION_NORM, layer.attention_norm)
            self._norm(index, _MLP_NORM, layer.mlp_norm)
            if layer.qk_norm is not None:
                self._norm(index, _QK_NORM, layer.qk_norm)

    def _interleaved(self, gate_up: Matrix) -> Matrix:
        """16 rows of gate, 16 of up, 16 of gate, ...: so both of a pair come out of the same task."""
        half = torch.arange(self.architecture.intermediate_size).view(-1, _PANEL)
        index = torch.stack((half, half + self.architecture.intermediate_size), dim=1).flatten()
        return gate_up.take_rows(index) if isinstance(gate_up, QuantizedTensor) else gate_up[index]

    def _norm(self, layer: int, which: int, weight: Tensor) -> None:
        exact = weight.float().contiguous()
        self._kept.append(exact)
        self._calls.ts_set_norm(self._model, layer, which, exact.data_ptr())

    def _pack(self, which: int, layer: int, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        linear, unpacked = self._packer.place(matrix, bias)
        self._calls.ts_set_linear(self._model, layer, which, linear, unpacked.numbers, unpacked.scale, unpacked.minimum)
        return linear

    @property
    def weight_bytes(self) -> int:
        return self._packer.num_bytes

    def use_cache(self, cache: NativeKVCache) -> None:
        """Where keys and values go from now on."""
        self._cache = cache
        self._calls.ts_set_cache(self._model, cache.handle)

    def forward(self, batch: Batch) -> StepLogits | None:
        """Computes the batch's rows into the cache; logits of its sample rows, in a buffer that the next call overwrites."""
        if not batch.spans:
            return None
        assert self._cache is not None
        num_samples = len(batch.sample_rows)
        if num_samples > len(self._logits):
            self._logits = torch.empty(1 << (num_samples - 1).bit_length(), self.architecture.vocab_size)
        token_ids, spans, tables = _arrays(batch)
        sample_rows = np.array(batch.sample_rows, dtype=np.int32)
        best = np.empty(num_samples, dtype=np.int64)
        step = StepBatch(
            len(token_ids),
            len(spans),
            num_samples,
            token_ids.ctypes.data,
            spans.ctypes.data,
            tables.ctypes.data,
            sample_rows.ctypes.data,
            self._logits.data_ptr(),
            best.ctypes.data,
        )
        self._calls.ts_forward(self._model, step)
        return StepLogits(self._logits[:num_samples], best.tolist()) if num_samples else None

    def variants(self) -> dict[str, dict[str, tuple[int, int]]]:
        """By format and number of rows: (panels at a time, rows at a time) of the product that was fastest at load."""
        chosen = np.zeros((len(FORMATS), len(ROW_CLASSES), 2), dtype=np.int32)
        self._calls.ts_variants(self._model, chosen.ctypes.data)
        return {
            format: {rows: (int(panels), int(most)) for rows, (panels, most) in zip(ROW_CLASSES, chosen[index], strict=True)}
            for format, index in FORMATS.items()
        }

    def phase_seconds(self) -> dict[str, float]:
        """Time of one thread in each phase of all steps so far, waiting for the others included."""
        seconds = np.zeros(len(PHASES))
        self._calls.ts_phases(self._model, seconds.ctypes.data)
        return dict(zip(PHASES, seconds.tolist(), strict=True))


def _arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """token_ids [rows], spans [spans, 4] (first row, rows, start, where its table begins), tables [all blocks]; int32."""
    spans: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    for span in batch.spans:
        spans.append((span.first_row, span.num_rows, span.start, len(tables)))
        tables.extend(span.block_table[: math.ceil(span.context_len / _PANEL)])
    return np.array(batch.token_ids, dtype=np.int32), np.array(spans, dtype=np.int32), np.array(tables, dtype=np.int32)
