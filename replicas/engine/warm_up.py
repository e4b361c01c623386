"""Steps for nobody, before the first request: kernels choose their ways, buffers find their size, the step-time model learns.

Without them a new replica predicts by a prior, and the router would send it work for being optimistic.
"""

from __future__ import annotations

from replicas.contract import EngineInfo, SamplingParams
from replicas.engine.step import SampleSpec, SequenceChunk, StepPlan

_MOST_ROUNDS = 3
_ROUND_SECONDS = 0.3
_CONTEXT = 512
_SHORT_CONTEXT = 64
_BATCH_SIZES = (1, 4, 16)


def warm_up_plans(info: EngineInfo) -> list[StepPlan]:
    """A full prompt chunk, a short one behind a context, and decode steps of several batch sizes, as far as they fit.

    They write into blocks that nobody owns yet.
    """
    capacity = info.num_blocks * info.block_size
    budget = min(info.max_num_batched_tokens, info.max_model_len, capacity)
    context = min(_CONTEXT, info.max_model_len - 1, capacity - 1)
    plans = [
        StepPlan((_chunk(info, 0, 0, 0, budget),)),
        StepPlan((_chunk(info, 0, 0, context // 2, min(budget, context - context // 2)),)),
        StepPlan((_chunk(info, 0, 0, context, 1),)),
    ]
    short = min(_SHORT_CONTEXT, context)
    blocks_each = short // info.block_size + 1
    for size in _BATCH_SIZES:
        if size <= info.max_num_seqs and size * blocks_each <= info.num_blocks:
            plans.append(StepPlan(tuple(_chunk(info, i, i * blocks_each, short, 1) for i in range(size))))
    return plans


def num_rounds(first_seconds: float) -> int:
    """How often to repeat a step whose first run took so long: a slow machine shall start soon as well."""
    return max(1, min(_MOST_ROUNDS, int(_ROUND_SECONDS / max(first_seconds, 1e-9))))


def _chunk(info: EngineInfo, index: int, first_block: int, start: int, num_tokens: int) -> SequenceChunk:
    token_ids = [position % info.vocab_size for position in range(start, start + num_tokens)]
    num_blocks = -(-(start + num_tokens) // info.block_size)
    return SequenceChunk(
        request_id=f"warm-up-{index}",
        token_ids=token_ids,
        start=start,
        block_table=range(first_block, first_block + num_blocks),
        sample=SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0, 0, token_ids, ()),
    )
