"""One request on its way through the engine: its known tokens, how far they are computed, and what it holds. No torch here.

token_ids      |######## computed ########|---- pending ----|
               0              num_computed_tokens     len(token_ids)
block_table    |  named  |  named  | own, unnamed | own...
                         num_published_blocks
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum, auto

from replicas.blocks import BLOCK_SIZE, BlockHash, hash_block
from replicas.contract import FinishReason, GenerationRequest
from replicas.engine.step import SampleSpec, SequenceChunk


class SequenceState(Enum):
    """WAITING sequences hold no blocks; RUNNING ones hold blocks for all their known tokens; FINISHED is for good."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """What the scheduler knows of a request. The scheduler alone changes it."""

    __slots__ = (
        "_forbidden_token_ids",
        "_output_token_ids",
        "_prompt_token_ids",
        "_stop_token_ids",
        "added_s",
        "arrival",
        "block_hashes",
        "block_table",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_generated_tokens",
        "num_published_blocks",
        "queue_s",
        "reported_start",
        "request",
        "state",
        "token_ids",
    )

    def __init__(self, request: GenerationRequest, *, arrival: int, eos_token_ids: Items[int], now: float) -> None:
        self.request = request
        self.arrival = arrival  # grows by 1 per request: the order of service
        self.added_s = now
        self.state = SequenceState.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0  # here; without the prior output
        self.block_table: list[int] = []
        self.block_hashes: list[BlockHash] = list(request.block_hashes)
        self.num_published_blocks = 0
        self.num_cached_tokens: int | None = None  # at the first schedule
        self.queue_s: float | None = None  # until the first schedule
        self.reported_start = False  # the first Delta has gone out

        num_prior = request.num_prior_output_tokens
        split = len(self.token_ids) - num_prior
        self._prompt_token_ids = request.prompt_token_ids[:split] if num_prior else request.prompt_token_ids
        self._output_token_ids = self.token_ids[split:]
        stops = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops.update(eos_token_ids)
        self._stop_token_ids = frozenset(stops)
        self._forbidden_token_ids = tuple(sorted(stops))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_blocks_needed(self) -> int:
        """Blocks that hold all known tokens."""
        return -(-len(self.token_ids) // BLOCK_SIZE)

    @property
    def num_reusable_blocks(self) -> int:
        """Blocks that may come from the cache: never the last known token's, for the next token's logits come from it."""
        return min(len(self.block_hashes), (len(self.token_ids) - 1) // BLOCK_SIZE)

    @property
    def num_computed_blocks(self) -> int:
        """Full ones."""
        return self.num_computed_tokens // BLOCK_SIZE

    def block_hash(self, index: int) -> BlockHash:
        """Name of full block `index`, continuing the request's chain by at most one block."""
        if index == len(self.block_hashes):
            parent = self.block_hashes[-1] if self.block_hashes else self.request.hash_root
            self.block_hashes.append(hash_block(parent, self.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]))
        return self.block_hashes[index]

    @property
    def max_drafts(self) -> int:
        """Draft tokens that could be accepted, with one token more, before the answer is as long as the request wants it."""
        return self.request.sampling.max_tokens - self.num_generated_tokens - 1

    def chunk(self, num_tokens: int, draft_token_ids: tuple[int, ...] = ()) -> SequenceChunk:
        """The next `num_tokens` pending tokens as work for the runner; with draft tokens only if these are all."""
        start = self.num_computed_tokens
        token_ids = self.token_ids[start : start + num_tokens]
        if start + num_tokens < len(self.token_ids):
            assert not draft_token_ids
            return SequenceChunk(self.request.request_id, token_ids, start, self.block_table, None)
        if not draft_token_ids:
            return SequenceChunk(self.request.request_id, token_ids, start, self.block_table, self._sample_spec(()))
        specs = [self._sample_spec(draft_token_ids[:count]) for count in range(len(draft_token_ids) + 1)]
        token_ids.extend(draft_token_ids)
        return SequenceChunk(self.request.request_id, token_ids, start, self.block_table, specs[0], tuple(specs[1:]))

    def append(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Take a sampled token; the reason if it is the last."""
        may_stop = len(self._output_token_ids) >= self.request.sampling.min_tokens
        self.token_ids.append(token_id)
        self._output_token_ids.append(token_id)
        self.num_generated_tokens += 1
        if may_stop and token_id in self._stop_token_ids:
            return FinishReason.STOP
        if self.num_generated_tokens >= self.request.sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def _sample_spec(self, draft_token_ids: tuple[int, ...]) -> SampleSpec:
        """For the token after `draft_token_ids`, as if they had been drawn."""
        params = self.request.sampling
        position = len(self._output_token_ids) + len(draft_token_ids)
        return SampleSpec(
            params=params,
            choice=self.request.choice,
            position=position,
            prompt_token_ids=self._prompt_token_ids,
            output_token_ids=[*self._output_token_ids, *draft_token_ids] if draft_token_ids else self._output_token_ids,
            forbidden_token_ids=self._forbidden_token_ids if position < params.min_tokens else (),
        )
