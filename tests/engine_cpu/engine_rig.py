"""The native engine around a loaded model, stepped by the test: requests in, whole answers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from paged_model import make_cache

from configs.schema import AppConfig, EngineConfig
from replicas.blocks import BLOCK_SIZE, chain_root
from replicas.contract import (
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)
from replicas.engine.attention.paged import PagedAttention
from replicas.engine.attention.reference import ReferenceAttention
from replicas.engine.capacity import Capacity
from replicas.engine.engine import NativeEngine, Runner
from replicas.engine.models.llama import LlamaModel
from replicas.engine.native.cache import NativeKVCache
from replicas.engine.native.library import load
from replicas.engine.native.model import NativeModel
from replicas.engine.runner import Runner as ModelRunner
from replicas.engine.step_model import StepModel
from replicas.engine.torch_model import TorchModel

ROOT = chain_root(b"of the tests")


@dataclass
class Answer:
    """A request's deltas put together."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int | None = None
    error: ErrorInfo | None = None


def collect(answers: dict[str, Answer], output: StepOutput) -> None:
    for delta in output.deltas:
        answer = answers.setdefault(delta.request_id, Answer())
        assert answer.finish_reason is None, f"{delta.request_id} goes on after its end"
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs or ()
        answer.finish_reason = delta.finish_reason
        answer.error = delta.error
        if delta.num_cached_tokens is not None:
            answer.num_cached_tokens = delta.num_cached_tokens


def request(
    request_id: str, prompt: Iterable[int], max_tokens: int, *, root: bytes = ROOT, choice: int = 0, **sampling: object
) -> GenerationRequest:
    """Greedy and endless but for `max_tokens`, unless `sampling` says otherwise."""
    params = SamplingParams(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerationRequest(request_id, tuple(prompt), params, root, choice=choice)


def resumed(original: GenerationRequest, token_ids: list[int], num_done: int) -> GenerationRequest:
    """What is sent elsewhere when an answer's replica is lost after `num_done` of its tokens."""
    return replace(
        original,
        prompt_token_ids=(*original.prompt_token_ids, *token_ids[:num_done]),
        sampling=replace(original.sampling, max_tokens=original.sampling.max_tokens - num_done),
        num_prior_output_tokens=num_done,
    )


def step_model(model: LlamaModel | NativeModel, num_blocks: int, attention: str) -> StepModel:
    """With a cache of its own; a native model loses the one it had."""
    config = model.architecture
    if isinstance(model, NativeModel):
        sizes = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        model.use_cache(NativeKVCache(load(), format="fp32", num_blocks=num_blocks, **sizes))
        return model
    cache = make_cache(config, num_blocks, dtype=model.dtype)
    backend = PagedAttention(cache, config.num_heads) if attention == "auto" else ReferenceAttention(cache)
    return TorchModel(model, cache, backend)


def make_engine(
    model: LlamaModel | NativeModel,
    *,
    num_blocks: int = 512,
    max_model_len: int = 256,
    wrap: Callable[[ModelRunner], Runner] = lambda runner: runner,
    **options: object,
) -> NativeEngine:
    """An engine with a cache of its own; `options` are EngineConfig's."""
    config = AppConfig(engine=EngineConfig(**options))
    runner = ModelRunner(
        step_model(model, num_blocks, config.engine.attention),
        Capacity(num_blocks, min(max_model_len, num_blocks * BLOCK_SIZE)),
        eos_token_ids=(2,),
        model_name="tested",
        model_revision="",
    )
    return NativeEngine.from_runner(config, wrap(runner), runner.info(config.engine))


def serve(engine: NativeEngine, *requests: GenerationRequest) -> dict[str, Answer]:
    """The answers to requests that all arrive at once."""
    for one in requests:
        engine.submit(one)
    answers: dict[str, Answer] = {}
    while (output := engine.step_once()) is not None:
        collect(answers, output)
    assert all(answer.finish_reason for answer in answers.values())
    return answers


def serve_alone(engine: NativeEngine, *requests: GenerationRequest) -> dict[str, Answer]:
    """The answers to requests that arrive one after the other, each when the last is done."""
    answers: dict[str, Answer] = {}
    for one in requests:
        answers |= serve(engine, one)
    return answers


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {request_id: answer.token_ids for request_id, answer in answers.items()}


def assert_nothing_is_held(engine: NativeEngine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pending_tokens, stats.num_blocks_used) == (0, 0, 0, 0)
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
    assert stats.started_total == sum(stats.finished_total.values())
