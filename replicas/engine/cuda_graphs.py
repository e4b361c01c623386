"""Decode steps as CUDA graphs. A decode step of a small model is hundreds of short kernels, and launching them one by one from
Python takes longer than computing them. A graph launches them all at once.

    first step of a bucket    fill buffers -> run twice on a side stream -> capture -> replay
    later steps               fill buffers -> replay

A graph fixes shapes and addresses, so a step is rounded up to a bucket and its numbers go to fixed buffers
(attention/static.py). Steps with anything but decode tokens take the ordinary path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.attention.static import Bucket, Buckets, DecodeBuffers, StaticAttention
from replicas.engine.batch import Batch
from replicas.engine.models.llama import LlamaModel

Replay = Callable[[], None]
Capture = Callable[[Replay], Replay]
"""Makes of a function one that does the same with the numbers that the same tensors hold by then."""

# The first run of a shape allocates workspaces and chooses kernels, neither of which may happen in a capture.
_WARM_UP_RUNS = 2


def run_directly(function: Replay) -> Replay:
    """The plain twin of CudaCapture: nothing is captured, the function itself runs again."""
    return function


class CudaCapture:
    """Graphs that share one pool of memory: they never run at the same time, so it is as large as the largest needs."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Replay) -> Replay:
        """`function` runs before it is captured, so it must bear being run again with the same inputs."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the driver meanwhile, how much memory is free for instance.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


class GraphedDecode:
    """`padding_block` is a block of the cache that no sequence ever gets. One thread at a time.

    On a device other than CUDA it does the same without graphs: slower than the ordinary path there, but the same code.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        *,
        max_seqs: int,
        max_model_len: int,
        padding_block: int,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._buckets = Buckets(max_seqs, -(-max_model_len // cache.block_size))
        self._buffers = DecodeBuffers(cache, self._buckets, padding_block)
        self._attention = StaticAttention(cache)
        # One for all buckets. Were a graph's own output kept, the pool would have to hold those of all graphs.
        self._logits = torch.zeros(max_seqs, model.architecture.vocab_size, dtype=model.dtype, device=model.device)
        self._capture = capture or (CudaCapture(cache.device) if cache.device.type == "cuda" else run_directly)
        self._replays: dict[Bucket, Replay] = {}
        self._closed = False

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    @property
    def max_graphs(self) -> int:
        return len(self._buckets.all())

    def capture_all(self) -> None:
        """Capture every bucket now, so that no request waits for one. The largest comes first: the others fit in its memory."""
        with torch.inference_mode():
            for bucket in self._buckets.all():
                self._buffers.fill(None, bucket)
                self._replay(bucket)

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [len(batch.sample_rows), vocab_size], valid until the next run; the cache is written.

        None, with nothing done, where the batch is not one of decode tokens alone, samples nothing, or is outside the buckets.
        """
        if self._closed:
            return None
        bucket = self._buckets.choose(batch.spans, self._cache.block_size)
        if bucket is None or not batch.sample_rows:
            return None
        with torch.inference_mode():
            if batch.fresh_blocks:
                self._cache.zero_blocks(batch.fresh_blocks)
            self._buffers.fill(batch, bucket)
            self._replay(bucket)
            if len(batch.sample_rows) < len(batch.spans):
                return self._logits[torch.tensor(batch.sample_rows, device=self._logits.device)]
            return self._logits[: len(batch.spans)]

    def close(self) -> None:
        """Give the graphs' memory back to torch. For good: whatever comes after takes the ordinary path."""
        self._replays.clear()
        self._closed = True

    def _replay(self, bucket: Bucket) -> None:
        if bucket not in self._replays:
            self._replays[bucket] = self._capture(lambda: self._forward(bucket))
        self._replays[bucket]()

    def _forward(self, bucket: Bucket) -> None:
        """What is captured: reads the buffers, writes cache and logits. No number may pass through the host here."""
        inputs = self._buffers.views(bucket)
        step = self._attention.begin(inputs.block_tables, inputs.context_lens)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.slots, self._cache, step)
        self._logits[: bucket.num_seqs].copy_(self._model.logits(hidden))
