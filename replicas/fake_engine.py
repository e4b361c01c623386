"""An Engine without a model: the native engine's own scheduler and cache, and a runner that computes nothing.

Tokens are a pure function of (prompt, seed, choice, output position); a step takes as long as a law says. Two ways to run:
- `start(sink)`: a thread, as the native engine's, that sleeps through its steps. For demos and tests of what is around;
- `step_once()` and `last_step_s`: for simulations, with their clock and a `sleep` that returns at once. A step that is taken
  at `now` is over, and its output out, at `now + last_step_s`; the next one may be taken then.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import log

from configs.schema import AppConfig, EngineConfig
from replicas.blocks import BLOCK_SIZE
from replicas.contract import EngineInfo, StepOutput, StepTimeCoefficients, TokenLogprob
from replicas.engine.capacity import plan_capacity
from replicas.engine.engine import NativeEngine
from replicas.engine.step import ChunkResult, SampleSpec, SequenceChunk, StepPlan, StepResult
from replicas.model_source import architecture, eos_token_ids, model_revision
from replicas.step_time import StepTimeModel, predict

_KV_CACHE_BYTES = 2**30  # where the configuration leaves it open
_KV_ITEM_BYTES = 2
_UINT64 = 2**64 - 1


def step_law(engine: EngineConfig) -> StepTimeCoefficients:
    return StepTimeCoefficients(
        base_s=engine.fake_base_s,
        per_token_s=engine.fake_per_token_s,
        per_context_s=0.0,
        per_sequence_s=engine.fake_per_sequence_s,
    )


class FakeRunner:
    """replicas.engine.engine.Runner by `law`. `sleep` is called once a step with its seconds.

    With `tokens_per_step` > 1 only each so-manieth decode step takes its time and those between take none, so tokens come
    in bursts. An answer has no end but `max_tokens`, unless `num_answer_tokens` is given: then its last is `eos_token_id`.
    """

    def __init__(
        self,
        law: StepTimeCoefficients,
        vocab_size: int,
        *,
        tokens_per_step: int = 1,
        eos_token_id: int | None = None,
        num_answer_tokens: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert num_answer_tokens is None or eos_token_id is not None
        self._law = law
        # The middle of a vocabulary is words; control tokens and single bytes sit at its ends.
        self._first_id = vocab_size // 8
        self._num_ids = max(vocab_size * 3 // 4 - self._first_id, 1)
        self._tokens_per_step = tokens_per_step
        self._eos_token_id = eos_token_id
        self._eos_position = None if num_answer_tokens is None else num_answer_tokens - 1
        self._sleep = sleep
        self._num_decode_steps = 0
        self._prompts: dict[str, tuple[Sequence[int], bytes]] = {}  # of the last step's requests, with their digests

    def run(self, plan: StepPlan) -> StepResult:
        self._prompts = {chunk.request_id: self._prompt(chunk, chunk.sample) for chunk in plan.chunks if chunk.sample}
        duration_s = self._duration_s(plan)
        if duration_s > 0.0:
            self._sleep(duration_s)
        return StepResult(tuple(self._result(chunk) for chunk in plan.chunks), duration_s)

    def _duration_s(self, plan: StepPlan) -> float:
        if all(len(chunk.token_ids) == 1 for chunk in plan.chunks):
            self._num_decode_steps += 1
            if self._num_decode_steps % self._tokens_per_step:
                return 0.0
        return predict(self._law, plan.num_tokens, plan.num_context_tokens, len(plan.chunks))

    def _prompt(self, chunk: SequenceChunk, spec: SampleSpec) -> tuple[Sequence[int], bytes]:
        """The digest is kept while the request decodes: a long prompt is not hashed again for each token."""
        known = self._prompts.get(chunk.request_id)
        if known is not None and known[0] is spec.prompt_token_ids:
            return known
        return spec.prompt_token_ids, blake2b(array("I", spec.prompt_token_ids).tobytes(), digest_size=16).digest()

    def _result(self, chunk: SequenceChunk) -> ChunkResult:
        spec = chunk.sample
        if spec is None:
            return ChunkResult(chunk.request_id)
        token_id = self._token_id(spec, self._prompts[chunk.request_id][1])
        num_top = spec.params.num_logprobs
        return ChunkResult(chunk.request_id, token_id, None if num_top is None else self._logprob(token_id, num_top))

    def _token_id(self, spec: SampleSpec, prompt_digest: bytes) -> int:
        forbidden = spec.forbidden_token_ids
        if spec.position == self._eos_position and self._eos_token_id is not None and self._eos_token_id not in forbidden:
            return self._eos_token_id
        params = spec.params
        seed, choice = (0, 0) if params.temperature == 0.0 else (params.seed & _UINT64, spec.choice)
        key = prompt_digest + struct.pack("<QQQ", seed, choice, spec.position)
        offset = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") % self._num_ids
        candidates = (self._first_id + (offset + step) % self._num_ids for step in range(self._num_ids))
        return next((token_id for token_id in candidates if token_id not in forbidden), self._first_id)

    def _logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        """The token has probability 1/2, the ids after it half of the one before: a law, if not the one drawn from."""
        ids = ((token_id - self._first_id + rank) % self._num_ids + self._first_id for rank in range(num_top))
        top = tuple((other, -(rank + 1) * log(2.0)) for rank, other in enumerate(ids))
        return TokenLogprob(token_id, -log(2.0), top)


class FakeEngine(NativeEngine):
    """The native engine over a FakeRunner. `last_step_s` is how long the last `step_once` takes, 0 if it computed nothing."""

    last_step_s = 0.0

    def step_once(self) -> StepOutput | None:
        self.last_step_s = 0.0
        return super().step_once()

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        self.last_step_s = result.duration_s
        return result


def build(
    config: AppConfig,
    *,
    num_answer_tokens: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FakeEngine:
    """The fake of the engine that `config` describes: same vocabulary, same number of KV blocks, same limits.

    Reads what the model's files say of it, but no weights. Raises ConfigError if there are none, CapacityError as the
    native engine does.
    """
    engine, model = config.engine, config.model
    shape, ends = architecture(model), eos_token_ids(model)
    capacity = plan_capacity(
        kv_bytes=engine.kv_cache_bytes or _KV_CACHE_BYTES,
        bytes_per_token=shape.kv_bytes_per_token(_KV_ITEM_BYTES),
        block_size=BLOCK_SIZE,
        max_model_len=model.max_model_len,
        max_context_len=shape.max_context_len,
    )
    runner = FakeRunner(
        step_law(engine),
        shape.vocab_size,
        tokens_per_step=engine.fake_tokens_per_step,
        eos_token_id=ends[0] if ends else None,
        num_answer_tokens=num_answer_tokens,
        sleep=sleep,
    )
    info = EngineInfo(
        model_name=model.served_name,
        model_revision=model_revision(model),
        vocab_size=shape.vocab_size,
        max_model_len=capacity.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=capacity.num_blocks,
        eos_token_ids=ends,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )
    return FakeEngine(
        runner,
        info,
        StepTimeModel(),
        max_queued_requests=engine.max_queued_requests,
        chunked_prefill=engine.chunked_prefill,
        prefix_caching=engine.prefix_caching,
        clock=clock,
    )
