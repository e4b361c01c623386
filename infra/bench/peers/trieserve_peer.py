"""Our own engine, through the same protocol as the others. Run by the project's interpreter."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import protocol

from configs.schema import AppConfig, EngineConfig, ModelConfig, ReplicasConfig
from replicas.blocks import chain_root
from replicas.build import build_engine
from replicas.contract import GenerationRequest, SamplingParams, StepOutput

# By the precision's name. The file's own weights are Q4_1 layers with a Q8_0 head, which is what int4 means here.
_FORMATS: dict[str, tuple[str, str]] = {
    "fp32": ("fp32", "none"),
    "bf16": ("bf16", "none"),
    "int8": ("auto", "int8"),
    "int4": ("auto", "auto"),
}
_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4  # of the embedded model in fp32, the largest
_ROOT = chain_root(b"of the benchmark")


class Ours:
    method = "timed as step outputs reach the engine's sink"

    def __init__(self, job: protocol.Job) -> None:
        dtype, quantization = _FORMATS[job.precision]
        options: dict[str, Any] = {"device": "cpu", "num_threads": job.threads, "prefix_caching": False}
        room = (job.max_context + 32) * job.max_sequences * _BYTES_PER_TOKEN
        options |= {"kv_cache_bytes": room, "quantization": quantization, "max_num_seqs": job.max_sequences, **job.options}
        config = AppConfig(
            model=ModelConfig(source=job.model, dtype=dtype),
            engine=EngineConfig(**options),
            replicas=ReplicasConfig(num_cpus=job.threads),
        )
        self._engine = build_engine(config)
        self._engine.start(self._take)
        self.version, self.options = "this checkout", {"dtype": dtype, **options}
        self._num_requests = 0
        self._lock = threading.Condition()
        self._answers: dict[str, list[int]] = {}
        self._unfinished: set[str] = set()
        self._window: protocol.DecodeWindow | None = None

    def generate(self, prompts: protocol.Prompts, num_tokens: int, window: protocol.DecodeWindow) -> list[list[int]]:
        with self._lock:
            names = [f"{self._num_requests + index}" for index in range(len(prompts))]
            self._num_requests += len(prompts)
            self._answers = {name: [] for name in names}
            self._unfinished = set(names)
            self._window = window
            for name, prompt in zip(names, prompts, strict=True):
                sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
                self._engine.submit(GenerationRequest(name, tuple(prompt), sampling, _ROOT))
            self._lock.wait_for(lambda: not self._unfinished)
            return [self._answers[name] for name in names]

    def _take(self, output: StepOutput) -> None:
        with self._lock:
            for delta in output.deltas:
                self._answers[delta.request_id].extend(delta.token_ids)
                if delta.finish_reason:
                    self._unfinished.discard(delta.request_id)
            if output.deltas and self._window is not None:
                self._window.note([len(answer) for answer in self._answers.values()])
            if not self._unfinished:
                self._lock.notify()


if __name__ == "__main__":
    protocol.serve(Ours)
