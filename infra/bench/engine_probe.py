"""What is asked of our engine from within its process: quality of number formats, and where a step's time goes."""

from __future__ import annotations

import pydoc_data.topics
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.schema import AppConfig, EngineConfig, ModelConfig, ReplicasConfig
from replicas.blocks import BLOCK_SIZE, chain_root
from replicas.contract import GenerationRequest, SamplingParams, StepOutput
from replicas.engine.batch import build_batch
from replicas.engine.compute_thread import ComputeThread
from replicas.engine.engine import NativeEngine
from replicas.engine.load_model import load_model
from replicas.engine.runner import load_runner
from replicas.engine.step import SampleSpec, SequenceChunk, StepPlan
from replicas.tokenizer import load_tokenizer

# Prose and code of Python's own documentation, which every interpreter carries: nothing to download.
TEXT_NAME = "Python's help topics (pydoc_data.topics), alphabetically"
NUM_WINDOWS = 16
WINDOW_TOKENS = 512
# By precision: model.dtype and engine.quantization.
FORMATS = {"fp32": ("fp32", "none"), "bf16": ("bf16", "none"), "int8": ("auto", "int8"), "int4": ("auto", "auto")}
_GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0, 0, (), ())
_ROOT = chain_root(b"of the benchmark")
_NUM_WARM = 8


def named_text() -> str:
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows() -> list[list[int]]:
    """Spread over the text."""
    tokens = load_tokenizer(ModelConfig()).encode(named_text(), add_special_tokens=False)
    step = (len(tokens) - WINDOW_TOKENS) // NUM_WINDOWS
    return [tokens[first : first + WINDOW_TOKENS] for first in range(0, step * NUM_WINDOWS, step)]


def load(precision: str, num_threads: int, kv_cache_dtype: str = "auto") -> Any:
    dtype, quantization = FORMATS[precision]
    engine = EngineConfig(device="cpu", quantization=quantization, kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=512 * 2**20)
    return load_model(ModelConfig(dtype=dtype), engine, num_threads=num_threads, replicas_on_node=1).model


def all_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens), vocab] of one sequence from its beginning, in one step."""
    chunk = SequenceChunk("window", tokens, 0, range(-(-len(tokens) // BLOCK_SIZE)), _GREEDY)
    batch = build_batch(StepPlan((chunk,)), BLOCK_SIZE)
    batch.sample_rows[:] = range(len(tokens))
    return torch.as_tensor(model.forward(batch).logits)


@dataclass(frozen=True)
class Quality:
    nats: float  # mean negative log-probability of a token
    best: list[int]  # the likeliest token at each position


def quality(model: Any, texts: Sequence[Sequence[int]], advance: Callable[[], None]) -> Quality:
    """Of a model's predictions of each token from those before it in its window."""
    losses, best = [], []
    for tokens in texts:
        logits = all_logits(model, tokens)[:-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item())
        best += logits.argmax(dim=-1).tolist()
        advance()
    return Quality(statistics.mean(losses), best)


def differing_in_batch(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
    """How many of the prompts' greedy answers change when all are computed together instead of alone."""
    alone = [tokens for prompt in prompts for tokens in _greedy(model, [prompt], num_tokens)]
    return sum(one != other for one, other in zip(alone, _greedy(model, prompts, num_tokens), strict=True))


def _greedy(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    blocks = -(-max(len(prompt) + num_tokens for prompt in prompts) // BLOCK_SIZE)
    tables = [range(index * blocks, (index + 1) * blocks) for index in range(len(prompts))]
    pending, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        chunks = [
            SequenceChunk(str(index), pending[index], starts[index], tables[index], _GREEDY) for index in range(len(prompts))
        ]
        batch = build_batch(StepPlan(tuple(chunks)), BLOCK_SIZE)
        best = model.forward(batch).logits.argmax(dim=-1).tolist()
        for index, token in zip(batch.sample_chunks, best, strict=True):
            starts[index] += len(pending[index])
            pending[index] = [token]
            answers[index].append(token)
    return answers


class StepClock:
    """An engine that really runs, with a clock at each seam of a step."""

    def __init__(self, precision: str, num_threads: int, num_sequences: int) -> None:
        dtype, quantization = FORMATS[precision]
        self._config = AppConfig(
            model=ModelConfig(dtype=dtype),
            engine=EngineConfig(device="cpu", quantization=quantization, kv_cache_bytes=768 * 2**20, num_threads=num_threads),
            replicas=ReplicasConfig(num_cpus=num_threads),
        )
        self._num_sequences = num_sequences
        self.seconds: dict[str, float] = {}

    def run(self, context: int, num_steps: int) -> dict[str, float]:
        """Seconds a step by part, of `num_steps` decode steps of all sequences. "between" is what is outside of the model:
        the sum of plan, lay out, sample, apply and the rest."""
        config = self._config
        thread = ComputeThread()  # the one that loads is the one that steps, as in a replica
        runner = thread.submit(lambda: load_runner(config.model, config.engine, num_cpus=2, replicas_on_node=1)).result()
        engine = NativeEngine.from_runner(config, runner, runner.info(config.engine), thread)
        thread.submit(engine.warm_up).result()
        model = runner._model
        self._watch(model, "forward", "model")
        self._watch(engine._scheduler, "plan", "plan")
        self._watch(engine._scheduler, "apply", "apply")
        self._watch(engine._scheduler, "stats", "stats")
        self._watch(runner._sampler, "sample", "sample")
        self._watch(engine._step_time, "observe", "step-time model")
        done = threading.Event()
        marks: list[tuple[float, dict[str, float]]] = []

        def sink(output: StepOutput) -> None:
            if any(delta.finish_reason for delta in output.deltas):
                done.set()

        step_once = engine.step_once

        def stepping() -> StepOutput | None:
            if engine._scheduler.has_work and len(engine._scheduler._running) == self._num_sequences:
                marks.append((time.perf_counter(), dict(self.seconds)))
            return step_once()

        engine.step_once = stepping  # type: ignore[method-assign]
        engine.start(sink)
        phases_before = model.phase_seconds() if hasattr(model, "phase_seconds") else {}
        for index in range(self._num_sequences):
            prompt = tuple((7 * index + 3 * j) % 4000 + 5 for j in range(context))
            sampling = SamplingParams(num_steps + 2 * _NUM_WARM + self._num_sequences, temperature=0.0, ignore_eos=True)
            engine.submit(GenerationRequest(f"r{index}", prompt, sampling, _ROOT))
        done.wait()
        phases_after = model.phase_seconds() if phases_before else {}
        engine.shutdown()
        first, last = marks[_NUM_WARM], marks[-_NUM_WARM]
        steps = len(marks) - 2 * _NUM_WARM
        parts = {name: (last[1][name] - first[1].get(name, 0.0)) / steps for name in last[1]}
        whole = (last[0] - first[0]) / steps
        parts["whole"] = whole
        parts["between"] = whole - parts["model"]
        total = sum(phases_after.values()) - sum(phases_before.values())
        for name in phases_before:
            parts[f"model: {name}"] = (phases_after[name] - phases_before[name]) / total * parts["model"]
        return parts

    def _watch(self, owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def watched(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        setattr(owner, method, watched)
