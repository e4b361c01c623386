"""A runner without a model that keeps a real KV cache: the next token is a function of what the block table leads to.

So a block that is shared, reused or overwritten wrongly changes the tokens, as it would on a device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from zlib import crc32

from replicas.blocks import BLOCK_SIZE, hash_blocks
from replicas.contract import GenerationRequest, SamplingParams
from replicas.engine.speculate.drafter import DraftRequest, StepLoad
from replicas.engine.speculate.verify import standing
from replicas.engine.step import ChunkResult, DrawnToken, SequenceChunk, StepPlan, StepResult

VOCAB_SIZE = 100
EOS = 0
ROOT = b"root"


def next_token(token_ids: Sequence[int], forbidden: Sequence[int] = ()) -> int:
    token_id = crc32(array("I", token_ids).tobytes()) % VOCAB_SIZE
    while token_id in forbidden:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_output(request: GenerationRequest, max_model_len: int = 2**31) -> list[int]:
    """What the request yields when it is served alone, written down without any engine."""
    params = request.sampling
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    known, output = list(request.prompt_token_ids), []
    while len(output) < params.max_tokens and len(known) < max_model_len:
        may_stop = request.num_prior_output_tokens + len(output) >= params.min_tokens
        output.append(next_token(known, () if may_stop else stops))
        known.append(output[-1])
        if may_stop and output[-1] in stops:
            break
    return output


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    root: bytes = ROOT,
    num_prior_output_tokens: int = 0,
    ignore_eos: bool = True,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        tuple(prompt),
        SamplingParams(max_tokens, ignore_eos=ignore_eos, min_tokens=min_tokens, stop_token_ids=stop_token_ids),
        root,
        hash_blocks(root, prompt),
        num_prior_output_tokens=num_prior_output_tokens,
    )


class ScriptedRunner:
    """`before_run` sees each plan first, and may raise; `plans` keeps (request id, start, number of tokens) per chunk."""

    def __init__(self, num_blocks: int, before_run: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.before_run = before_run
        self.plans: list[list[tuple[str, int, int]]] = []
        self._kv = [-1] * (num_blocks * BLOCK_SIZE)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append([(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks])
        self.before_run(plan)
        for chunk in plan.chunks:
            for i, token_id in enumerate(chunk.token_ids):
                self._kv[self._slot(chunk, chunk.start + i)] = token_id
        return StepResult(tuple(self._outcome(chunk) for chunk in plan.chunks), duration_s=0.01)

    def _slot(self, chunk: SequenceChunk, position: int) -> int:
        return chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def _outcome(self, chunk: SequenceChunk) -> ChunkResult:
        if chunk.sample is None:
            return ChunkResult(chunk.request_id)
        known = [self._kv[self._slot(chunk, i)] for i in range(chunk.start + len(chunk.token_ids))]
        specs = (chunk.sample, *chunk.draft_samples)
        num_known = len(known) - len(chunk.draft_samples)
        drawn = [
            DrawnToken(next_token(known[: num_known + place], spec.forbidden_token_ids)) for place, spec in enumerate(specs)
        ]
        first, *further = standing(known[num_known:], drawn)
        return ChunkResult(chunk.request_id, first.token_id, further=tuple(further))


class ScriptedDrafter:
    """Drafts what will be drawn, and now and then something else; how much depends on the tokens alone."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.known: set[str] = set()
        self.num_accepted = 0

    def draft(self, requests: Sequence[DraftRequest], load: StepLoad, max_tokens: int) -> list[tuple[int, ...]]:
        drafts = []
        for one in requests:
            self.known.add(one.request_id)
            known = list(one.token_ids)
            chance = next_token([*known, 7])
            for _ in range(min(one.limit, self.depth, max_tokens, chance % 7)):
                known.append(next_token(known) if next_token([*known, 8]) % 4 else chance)
            drafts.append(tuple(known[len(one.token_ids) :]))
            max_tokens -= len(drafts[-1])
        return drafts

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        assert request_id in self.known
        assert 0 <= num_accepted <= num_drafted <= self.depth
        self.num_accepted += num_accepted

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)
