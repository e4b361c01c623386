"""The least time that a step can take on a machine, and what the machine can do at best.

    least seconds = max(bytes / bandwidth, operations / rate)
    bytes         = every weight once + keys and values of all contexts, read once for all queries of a sequence
    operations    = products of the rows with the weights (the head for sampled rows alone) + of queries with keys and values

The rate is that of the number format that the products are made in: bf16, or int8 where inputs are rounded to 8 bits.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.native.library import load
from replicas.memory_plan import KV_PRECISIONS, WEIGHT_PRECISIONS, weights_in

READ_BYTES = 512 * 2**20
NUM_ROUNDS = 5
PREFILL_TOKENS = 1024
PRODUCT_FORMATS = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}
_PRODUCT_SIZES = (256, 2048)
_MOST_SECONDS = 2.0
_KINDS = ("fp32", "bf16", "int8")  # csrc/machine.h
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Machine:
    """`bytes_per_s` read from memory, `multiplies_per_s` by number format; both by `num_threads` threads."""

    num_threads: int
    bytes_per_s: float
    multiplies_per_s: dict[str, float]
    sources: dict[str, str]  # whose figure each is

    def at_least(self, bytes_per_s: float, source: str) -> Machine:
        """The same machine, if somebody was seen to read faster."""
        if bytes_per_s <= self.bytes_per_s:
            return self
        return replace(self, bytes_per_s=bytes_per_s, sources={**self.sources, "bandwidth": source})


@dataclass(frozen=True)
class Step:
    """`contexts`: for each sequence how many tokens it attends to, itself included; `rows` are computed, `samples` sampled."""

    rows: int
    contexts: tuple[int, ...]
    samples: int
    keys_per_row: int  # mean number of keys that a row's queries meet


def decode(num_sequences: int, context: int) -> Step:
    return Step(num_sequences, (context,) * num_sequences, num_sequences, context)


def chunk(num_tokens: int, start: int) -> Step:
    """Of one prompt, `start` tokens of which are there."""
    return Step(num_tokens, (start + num_tokens,), 1, start + num_tokens // 2)


def measure_machine(num_threads: int) -> Machine:
    """Takes some seconds. The best of our own loops and torch's for each figure."""
    torch.set_num_threads(num_threads)
    library = load()
    data = np.frombuffer(mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    data[:] = 1
    rates = {"bandwidth": {"torch": _torch_read_rate(data)}}
    for kind in _KINDS:
        rates[kind] = {"torch": _torch_rate(kind)}
    if library is not None:
        read = library.calls.ts_read_rate(data.ctypes.data, READ_BYTES, num_threads, NUM_ROUNDS)
        rates["bandwidth"]["our loops"] = read
        for index, kind in enumerate(_KINDS):
            rates[kind]["our loops"] = library.calls.ts_multiply_rate(index, num_threads, NUM_ROUNDS)
    best = {name: max(found, key=lambda source, found=found: found[source]) for name, found in rates.items()}
    figures = {name: rates[name][source] for name, source in best.items()}
    return Machine(num_threads, figures.pop("bandwidth"), figures, best)


def _least_seconds(call: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(NUM_ROUNDS + 1):
        started = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - started)
    return least


def _torch_read_rate(data: np.ndarray) -> float:
    words = torch.from_numpy(data).view(torch.int64)
    return READ_BYTES / _least_seconds(words.max)


def _torch_rate(kind: str) -> float:
    """Where torch has no kernel for a format, a large product takes minutes: a small one tells whether to try."""
    rate = 0.0
    for size in _PRODUCT_SIZES:
        if rate and size**3 / rate * NUM_ROUNDS > _MOST_SECONDS:
            break
        rate = max(rate, size**3 / _least_seconds(_torch_product(kind, size)))
    return rate


def _torch_product(kind: str, size: int) -> Callable[[], object]:
    if kind == "int8":
        a = torch.ones((size, size), dtype=torch.int8)
        return lambda: torch._int_mm(a, a)
    b = torch.ones((size, size), dtype=_DTYPES[kind])
    return lambda: b @ b


def weight_bytes(architecture: ArchitectureConfig, precision: str) -> int:
    [named] = [one for one in WEIGHT_PRECISIONS if one.name == precision]
    return weights_in(architecture, named).num_bytes


def step_bytes(architecture: ArchitectureConfig, precision: str, kv: str, step: Step) -> int:
    [named] = [one for one in KV_PRECISIONS if one.name == kv]
    per_token = named.bytes_per_block(architecture) / 16
    return weight_bytes(architecture, precision) + round(per_token * sum(step.contexts))


def step_multiplies(architecture: ArchitectureConfig, step: Step) -> int:
    query = architecture.num_heads * architecture.head_dim
    key_value = architecture.num_kv_heads * architecture.head_dim
    layer = architecture.hidden_size * (2 * query + 2 * key_value + 3 * architecture.intermediate_size)
    attention = 2 * query * step.keys_per_row
    head = architecture.vocab_size * architecture.hidden_size
    return architecture.num_layers * (layer + attention) * step.rows + head * step.samples


def least_seconds(machine: Machine, architecture: ArchitectureConfig, precision: str, kv: str, step: Step) -> float:
    reading = step_bytes(architecture, precision, kv, step) / machine.bytes_per_s
    multiplying = step_multiplies(architecture, step) / machine.multiplies_per_s[PRODUCT_FORMATS[precision]]
    return max(reading, multiplying)


def least_prefill_seconds(machine: Machine, architecture: ArchitectureConfig, precision: str, kv: str, tokens: int) -> float:
    """Of a prompt in chunks of 512 tokens, as the engine computes it."""
    chunks = [chunk(min(512, tokens - start), start) for start in range(0, tokens, 512)]
    return sum(least_seconds(machine, architecture, precision, kv, one) for one in chunks)
